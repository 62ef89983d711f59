#include "ops/permute.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(permute_plan)
SLUICE_DECLARE_BACKENDS(unpermute)
SLUICE_DECLARE_BACKENDS(take_rows)
SLUICE_DECLARE_BACKENDS(put_rows)
SLUICE_DECLARE_BACKENDS(move_rows_last)
SLUICE_DECLARE_BACKENDS(number_rows)

namespace sluice {

void permute_plan(Context& ctx, const Permutation& permutation, const Tensor& experts) {
  const char* op = "permute_plan";
  SLUICE_CHECK(experts.rank == 2 && experts.dtype == DType::i32, "{}: experts must be (T, K) i32, got {}", op,
               experts.describe());
  const int64_t T = experts.dim(0), K = experts.dim(1);
  SLUICE_CHECK(permutation.offsets.rank == 1 && permutation.offsets.dtype == DType::i32 &&
                   permutation.offsets.dim(0) >= 2,
               "{}: offsets must be (E + 1) i32, got {}", op, permutation.offsets.describe());
  SLUICE_CHECK(T * K < int64_t{1} << 31, "{}: {} tokens of {} experts each are too many rows", op, T, K);
  check_tensor(op, "slots", permutation.slots, DType::i32, {T * K});
  check_tensor(op, "tokens", permutation.tokens, DType::i32, {T * K});
  check_tensor(op, "rows", permutation.rows, DType::i32, {T, K});
  SLUICE_DISPATCH(permute_plan, ctx, permutation, experts);
}

void unpermute(Context& ctx, Tensor y, const Tensor& x, const Tensor& rows, Into into) {
  check_floating("unpermute", "x", x);
  SLUICE_CHECK(x.rank == 2 && rows.rank == 2, "unpermute: x must be (R, C) and rows (T, K), got {} and {}",
               x.describe(), rows.describe());
  check_tensor("unpermute", "rows", rows, DType::i32, {rows.dim(0), rows.dim(1)});
  check_tensor("unpermute", "y", y, x.dtype, {rows.dim(0), x.dim(1)});
  SLUICE_DISPATCH(unpermute, ctx, y, x, rows, into);
}

void take_rows(Context& ctx, Tensor y, const Tensor& x, const Tensor& index) {
  SLUICE_CHECK(x.rank == 2, "take_rows: x must be (any, C), got {}", x.describe());
  check_tensor("take_rows", "index", index, DType::i32, {index.dim(0)});
  check_tensor("take_rows", "y", y, x.dtype, {index.dim(0), x.dim(1)});
  SLUICE_DISPATCH(take_rows, ctx, y, x, index);
}

void put_rows(Context& ctx, Tensor y, const Tensor& x, const Tensor& index) {
  SLUICE_CHECK(y.rank == 2, "put_rows: y must be (any, C), got {}", y.describe());
  check_tensor("put_rows", "index", index, DType::i32, {index.dim(0)});
  check_tensor("put_rows", "x", x, y.dtype, {index.dim(0), y.dim(1)});
  SLUICE_DISPATCH(put_rows, ctx, y, x, index);
}

void move_rows_last(Context& ctx, Tensor rows, int64_t begin, int64_t count, int64_t end) {
  SLUICE_CHECK(rows.dtype == DType::i32 && begin >= 0 && count >= 0 && begin + count <= end,
               "move_rows_last: [{}, {}) of {} rows of {}", begin, begin + count, end, rows.describe());
  SLUICE_DISPATCH(move_rows_last, ctx, rows, begin, count, end);
}

void number_rows(Context& ctx, Tensor index) {
  check_tensor("number_rows", "index", index, DType::i32, {index.dim(0)});
  SLUICE_DISPATCH(number_rows, ctx, index);
}

}  // namespace sluice
