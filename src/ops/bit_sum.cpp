#include "ops/bit_sum.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(bit_sum)
SLUICE_DECLARE_CPU(word_sum)

namespace sluice {

void bit_sum(Context& ctx, Tensor sum, const Tensor& x, int64_t first, uint64_t seed) {
  check_floating("bit_sum", "x", x);
  check_count("bit_sum", "sum", sum, DType::i32, 2);
  SLUICE_DISPATCH(bit_sum, ctx, sum, x, first, seed);
}

void word_sum(Context& ctx, Tensor sum, const Tensor& x) {
  check_floating("word_sum", "x", x);
  check_count("word_sum", "sum", sum, DType::i32, 1);
  SLUICE_CHECK(ctx.device == Device::cpu, "word_sum has no CUDA kernel");
  const ProfileScope profile_scope(ctx.profile, "word_sum");
  SLUICE_DISPATCH_CPU(word_sum, ctx, sum, x)
}

}  // namespace sluice
