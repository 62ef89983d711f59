#pragma once
// Checkpoints: RUN/ckpt/step_00001200/{MANIFEST.json, model.safetensors, config.json, optim.safetensors,
// state.json, config.yaml, and tokenizer.model where the tokenizer is a file}. Weights under Hugging Face
// names, so that a plain Qwen3 layout loads as such. Several ranks write several files:
// model-00001-of-00004.safetensors with model.safetensors.index.json, and optim-00001-of-00004.safetensors,
// in which tensors may be sharded. The manifest lists tensors by name and whole shape, so that any number of
// ranks can read what any other number has written. The protocol (README.md): a snapshot with checksums of
// the memory, a staging folder, fsync, rename, a manifest that covers every byte; the newest valid checkpoint
// is loaded, and old ones are removed only after the new one is durable.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/content.h"
#include "checkpoint/weight_map.h"
#include "comm/communicator.h"
#include "config/config.h"
#include "core/context.h"

namespace sluice {

/// Disk space that a save leaves free for the other files of a run.
constexpr int64_t kSpareBytes = int64_t{1} << 20;

class CheckpointStore {
 public:
  /// folder = RUN/ckpt. Rank 0 removes leftovers of interrupted saves (.staging-*, .trash-*, LATEST.tmp).
  /// With async, or if tensors are on the GPU of `ctx`, memory for one snapshot of `content`'s tensors is
  /// allocated here, once, before training; saves copy GPU tensors to it through pinned buffers. `ranks`: the
  /// ranks that save together, each with its own content. They must share the folder's file system (otherwise
  /// Error(usage)) and construct their stores together. `ranks` must outlive the store and is used only by
  /// the calling thread, never by the writers, which run while training communicates.
  CheckpointStore(std::string folder, const CheckpointConfig& config, const CheckpointContent& content,
                  Context* ctx = nullptr, Communicator* ranks = nullptr);
  ~CheckpointStore();  // waits for this rank's part of the current save

  /// Collective, with the same step on every rank. Takes the snapshot immediately (a non-finite value on any
  /// rank is refused on all) and writes it, in the background if config.async: every rank writes its files
  /// and its part of the manifest to the staging folder; rank 0 waits for all parts, at most
  /// config.timeout_seconds after the latest one, and publishes the checkpoint. Only one save runs at a time:
  /// a second call waits up to the same limit and is refused if a writer still hangs. A failed save leaves
  /// older checkpoints untouched, warns (on rank 0) and returns; see last_error(). The checkpoint is durable
  /// once saved_step() returns its step. keep_all: older checkpoints are not removed. If no background thread
  /// can be started, a warning is logged and training waits for the save.
  void save(const CheckpointContent& content, bool keep_all = false);
  /// Collective. Waits for the current save. Returns false, on all ranks, if the last save failed.
  bool wait();
  /// `check` throws if the folder must no longer be changed. Rank 0 calls it, also in its writer thread,
  /// before a save starts, before it is published, and before old checkpoints are removed.
  void set_guard(std::function<void()> check);
  /// Sets the folder of later saves. No save may be running.
  void move(const std::string& folder);
  /// Newest durable step of this run, or -1. It is known on rank 0 immediately, on other ranks after wait()
  /// or the next save().
  int64_t saved_step() const;
  /// Path of the checkpoint of a step.
  std::string path_of(int64_t step) const;
  /// Error of the last save, empty if it succeeded. Known as for saved_step(), and then equal on all ranks.
  std::string last_error() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// All step folders, valid or not, newest first.
std::vector<std::string> list_checkpoints(const std::string& folder);
/// Whether a folder is that of a run with checkpoints, or its ckpt, whatever else lies in it.
bool holds_checkpoints(const std::string& folder);
/// Whether the weights of one model lie in a folder, in one file or with an index; not so in a run.
bool holds_model(const std::string& folder);
/// Verifies the manifest, the size and checksum of every file, and that every tensor is stored exactly once.
/// Throws Error(data) that names file and reason. With `ranks` it is collective: each rank reads a share of
/// the files, and all return or throw alike.
CheckpointInfo verify_checkpoint(const std::string& path, Communicator* ranks = nullptr);
/// The newest valid checkpoint; each damaged one is skipped with a warning (on rank 0). Returns an empty path
/// if there are no checkpoints; throws Error(data) "no valid checkpoint; refusing to start from scratch" if
/// there are some but none is valid. With `ranks` it is collective, with the same result on all.
CheckpointInfo newest_valid_checkpoint(const std::string& folder, Communicator* ranks = nullptr);
/// Removes all checkpoints except the newest keep_last valid ones and those at multiples of keep_every_steps
/// (0: none). Returns the removed paths. Removes nothing if fewer than keep_last (at least 1) are valid.
std::vector<std::string> prune_checkpoints(const std::string& folder, int64_t keep_last,
                                           int64_t keep_every_steps = 0);

/// Fills tensors (weights and optimizer state, whole or any slices) from a verified checkpoint of any layout,
/// directly from the mapped files without further allocations. ctx is needed for tensors on a GPU. `whole`:
/// all tensors of the model, if the targets of this rank are only a part of them. Missing, unexpected,
/// incomplete or misshapen tensors of the whole model are one Error(data) that lists them all, on every rank.
void load_checkpoint(const std::string& path, const std::vector<NamedTensor>& weights,
                     const std::vector<NamedTensor>& optimizer, Context* ctx = nullptr,
                     const WholeModel* whole = nullptr);
/// Loads only weights, with dtype conversion, from a checkpoint, a Hugging Face folder (model.safetensors, or
/// shards with their index) or a .safetensors file. Equally strict, for `whole` (default: `weights` as whole
/// tensors), except where `adoption` allows more. Tensors that are missing keep their values.
WeightReport load_weights(const std::string& path, const std::vector<NamedTensor>& weights,
                          Context* ctx = nullptr, const std::vector<TensorShape>* whole = nullptr,
                          const WeightAdoption& adoption = {});
/// The same comparison without loading anything: `whole` are all tensors of the model.
WeightReport compare_weights(const std::string& path, const std::vector<TensorShape>& whole,
                             const WeightAdoption& adoption = {});

}  // namespace sluice
