#pragma once
// One rank's part of a save, from the snapshot to its part of the manifest; rank 0 then joins the parts. No
// communicator is used: ranks meet in the staging folder, where part-00003.json shows that rank 3 is done and
// failed-00003.txt why it failed.
#include <atomic>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/store.h"
#include "core/arena.h"

namespace sluice {

/// One tensor of a save: a private copy (or, without async, live memory) and its checksum.
struct SaveItem {
  TensorRecord record;  // file and offset are set when it is written
  Tensor source;
  unsigned char* copy = nullptr;
  int64_t nonfinite = -1;  // index of the first non-finite value; -1: none

  const void* data() const { return copy ? copy : source.data; }
  int64_t bytes() const { return source.bytes(); }
};

/// Everything that the writer needs. In an asynchronous save nothing refers to live memory.
struct SaveJob {
  int64_t step = 0;
  int rank = 0, ranks = 1;
  bool keep_all = false;                     // older checkpoints are not removed
  std::string folder, staging;               // RUN/ckpt, and the folder in it into which all ranks write
  int64_t all_bytes = 0;                     // of all ranks
  std::string weights_file, optimizer_file;  // empty: this rank has none
  std::vector<SaveItem> weights, optimizer;
  std::string state, config_yaml, hf_config, tokenizer_model;  // rank 0's
};

/// Memory needed for a snapshot.
int64_t snapshot_bytes(const CheckpointContent& content);
/// Copies the tensors into `memory` (if any) and computes checksums of the copy. Error(numeric) for
/// non-finite values. Contract check: slices lie within their tensors; weights are whole.
std::vector<SaveItem> take_items(const std::vector<NamedTensor>& tensors, bool slices_allowed, Arena* memory,
                                 Context* ctx);

/// Writes this rank's files to the staging folder and syncs them.
Manifest write_files(SaveJob& job);
/// Other ranks: reports to rank 0 that write_files is done, or, as far as possible, that it failed.
void write_part(const SaveJob& job, const Manifest& part);
void write_failure(const SaveJob& job, const std::string& reason);

/// How long rank 0 waits for the next part, and whether waiting was cancelled.
struct Patience {
  std::atomic<double> seconds{600};
  std::atomic<bool> ended{false};
};
/// Rank 0: waits for the parts of all other ranks and joins them with its own to the manifest. Error(data) if
/// the parts do not contain every tensor exactly once; Error(save_failed) with the reason if a rank has
/// failed or is late.
Manifest collect_parts(const SaveJob& job, Manifest mine, const Patience& patience);
/// Rank 0: completes the staging folder with index and manifest, removes everything else, and makes it
/// durable.
void finish_staging(const SaveJob& job, Manifest& manifest);
/// Publishes the checkpoint at final_path.
void publish(const SaveJob& job, const std::string& final_path);

}  // namespace sluice
