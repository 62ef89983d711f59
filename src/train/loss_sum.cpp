#include "train/loss_sum.h"

#include "core/device.h"
#include "ops/elementwise.h"

namespace sluice {

void LossSum::allocate(Arena& host_memory) {
  if (plan_.sums_losses_in_order())
    losses_ =
        host_memory.alloc("losses of micro-batches", DType::f64, {ranks_.size() * plan_.losses_per_rank()});
}

void LossSum::end_micro_batch(Context& ctx, int64_t i, const Tensor& sum) {
  if (!losses_ || plan_.dry_run() || !sets_aside()) return;
  copy(ctx, losses_.rows(ranks_.rank() * plan_.losses_per_rank() + i, 1), sum);
  fill(ctx, sum, 0.0);
}

void LossSum::finish(Context& ctx, const Tensor& sum) {
  if (!losses_ || plan_.dry_run()) return;
  const int64_t count = plan_.losses_per_rank();
  double *all = losses_.as<double>(), *mine = all + ranks_.rank() * count;
  if (sets_aside())
    synchronize(ctx);
  else
    *mine = read_scalar(ctx, sum);
  ranks_.all_gather(all, mine, count * static_cast<int64_t>(sizeof(double)));
  double total = 0;
  for (int64_t i = 0; i < losses_.dim(0); ++i) total += all[i];
  write_tensor(ctx, sum, &total);
}

}  // namespace sluice
