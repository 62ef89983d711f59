#pragma once
// What one rank does of a save, from the snapshot to its part of the manifest; rank 0 then puts the parts
// together. No communicator: ranks meet in the staging folder, where part-00003.json says that rank 3 is
// done, and failed-00003.txt why not.
#include <atomic>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/store.h"
#include "core/arena.h"

namespace sluice {

/// One tensor of a save: a private copy (or, without async, live memory) and the checksum taken from it.
struct SaveItem {
  TensorRecord record;  // file and offset are set when it is written
  Tensor source;
  unsigned char* copy = nullptr;
  int64_t nonfinite = -1;  // index of the first such value

  const void* data() const { return copy ? copy : source.data; }
  int64_t bytes() const { return source.bytes(); }
};

/// Everything the writer needs; nothing in it refers to live memory when the save is asynchronous.
struct SaveJob {
  int64_t step = 0;
  int rank = 0, ranks = 1;
  bool keep_all = false;                     // older checkpoints stay
  std::string folder, staging;               // RUN/ckpt, and the folder in it that all ranks write into
  int64_t all_bytes = 0;                     // of all ranks
  std::string weights_file, optimizer_file;  // empty: this rank has none
  std::vector<SaveItem> weights, optimizer;
  std::string state, config_yaml, hf_config, tokenizer_model;  // rank 0's
};

/// Memory that a snapshot takes.
int64_t snapshot_bytes(const CheckpointContent& content);
/// Copies into `memory` (if any), takes checksums from the copy. Error(numeric) for values that are not
/// finite. Contract check: slices lie within their wholes; weights are whole.
std::vector<SaveItem> take_items(const std::vector<NamedTensor>& tensors, bool slices_allowed, Arena* memory,
                                 Context* ctx);

/// Writes this rank's files into the staging folder, and syncs them.
Manifest write_files(SaveJob& job);
/// Followers: tells rank 0 that write_files is done, or (trying) that it failed.
void write_part(const SaveJob& job, const Manifest& part);
void write_failure(const SaveJob& job, const std::string& reason);

/// How long rank 0 waits for the next part, and whether it is told not to wait at all.
struct Patience {
  std::atomic<double> seconds{600};
  std::atomic<bool> ended{false};
};
/// Rank 0: waits for the parts of all others, and makes the manifest of the whole: mine and theirs.
/// Error(data) where they are not every tensor exactly once; Error(save_failed) with the reason where a rank
/// has failed or is late.
Manifest collect_parts(const SaveJob& job, Manifest mine, const Patience& patience);
/// Rank 0: the staging folder becomes complete and durable: index, manifest, nothing else.
void finish_staging(const SaveJob& job, Manifest& manifest);
/// From here on the checkpoint exists, at final_path.
void publish(const SaveJob& job, const std::string& final_path);

}  // namespace sluice
