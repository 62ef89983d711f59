// Products are computed in the storage type if the processor supports it. Otherwise bf16 is computed in f32:
// weights are widened once per step (the packed copies), activations chunk by chunk into scratch memory that
// stays in cache. A few rows in generation: few_rows.h.
#include "ops/linear.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/parallel_for.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"
#include "ops/cpu/vectors.h"
#include "ops/cpu/convert.h"
#include "ops/cpu/few_rows.h"

namespace {

using Layout = Product::Layout;

/// Rows of activations widened at once; dW is read and written once per chunk, so its chunks are longer.
constexpr int64_t kChunk = 1024, kWeightGradientChunk = 4096;

bool widens(DType storage) { return product_dtype(storage) != storage; }

/// y (T, n) = x (T, k) b, b packed or stored as `layout` says.
void product_of_rows(Context& ctx, const Tensor& y, const Tensor& x, const Tensor& weight,
                     const Tensor& packed, Layout layout, Into into) {
  const int64_t rows = x.dim(0), k = x.dim(1), n = y.dim(1);
  if (rows == 0) return;
  Product p{product_dtype(x.dtype),           product_dtype(x.dtype), rows, n, k, false,
            packed ? Layout::packed : layout, into == Into::add,      0};
  const void* b = packed ? packed.data : weight.data;
  if (!widens(x.dtype)) return multiply(ctx, p, x.data, b, y.data);

  ScratchScope t(ctx.scratch);
  if (!packed) {
    const Tensor wide = t.alloc("weight in f32", DType::f32, {weight.dim(0), weight.dim(1)});
    if (!ctx.dry_run) widen(wide.as<float>(), weight.as<bf16>(), weight.numel());
    b = wide.data;
  }
  const int64_t chunk = std::min(rows, kChunk);
  const Tensor wide_x = t.alloc("x in f32", DType::f32, {chunk, k});
  const Tensor wide_y = t.alloc("y in f32", DType::f32, {chunk, n});
  p.accumulate = false;
  for (int64_t row = 0; row < rows; row += chunk) {
    p.m = std::min(chunk, rows - row);
    if (!ctx.dry_run) widen(wide_x.as<float>(), x.as<bf16>() + row * k, p.m * k);
    multiply(ctx, p, wide_x.data, b, wide_y.data);
    if (!ctx.dry_run) narrow(y.as<bf16>() + row * n, wide_y.as<float>(), p.m * n, into);
  }
}

/// Generation: a few rows, and a weight that is packed for forward alone, because nothing is trained.
bool generates(const Tensor& x, const LinearWeight& w) {
  return x.dim(0) <= kFewRows && x.dtype != DType::f64 && w.packed && !w.packed_transposed &&
         !w.joined_in_backward;
}

void few_rows_forward(Context& ctx, const Tensor& y, const Tensor& x, const Tensor& weight) {
  const int64_t rows = x.dim(0), k = x.dim(1), n = y.dim(1);
  ScratchScope t(ctx.scratch);
  const Tensor ordered = t.alloc("x in order", DType::f32, {rows, k});
  if (ctx.dry_run) return;
  const auto run = [&](auto tag) {
    using T = decltype(tag);
    for (int64_t r = 0; r < rows; ++r) order_row(ordered.as<float>() + r * k, x.as<T>() + r * k, k);
    multiply_few_rows(rows, n, k, weight.as<T>(), ordered.as<float>(), y.as<T>());
  };
  x.dtype == DType::bf16 ? run(bf16{}) : run(float{});
}

}  // namespace

LinearPackedBytes linear_packed_bytes(Context& ctx, DType dtype, int64_t out_features, int64_t in_features,
                                      int64_t) {
  return {packed_bytes(ctx, dtype, in_features, out_features),
          packed_bytes(ctx, dtype, out_features, in_features)};
}

void linear_pack(Context& ctx, const LinearWeight& w) {
  const int64_t n = w.value.dim(0), k = w.value.dim(1);
  if (w.packed) pack(ctx, w.value.dtype, k, n, true, w.value.data, w.packed.data);
  if (w.packed_transposed) pack(ctx, w.value.dtype, n, k, false, w.value.data, w.packed_transposed.data);
}

void linear_forward(Context& ctx, Tensor y, const Tensor& x, const LinearWeight& w) {
  if (generates(x, w)) return few_rows_forward(ctx, y, x, w.value);
  product_of_rows(ctx, y, x, w.value, w.packed, Layout::transposed, Into::overwrite);
}

void linear_backward_input(Context& ctx, Tensor dx, const Tensor& dy, const LinearWeight& w, Into into) {
  product_of_rows(ctx, dx, dy, w.value, w.packed_transposed, Layout::plain, into);
}

void linear_backward_weight(Context& ctx, Tensor dw, const Tensor& dy, const Tensor& x, Into into) {
  const int64_t rows = x.dim(0), k = x.dim(1), n = dy.dim(1);
  if (rows == 0) {
    if (into == Into::overwrite) fill(ctx, dw, 0);
    return;
  }
  Product p{product_dtype(x.dtype), dw.dtype, n, k, rows, true, Layout::plain, into == Into::add, 0};
  if (!widens(x.dtype)) return multiply(ctx, p, dy.data, x.data, dw.data);

  ScratchScope t(ctx.scratch);
  const int64_t chunk = std::min(rows, kWeightGradientChunk);
  const Tensor wide_x = t.alloc("x in f32", DType::f32, {chunk, k});
  const Tensor wide_dy = t.alloc("dy in f32", DType::f32, {chunk, n});
  for (int64_t row = 0; row < rows; row += chunk) {
    p.k = std::min(chunk, rows - row);
    if (!ctx.dry_run) {
      widen(wide_x.as<float>(), x.as<bf16>() + row * k, p.k * k);
      widen(wide_dy.as<float>(), dy.as<bf16>() + row * n, p.k * n);
    }
    multiply(ctx, p, wide_dy.data, wide_x.data, dw.data);
    p.accumulate = true;
  }
}

#include "ops/cpu/isa_end.h"
