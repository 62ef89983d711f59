#include "ops/grouped_linear.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(grouped_linear_packed_bytes)
SLUICE_DECLARE_BACKENDS(grouped_linear_pack)
SLUICE_DECLARE_BACKENDS(grouped_linear_forward)
SLUICE_DECLARE_BACKENDS(grouped_linear_backward_input)
SLUICE_DECLARE_BACKENDS(grouped_linear_backward_weight)

namespace sluice {
namespace {

void check_weight(Context& ctx, const char* op, const LinearWeight& w) {
  check_floating(op, "weight", w.value);
  SLUICE_CHECK(w.value.rank == 2 && w.groups > 0 && w.value.dim(0) % w.groups == 0,
               "{}: weight must be ({} x N, K), got {}", op, w.groups, w.value.describe());
  if (!w.packed && !w.packed_transposed) return;
  const LinearPackedBytes bytes =
      grouped_linear_packed_bytes(ctx, w.value.dtype, w.groups, w.value.dim(0) / w.groups, w.value.dim(1));
  if (w.packed) check_tensor(op, "packed weight", w.packed, DType::u8, {bytes.forward});
  if (w.packed_transposed)
    check_tensor(op, "packed transposed weight", w.packed_transposed, DType::u8, {bytes.transposed});
}

/// An operand (rows, columns), or (any, columns) with an index (rows).
void check_operand(const char* op, const char* name, const Tensor& x, DType dtype, const Tensor& index,
                   int64_t rows, int64_t columns) {
  if (index) check_tensor(op, "index", index, DType::i32, {rows});
  SLUICE_CHECK(x.rank == 2, "{}: {} must have two dimensions, got {}", op, name, x.describe());
  check_tensor(op, name, x, dtype, {index ? x.dim(0) : rows, columns});
}

}  // namespace

LinearPackedBytes grouped_linear_packed_bytes(Context& ctx, DType dtype, int64_t groups, int64_t out_features,
                                              int64_t in_features) {
  SLUICE_CHECK(groups > 0 && out_features > 0 && in_features > 0,
               "grouped_linear_packed_bytes: {} weights of ({}, {})", groups, out_features, in_features);
  SLUICE_DISPATCH(grouped_linear_packed_bytes, ctx, dtype, groups, out_features, in_features);
}

void grouped_linear_pack(Context& ctx, const LinearWeight& w) {
  check_weight(ctx, "grouped_linear_pack", w);
  SLUICE_DISPATCH(grouped_linear_pack, ctx, w);
}

void grouped_linear_forward(Context& ctx, Tensor y, const Tensor& x, const LinearWeight& w,
                            const Tensor& offsets, const Tensor& index) {
  const char* op = "grouped_linear_forward";
  check_weight(ctx, op, w);
  SLUICE_CHECK(y.rank == 2, "{}: y must be (R, N), got {}", op, y.describe());
  check_tensor(op, "y", y, w.value.dtype, {y.dim(0), w.value.dim(0) / w.groups});
  check_operand(op, "x", x, y.dtype, index, y.dim(0), w.value.dim(1));
  check_tensor(op, "offsets", offsets, DType::i32, {w.groups + 1});
  SLUICE_DISPATCH(grouped_linear_forward, ctx, y, x, w, offsets, index);
}

void grouped_linear_backward_input(Context& ctx, Tensor dx, const Tensor& dy, const LinearWeight& w,
                                   const Tensor& offsets, const Tensor& index) {
  const char* op = "grouped_linear_backward_input";
  check_weight(ctx, op, w);
  SLUICE_CHECK(dx.rank == 2, "{}: dx must be (R, K), got {}", op, dx.describe());
  check_tensor(op, "dx", dx, w.value.dtype, {dx.dim(0), w.value.dim(1)});
  check_operand(op, "dy", dy, dx.dtype, index, dx.dim(0), w.value.dim(0) / w.groups);
  check_tensor(op, "offsets", offsets, DType::i32, {w.groups + 1});
  SLUICE_DISPATCH(grouped_linear_backward_input, ctx, dx, dy, w, offsets, index);
}

void grouped_linear_backward_weight(Context& ctx, Tensor dw, const Tensor& dy, const Tensor& x,
                                    const Tensor& offsets, const Tensor& dy_index, const Tensor& x_index,
                                    Into into) {
  const char* op = "grouped_linear_backward_weight";
  check_floating(op, "x", x);
  SLUICE_CHECK(!dy_index || !x_index, "{}: one of dy and x at most is gathered", op);
  SLUICE_CHECK(x.rank == 2 && dy.rank == 2, "{}: dy must be (R, N) and x (R, K), got {} and {}", op,
               dy.describe(), x.describe());
  const int64_t rows = dy_index ? dy_index.dim(0) : x_index ? x_index.dim(0) : x.dim(0);
  check_operand(op, "dy", dy, x.dtype, dy_index, rows, dy.dim(1));
  check_operand(op, "x", x, x.dtype, x_index, rows, x.dim(1));
  SLUICE_CHECK(offsets.rank == 1 && offsets.dim(0) >= 2, "{}: offsets must be (G + 1), got {}", op,
               offsets.describe());
  check_tensor(op, "offsets", offsets, DType::i32, {offsets.dim(0)});
  check_tensor(op, "dw", dw, accumulate_dtype(x.dtype), {(offsets.dim(0) - 1) * dy.dim(1), x.dim(1)});
  SLUICE_DISPATCH(grouped_linear_backward_weight, ctx, dw, dy, x, offsets, dy_index, x_index, into);
}

}  // namespace sluice
