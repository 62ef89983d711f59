#pragma once
// What the indexers of sparse attention add up over a step, and the running mean of their scores' variance
// (model.attention.sparse; ops/indexer.h).
#include <vector>

#include "nn/step_loss.h"
#include "ops/indexer.h"

namespace sluice {

/// For the passes over a micro-batch. Forward adds what was selected to a layer's row; backward adds the
/// loss, and its gradient to the indexer's.
struct IndexerLoad {
  Tensor sums = {};  // (L, kIndexSums) f64: this micro-batch's. Empty: nothing is counted, and no loss
  Tensor gradient_scale = {};  // (1) f64: 1 / counted tokens of the global batch, as cross-entropy's

  Tensor row(int64_t layer) const { return sums.rows(layer, 1).view({sums.dim(1)}); }
};

/// Allocates a load for all layers; empty without sparse attention.
IndexerLoad make_indexer_load(const ModelConfig& config, Arena& memory);

/// A StepLoss (nn/step_loss.h). The running mean of the variance of every layer's scores is a state of the
/// step: it changes where an update is applied, and is kept in f64 here and, rounded, beside the weights
/// (Indexer::mean_variance), where selection reads it, in evaluation too. All sums are in the order of the
/// micro-batches, whichever rank computed them.
class IndexerLossState : public NoStepLoss {
 public:
  explicit IndexerLossState(const Config& config) : config_(config.model) {}
  void allocate(const StepMemory& memory);
  template <class Load>
  void add_to(Load& load) const {
    load.indexers = load_;
  }

  void begin_step(Context& ctx);
  void end_micro_batch(Context& ctx, int64_t micro_batch);
  void fetch(Context& /*ctx*/) {}
  void collect(Communicator& ranks, int64_t counted_tokens);
  void applied(Context& ctx);

  std::vector<StepScalar> scalars() const;
  void save(nlohmann::json& state) const;
  void restore(const StateReader& state);

  /// Of the last step, all ranks and micro-batches: (L x kIndexSums), after collect.
  const std::vector<double>& totals() const { return totals_; }
  /// By layer; 0: not known yet.
  const std::vector<double>& mean_variance() const { return mean_variance_; }

 private:
  bool active() const { return bool(load_.sums); }
  void publish(Context& ctx) const;

  ModelConfig config_;
  int64_t rank_ = 0, micro_batches_ = 1;
  IndexerLoad load_;
  Tensor rows_;                    // (ranks x micro-batches, L kIndexSums), on the host
  std::vector<Tensor> published_;  // Indexer::mean_variance of each layer; empty where k is not adaptive
  std::vector<double> totals_, mean_variance_;
};

}  // namespace sluice
