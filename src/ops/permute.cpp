#include "ops/permute.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(permute_plan)
SLUICE_DECLARE_BACKENDS(unpermute)

namespace sluice {

void permute_plan(Context& ctx, const Permutation& permutation, const Tensor& experts) {
  const char* op = "permute_plan";
  SLUICE_CHECK(experts.rank == 2 && experts.dtype == DType::i32, "{}: experts must be (T, K) i32, got {}", op,
               experts.describe());
  const int64_t T = experts.dim(0), K = experts.dim(1);
  SLUICE_CHECK(permutation.offsets.rank == 1 && permutation.offsets.dtype == DType::i32 && permutation.offsets.dim(0) >= 2,
               "{}: offsets must be (E + 1) i32, got {}", op, permutation.offsets.describe());
  SLUICE_CHECK(T * K < int64_t{1} << 31, "{}: {} tokens of {} experts each are too many rows", op, T, K);
  check_tensor(op, "slots", permutation.slots, DType::i32, {T * K});
  check_tensor(op, "tokens", permutation.tokens, DType::i32, {T * K});
  check_tensor(op, "rows", permutation.rows, DType::i32, {T, K});
  SLUICE_DISPATCH(permute_plan, ctx, permutation, experts);
}

void unpermute(Context& ctx, Tensor y, const Tensor& x, const Tensor& rows, Into into) {
  check_floating("unpermute", "x", x);
  SLUICE_CHECK(x.rank == 2 && rows.rank == 2, "unpermute: x must be (R, C) and rows (T, K), got {} and {}", x.describe(),
               rows.describe());
  check_tensor("unpermute", "rows", rows, DType::i32, {rows.dim(0), rows.dim(1)});
  check_tensor("unpermute", "y", y, x.dtype, {rows.dim(0), x.dim(1)});
  SLUICE_DISPATCH(unpermute, ctx, y, x, rows, into);
}

}  // namespace sluice
