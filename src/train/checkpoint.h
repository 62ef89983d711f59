#pragma once
// Checkpoints: RUN/ckpt/step_00001200/{MANIFEST.json, model.safetensors, config.json, optim.safetensors,
// state.json, config.yaml}. Weights under Hugging Face names, so that a plain Qwen3 layout loads as such.
// Protocol of RELIABILITY 6: snapshot with checksums taken from memory, staging folder, fsync, rename,
// manifest covering every byte, newest valid wins, rotation only after the new one is durable.
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "config/config.h"
#include "core/context.h"
#include "core/tensor.h"

namespace sluice {

struct NamedTensor {
  std::string name;
  Tensor tensor;                    // what is held here of it
  std::vector<int64_t> shape = {};  // of the whole, where `tensor` (rank 1) is a slice of it; empty: it is the whole
  int64_t begin = 0;                // first element of the slice, in the whole's row-major order
};

/// What one checkpoint holds. Tensors are views of live memory.
struct CheckpointContent {
  int64_t step = 0;
  std::vector<NamedTensor> weights;    // model.safetensors
  std::vector<NamedTensor> optimizer;  // optim.safetensors: NAME.m, NAME.v, NAME.master
  nlohmann::json state;                // state.json: counters, spike window, skip list, data fingerprint
  std::string config_yaml;             // the resolved configuration
  nlohmann::json hf_config;            // config.json
};

/// A checkpoint on disk whose manifest and checksums hold.
struct CheckpointInfo {
  std::string path;
  int64_t step = 0;
  nlohmann::json state;
  std::string config_yaml;
};

class CheckpointStore {
 public:
  /// folder = RUN/ckpt. Removes litter of interrupted saves (.staging-*, .trash-*, *.tmp). With async, memory
  /// for one snapshot of `content`'s tensors is taken here, once, before training; likewise when they are on the GPU of
  /// `ctx`, from where every save brings them through pinned buffers.
  CheckpointStore(std::string folder, const CheckpointConfig& config, const CheckpointContent& content,
                  Context* ctx = nullptr);
  ~CheckpointStore();  // waits for a save under way

  /// Takes the snapshot now (refusing non-finite weights) and writes it, in the background when config.async.
  /// One save is under way at most: a second call waits. A failed save warns, leaves older checkpoints alone
  /// and returns; last_error() tells. Durable when saved_step() says so.
  void save(const CheckpointContent& content);
  /// Waits for the save under way. False if the last save failed.
  bool wait();
  int64_t saved_step() const;  // newest durable step of this run, or -1
  std::string last_error() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// All step folders, newest first, whether valid or not.
std::vector<std::string> list_checkpoints(const std::string& folder);
/// Verifies manifest, sizes and checksums of every file. Throws Error(data) that names file and reason.
CheckpointInfo verify_checkpoint(const std::string& path);
/// Newest valid checkpoint: damaged ones are passed over with a warning each. Returns an empty path when
/// there is none at all; throws Error(data) "no valid checkpoint; refusing to start from scratch" when some
/// exist and none is valid.
CheckpointInfo newest_valid_checkpoint(const std::string& folder);
/// Removes all but the newest keep_last valid checkpoints and those at multiples of keep_every_steps (0:
/// none). Returns the removed paths. Nothing is removed while fewer than keep_last (at least 1) are valid.
std::vector<std::string> prune_checkpoints(const std::string& folder, int64_t keep_last,
                                           int64_t keep_every_steps = 0);
/// Fills tensors (weights and optimizer; ctx: where they are on a GPU) from a verified checkpoint. Missing, unexpected or misshapen
/// tensors: Error(data) that lists them all.
void load_checkpoint(const std::string& path, const std::vector<NamedTensor>& weights,
                     const std::vector<NamedTensor>& optimizer, Context* ctx = nullptr);
/// Weights alone, from a checkpoint or a Hugging Face folder or .safetensors file (model.safetensors or
/// sharded with its index), converting dtype. Same strictness.
void load_weights(const std::string& path, const std::vector<NamedTensor>& weights, Context* ctx = nullptr);

}  // namespace sluice
