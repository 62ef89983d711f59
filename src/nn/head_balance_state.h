#pragma once
// State of head balance between steps (model.attention.head_balance): the sums of a step, those of the
// previous step, and the shared heads found by calibration.
#include <optional>
#include <vector>

#include "nn/head_balance.h"
#include "nn/step_loss.h"

namespace sluice {

/// Imbalance of the heads in a step over all of its tokens (equations 5 and 6 of arXiv 2602.01203; all heads,
/// including shared ones).
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

/// A StepLoss (nn/step_loss.h). It has no state if the coefficient is 0.
class HeadBalanceState : public NoStepLoss {
 public:
  explicit HeadBalanceState(const Config& config)
      : config_(config.model),
        exact_(config.parallel.determinism == Determinism::exact),
        samples_per_step_(config.train.global_batch_size) {}
  void allocate(const StepMemory& memory);
  template <class Load>
  void add_to(Load& load) const {
    load.heads = load_;
  }
  bool asks_ranks() const { return load_.ranks; }

  void begin_step(Context& ctx);
  void end_micro_batch(Context& ctx, int64_t micro_batch);
  void fetch(Context& ctx);
  /// With parallel.determinism: exact the sum is in the order of the micro-batches, independently of the
  /// ranks that computed them.
  void collect(Communicator& ranks, int64_t counted_tokens);
  /// The step's sums become the previous ones, and count for calibration.
  void applied(Context& ctx);

  bool active() const { return bool(load_.totals); }
  /// (L, head_row_size(H)) f64 on the host: the last step's, of all ranks, after collect.
  const Tensor& totals() const { return host_totals_; }
  std::optional<HeadSummary> summary() const;
  std::vector<StepScalar> scalars() const;

  /// The previous step's sums say how many samples they are of, where the row of this layout has batches.
  void save(nlohmann::json& state) const;
  /// The shared heads are found anew from the calibration's sums, of as many samples and heads as are asked
  /// for now.
  void restore(const StateReader& state);

 private:
  bool previous() const { return config_.attention.head_balance.scope == HeadBalanceScope::previous_step; }
  void find_shared();

  ModelConfig config_;
  bool exact_;
  int64_t samples_per_step_, rank_ = 0, micro_batches_ = 1;
  int64_t batches_per_step_ = 1;  // micro-batches, of all ranks
  HeadLoad load_;
  Tensor host_totals_, host_previous_, host_shared_;  // on a CPU, the load's
  Tensor host_rows_;                                  // exact: (ranks, micro-batches, L head_row_size(H))
  std::vector<double> calibration_;                   // sums of totals; empty without calibration
  int64_t calibrated_samples_ = 0;
};

}  // namespace sluice
