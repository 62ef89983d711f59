#pragma once
// What a training keeps of its attention heads from step to step (model.attention.head_balance): the sums of
// a step, those of the step before, and the heads that calibration found to be shared. Equal on all ranks
// between steps.
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "checkpoint/state_reader.h"
#include "config/config.h"
#include "core/context.h"
#include "nn/head_balance.h"

namespace sluice {

/// How even the heads of a step were, over all of its tokens (equations 5 and 6 of arXiv 2602.01203; all
/// heads, shared ones too).
struct HeadSummary {
  struct Layer {
    double imbalance = 0;   // standard deviation over mean of the heads' importance; 0 where all are closed
    double importance = 0;  // mean over heads
  };
  std::vector<Layer> layers;
  double imbalance = 0, importance = 0;  // means over layers
  double balance_loss =
      0;  // sum over layers of N CV^2, as the scope sees it, before the coefficient; mean over micro-batches
};

class HeadKeeper {
 public:
  /// Nothing is kept where the coefficient is 0.
  explicit HeadKeeper(const Config& config)
      : config_(config.model), exact_(config.parallel.determinism == Determinism::exact) {}
  /// Takes all memory. ranks: all that compute a step; each has `micro_batches` of it.
  void allocate(Arena& memory, Arena& host_memory, Communicator& ranks, int64_t micro_batches);
  bool active() const { return bool(load_.totals); }
  const HeadLoad& load() const { return load_; }

  // In a step, in this order:
  void begin_step(Context& ctx);
  /// After its backward.
  void end_micro_batch(Context& ctx, int64_t micro_batch);
  /// Sends what this rank added up to the host; the caller synchronizes.
  void fetch(Context& ctx);
  /// The sums of all ranks; with parallel.determinism exact in the order of the micro-batches, whoever
  /// computed them.
  void collect(Communicator& ranks);
  /// The update was applied: this step is the next one's previous, and counts for calibration.
  void applied(int64_t samples);

  /// (L, head_row_size(H)) f64 on the host: the last step's, of all ranks, after collect.
  const Tensor& totals() const { return host_totals_; }
  std::optional<HeadSummary> summary() const;

  /// For the checkpoint: the same for any number of ranks; null where nothing is kept.
  nlohmann::json state() const;
  /// Of a state without it, or of another shape: starts anew.
  void restore(const StateReader& state);

 private:
  bool previous() const { return config_.attention.head_balance.scope == HeadBalanceScope::previous_step; }
  void find_shared();

  ModelConfig config_;
  bool exact_;
  int64_t rank_ = 0, micro_batches_ = 1;
  HeadLoad load_;
  Tensor host_totals_, host_previous_, host_shared_;  // on a CPU, the load's
  Tensor host_rows_;                                  // exact: (ranks, micro-batches, L head_row_size(H))
  std::vector<double> calibration_;  // sums of totals; empty where no calibration is asked for
  int64_t calibrated_samples_ = 0;
};

}  // namespace sluice
