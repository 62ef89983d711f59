#include "ops/linear.h"

#include "ops/dispatch.h"
#include "ops/low_rank.h"

SLUICE_DECLARE_BACKENDS(linear_packed_bytes)
SLUICE_DECLARE_BACKENDS(linear_pack)
SLUICE_DECLARE_BACKENDS(linear_forward)
SLUICE_DECLARE_BACKENDS(linear_backward_input)
SLUICE_DECLARE_BACKENDS(linear_backward_weight)

namespace sluice {
namespace {

void check_storage(const char* op, DType dtype) {
  SLUICE_CHECK(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f64,
               "{}: elements must be f32, bf16 or f64, got {}", op, dtype_name(dtype));
}

/// A packed copy is absent or as large as linear_packed_bytes says.
void check_packed(Context& ctx, const char* op, const LinearWeight& w) {
  SLUICE_CHECK(w.groups == 1, "{}: one weight, got {} behind each other", op, w.groups);
  if (!w.packed && !w.packed_transposed) return;
  const LinearPackedBytes bytes = linear_packed_bytes(ctx, w.value.dtype, w.value.dim(0), w.value.dim(1), 0);
  if (w.packed) check_tensor(op, "packed weight", w.packed, DType::u8, {bytes.forward});
  if (w.packed_transposed)
    check_tensor(op, "packed transposed weight", w.packed_transposed, DType::u8, {bytes.transposed});
}

/// The weight's own products, without adapters.
void product_forward(Context& ctx, const Tensor& y, const Tensor& x, const LinearWeight& w) {
  SLUICE_DISPATCH(linear_forward, ctx, y, x, w);
}
void product_backward_input(Context& ctx, const Tensor& dx, const Tensor& dy, const LinearWeight& w,
                            Into into) {
  SLUICE_DISPATCH(linear_backward_input, ctx, dx, dy, w, into);
}

}  // namespace

LinearPackedBytes linear_packed_bytes(Context& ctx, DType dtype, int64_t out_features, int64_t in_features,
                                      int64_t rows) {
  check_storage("linear_packed_bytes", dtype);
  SLUICE_CHECK(out_features > 0 && in_features > 0, "linear_packed_bytes: a weight of ({}, {})", out_features,
               in_features);
  SLUICE_DISPATCH(linear_packed_bytes, ctx, dtype, out_features, in_features, rows);
}

void linear_pack(Context& ctx, const LinearWeight& w) {
  check_storage("linear_pack", w.value.dtype);
  SLUICE_CHECK(w.value.rank == 2, "linear_pack: weight must be (N, K), got {}", w.value.describe());
  check_packed(ctx, "linear_pack", w);
  SLUICE_DISPATCH(linear_pack, ctx, w);
}

void linear_forward(Context& ctx, Tensor y, const Tensor& x, const LinearWeight& w) {
  check_storage("linear_forward", x.dtype);
  SLUICE_CHECK(x.rank == 2, "linear_forward: x must be (T, K), got {}", x.describe());
  SLUICE_CHECK(w.value.rank == 2, "linear_forward: weight must be (N, K), got {}", w.value.describe());
  check_tensor("linear_forward", "weight", w.value, x.dtype, {w.value.dim(0), x.dim(1)});
  check_tensor("linear_forward", "y", y, x.dtype, {x.dim(0), w.value.dim(0)});
  check_packed(ctx, "linear_forward", w);
  product_forward(ctx, y, x, w);
  for (const LowRank& adapter : w.low_rank) low_rank_forward(ctx, y, x, adapter);
}

void linear_backward_input(Context& ctx, Tensor dx, const Tensor& dy, const LinearWeight& w, Into into) {
  check_storage("linear_backward_input", dy.dtype);
  SLUICE_CHECK(dy.rank == 2, "linear_backward_input: dy must be (T, N), got {}", dy.describe());
  SLUICE_CHECK(w.value.rank == 2, "linear_backward_input: weight must be (N, K), got {}", w.value.describe());
  check_tensor("linear_backward_input", "weight", w.value, dy.dtype, {dy.dim(1), w.value.dim(1)});
  check_tensor("linear_backward_input", "dx", dx, dy.dtype, {dy.dim(0), w.value.dim(1)});
  check_packed(ctx, "linear_backward_input", w);
  product_backward_input(ctx, dx, dy, w, into);
  for (const LowRank& adapter : w.low_rank) low_rank_backward_input(ctx, dx, dy, adapter);
}

void linear_backward_weight(Context& ctx, Tensor dw, const Tensor& dy, const Tensor& x, Into into) {
  check_storage("linear_backward_weight", x.dtype);
  SLUICE_CHECK(x.rank == 2, "linear_backward_weight: x must be (T, K), got {}", x.describe());
  SLUICE_CHECK(dy.rank == 2, "linear_backward_weight: dy must be (T, N), got {}", dy.describe());
  check_tensor("linear_backward_weight", "dy", dy, x.dtype, {x.dim(0), dy.dim(1)});
  check_tensor("linear_backward_weight", "dw", dw, accumulate_dtype(x.dtype), {dy.dim(1), x.dim(1)});
  SLUICE_DISPATCH(linear_backward_weight, ctx, dw, dy, x, into);
}

}  // namespace sluice
