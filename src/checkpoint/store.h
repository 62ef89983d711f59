#pragma once
// Checkpoints: RUN/ckpt/step_00001200/{MANIFEST.json, model.safetensors, config.json, optim.safetensors,
// state.json, config.yaml, and tokenizer.model where the tokenizer is a file}. Weights under Hugging Face
// names, so that a plain Qwen3 layout loads as such. Several ranks write several files:
// model-00001-of-00004.safetensors with model.safetensors.index.json, and optim-00001-of-00004.safetensors,
// in which a tensor may lie in slices. The manifest tells tensors by name and shape of the whole, so that any
// number of ranks reads what any other has written. The protocol (README.md): snapshot with checksums
// taken from memory, staging folder, fsync, rename, manifest covering every byte, newest valid wins, rotation
// only after the new one is durable.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/content.h"
#include "comm/communicator.h"
#include "config/config.h"
#include "core/context.h"

namespace sluice {

/// Disk space that a save leaves free for what else a run writes.
constexpr int64_t kSpareBytes = int64_t{1} << 20;

class CheckpointStore {
 public:
  /// folder = RUN/ckpt. Rank 0 removes the litter of interrupted saves (.staging-*, .trash-*, *.tmp). With
  /// async, memory for one snapshot of `content`'s tensors is taken here, once, before training; likewise
  /// when they are on the GPU of `ctx`, from where every save brings them through pinned buffers. `ranks`:
  /// all that write together, each its own content; they share the folder's file system (Error(usage) where
  /// they do not), and construct together. It outlives the store, and is used by the calling thread alone:
  /// never by the writers, which work while training communicates.
  CheckpointStore(std::string folder, const CheckpointConfig& config, const CheckpointContent& content,
                  Context* ctx = nullptr, Communicator* ranks = nullptr);
  ~CheckpointStore();  // waits for this rank's part of a save under way

  /// Collective, of the same step on every rank. Takes the snapshot now (refusing non-finite values, wherever
  /// they are, on all ranks) and writes it, in the background when config.async: every rank its files and its
  /// part of the manifest into the staging folder; rank 0 waits there for all parts, at most
  /// config.timeout_seconds after the last one that came, and publishes. One save is under way at most: a
  /// second call waits (as long), and is refused where a writer still hangs then. A failed save warns (rank
  /// 0), leaves older checkpoints alone and returns; last_error() tells. Durable when saved_step() says so.
  /// keep_all: older checkpoints stay, however many there are. A thread that cannot be made for the
  /// background is a warning, and training waits for the save.
  void save(const CheckpointContent& content, bool keep_all = false);
  /// Collective. Waits for the save under way. False if the last save failed; the same on all ranks.
  bool wait();
  /// `check` throws where the folder must not be changed any more. Rank 0 calls it, also in its writer's
  /// thread, before a save begins, is published, and removes what is old.
  void set_guard(std::function<void()> check);
  /// Saves go to this folder from here on; none is under way.
  void move(const std::string& folder);
  /// Newest durable step of this run, or -1. Rank 0 knows at once, the others after wait() or the next
  /// save().
  int64_t saved_step() const;
  /// Where the checkpoint of a step is.
  std::string path_of(int64_t step) const;
  /// Of the last save, empty where it went well; as saved_step(), and then the same on all ranks.
  std::string last_error() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// All step folders, newest first, whether valid or not.
std::vector<std::string> list_checkpoints(const std::string& folder);
/// Verifies manifest, sizes and checksums of every file, and that every tensor is there exactly once. Throws
/// Error(data) that names file and reason. With `ranks`, collective: each reads a share of the files, and all
/// return or throw the same.
CheckpointInfo verify_checkpoint(const std::string& path, Communicator* ranks = nullptr);
/// Newest valid checkpoint: damaged ones are passed over with a warning each (of rank 0). Returns an empty
/// path when there is none at all; throws Error(data) "no valid checkpoint; refusing to start from scratch"
/// when some exist and none is valid. With `ranks`, collective, and the same on all.
CheckpointInfo newest_valid_checkpoint(const std::string& folder, Communicator* ranks = nullptr);
/// Removes all but the newest keep_last valid checkpoints and those at multiples of keep_every_steps (0:
/// none). Returns the removed paths. Nothing is removed while fewer than keep_last (at least 1) are valid.
std::vector<std::string> prune_checkpoints(const std::string& folder, int64_t keep_last,
                                           int64_t keep_every_steps = 0);

/// Fills tensors, whole or slices in any cut (weights and optimizer; ctx: where they are on a GPU), from a
/// verified checkpoint of any layout, straight from the mapped files: nothing but the targets is allocated.
/// `whole`: where the targets of this rank are a part of the model; without it they are all of it. Missing,
/// unexpected, incomplete or misshapen tensors of the whole model: Error(data) that lists them all, on every
/// rank alike.
void load_checkpoint(const std::string& path, const std::vector<NamedTensor>& weights,
                     const std::vector<NamedTensor>& optimizer, Context* ctx = nullptr,
                     const WholeModel* whole = nullptr);
/// Weights alone, from a checkpoint or a Hugging Face folder or .safetensors file (model.safetensors or
/// sharded with its index), converting dtype. Same strictness, of `whole` (default: the wholes of `weights`).
void load_weights(const std::string& path, const std::vector<NamedTensor>& weights, Context* ctx = nullptr,
                  const std::vector<TensorShape>* whole = nullptr);

}  // namespace sluice
