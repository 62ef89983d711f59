#pragma once
// The z-loss on the output logits (model.logit_z_loss_coefficient; PaLM, Chowdhery et al. 2022, section 5):
// coefficient times the mean, over the counted tokens of the global batch, of the squared log-sum-exp of
// their logits. It keeps the logits from drifting, which cross-entropy alone does not see. Computed inside
// the cross-entropy (ops/cross_entropy.h); here is what of it is reported.
#include <vector>

#include "core/device.h"
#include "nn/step_loss.h"
#include "ops/cross_entropy.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"

namespace sluice {

/// A StepLoss (nn/step_loss.h). Nothing is computed where the coefficient is 0.
class LogitZLossState : public NoStepLoss {
 public:
  explicit LogitZLossState(const Config& config) : coefficient_(config.model.logit_z_loss_coefficient) {}

  void allocate(const StepMemory& memory) {
    if (coefficient_ == 0) return;
    const int64_t mine = memory.micro_batches, ranks = memory.ranks.size();
    Arena& host = memory.device.device() == Device::cpu ? memory.device : memory.host;
    squares_ = memory.device.alloc("logits.z_squares", memory.losses, {memory.tokens});
    sums_ = memory.device.alloc("logits.z_sums", DType::f64, {mine});
    all_sums_ = host.alloc("logits.z_sums of all ranks", DType::f64, {ranks * mine});
    my_sums_ = all_sums_.rows(memory.ranks.rank() * mine, mine);
  }
  template <class Load>
  void add_to(Load& load) const {
    load.logits = {coefficient_, squares_};
  }

  void end_micro_batch(Context& ctx, int64_t micro_batch) {
    if (squares_) sum(ctx, sums_.rows(micro_batch, 1), squares_, Into::overwrite);
  }
  void fetch(Context& ctx) {
    if (squares_) copy(ctx, my_sums_, sums_);
  }
  /// In the order of the micro-batches, whichever rank computed them.
  void collect(Communicator& ranks, int64_t counted_tokens) {
    if (!squares_) return;
    if (ranks.size() > 1) ranks.all_gather(all_sums_.data, my_sums_.data, my_sums_.bytes());
    double total = 0;
    for (int64_t i = 0; i < all_sums_.numel(); ++i) total += all_sums_.as<double>()[i];
    mean_ = counted_tokens > 0 ? total / static_cast<double>(counted_tokens) : 0;
  }

  /// Before its coefficient, as those of the routers and heads.
  std::vector<StepScalar> scalars() const {
    if (!squares_) return {};
    return {{.name = "logit_z_loss", .value = mean_}};
  }

 private:
  double coefficient_, mean_ = 0;  // of the last step
  Tensor squares_;                 // (T): of a micro-batch's tokens
  Tensor sums_;                    // (micro-batches) f64: of this rank
  Tensor all_sums_, my_sums_;      // on the host: (ranks x micro-batches), and this rank's of them
};

}  // namespace sluice
