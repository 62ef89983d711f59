// The three products of a linear layer (ops/linear.h), one cuBLASLt call each; the memory is read and written
// once.
#include "common/launch.h"
#include "matmul.h"
#include "ops/elementwise.h"
#include "ops/linear.h"

namespace sluice::cuda {

// Weights are read in their stored order: cuBLASLt's kernels handle both orders at full speed.
LinearPackedBytes linear_packed_bytes(Context&, DType, int64_t, int64_t, int64_t) { return {}; }
void linear_pack(Context&, const LinearWeight&) {}

void linear_forward(Context& ctx, Tensor y, const Tensor& x, const LinearWeight& w) {
  check_storage("linear_forward", x);
  GpuProduct p;
  p.in = p.out = x.dtype;
  p.m = x.dim(0), p.n = w.value.dim(0), p.k = x.dim(1);
  p.b_transposed = true;
  multiply(ctx, p, x.data, w.value.data, y.data);
}

void linear_backward_input(Context& ctx, Tensor dx, const Tensor& dy, const LinearWeight& w, Into into) {
  check_storage("linear_backward_input", dy);
  GpuProduct p;
  p.in = p.out = dy.dtype;
  p.m = dy.dim(0), p.n = w.value.dim(1), p.k = dy.dim(1);
  p.accumulate = into == Into::add;
  multiply(ctx, p, dy.data, w.value.data, dx.data);
}

void linear_backward_weight(Context& ctx, Tensor dw, const Tensor& dy, const Tensor& x, Into into) {
  check_storage("linear_backward_weight", x);
  if (into == Into::overwrite && dy.dim(0) == 0) return fill(ctx, dw, 0);
  GpuProduct p;
  p.in = x.dtype, p.out = DType::f32;
  p.m = dy.dim(1), p.n = x.dim(1), p.k = dy.dim(0);
  p.a_transposed = true, p.accumulate = into == Into::add;
  multiply(ctx, p, dy.data, x.data, dw.data);
}

}  // namespace sluice::cuda
