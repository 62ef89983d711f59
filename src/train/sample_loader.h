#pragma once
// The samples of a training's steps: read on the host, counted over all ranks, and sent to the device.
#include <array>
#include <cstdint>
#include <vector>

#include "comm/mesh.h"
#include "comm/sequence_split.h"
#include "config/config.h"
#include "core/arena.h"
#include "core/context.h"
#include "data/loader.h"
#include "nn/batch.h"
#include "train/step_plan.h"

namespace sluice {

class SampleLoader {
 public:
  /// All arguments outlive the loader. data: nullptr in a dry run.
  SampleLoader(const Config& config, const Blend* data, const StepPlan& plan, const Mesh& mesh);
  /// Takes all memory: host_memory (pinned) is used only where the device is a GPU.
  void allocate(Arena& device_memory, Arena& host_memory);

  /// Collective. Loads this rank's samples of a step, a pure function of its number, and sends them to the
  /// device beside its ops; nothing to do where they were loaded ahead. What is wrong with the samples of
  /// any rank is a SharedError(data) on all.
  void load(Context& ctx, int64_t step);
  /// The same for a step that is still to come. What is wrong with its samples is reported by its own load().
  void load_ahead(Context& ctx, int64_t step);
  /// What was loaded belongs to a training that another was restored over.
  void forget();

  /// (1, 4, T) i32 on the device: tokens, targets, positions and first keys of this rank's i-th micro-batch.
  Tensor micro_batch(int64_t step, int64_t i) const { return slot(step).device.rows(i, 1); }
  /// Targets that are predicted in a loaded step, of all ranks.
  int64_t counted_tokens(int64_t step) const { return slot(step).counts.predicted; }
  /// Tokens of a loaded step that are not padding, of all ranks.
  int64_t real_tokens(int64_t step) const { return slot(step).counts.real; }

 private:
  struct Counts {
    int64_t predicted = 0, real = 0;  // tokens with a target, tokens that are not padding
  };
  /// All micro-batches of a step, (micro-batches, 4, T) i32; on a CPU host and device are the same memory.
  struct Slot {
    Tensor host, device;
    int64_t step = -1;  // whose samples they are
    Counts counts;      // of all ranks
  };
  /// What each rank says about its samples of a step.
  struct Report {
    Counts counts;
    int64_t failed = 0;
  };
  size_t index(int64_t step) const { return plan_.loads_ahead() ? static_cast<size_t>(step % 2) : 0; }
  Slot& slot(int64_t step) { return slots_[index(step)]; }
  const Slot& slot(int64_t step) const { return slots_[index(step)]; }
  Counts read(const Tensor& host, int64_t step) const;
  void read_part(const Batch& rows, int64_t first) const;

  const Config& config_;
  const Blend* data_;
  const StepPlan& plan_;
  const Mesh& mesh_;
  SequenceSplit split_;
  std::array<Slot, 2> slots_;    // one on a CPU
  Tensor whole_;                 // (4, seq_len) i32 on the host: a sample, where ranks share sequences
  std::vector<Report> reports_;  // by rank
  std::vector<int>
      token_ranks_;  // those of this rank's token axis: other ranks compute the same tokens again
};

}  // namespace sluice
