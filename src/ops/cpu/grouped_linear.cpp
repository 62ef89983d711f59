// One product per group, groups over threads.
#include "ops/grouped_linear.h"

#include <cblas.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/parallel_for.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"

namespace {

/// to (rows, columns) = from, gathered and widened.
template <class T, class A>
void gather(A* to, const Tensor& from, const Tensor& index, int64_t rows) {
  const int64_t columns = from.dim(1);
  parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* in = from.as<T>() + (index ? index.as<int32_t>()[r] : r) * columns;
      for (int64_t c = 0; c < columns; ++c) to[r * columns + c] = load(in + c);
    }
  });
}

inline void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda,
                 const float* b, int64_t ldb, float beta, float* c) {
  cblas_sgemm(CblasRowMajor, ta, tb, static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), 1, a,
              static_cast<int>(lda), b, static_cast<int>(ldb), beta, c, static_cast<int>(n));
}
inline void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int64_t m, int64_t n, int64_t k, const double* a, int64_t lda,
                 const double* b, int64_t ldb, double beta, double* c) {
  cblas_dgemm(CblasRowMajor, ta, tb, static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), 1, a,
              static_cast<int>(lda), b, static_cast<int>(ldb), beta, c, static_cast<int>(n));
}

/// y_r = x_r W_g^T, or x_r W_g.
void product_of_rows(Context& ctx, const Tensor& y, const Tensor& x, const LinearWeight& w, const Tensor& offsets,
                     const Tensor& index, bool transposed) {
  const int64_t rows = y.dim(0), n = y.dim(1), k = x.dim(1);
  if (rows == 0) return;
  ScratchScope t(ctx.scratch);
  const DType wide = accumulate_dtype(x.dtype);
  const Tensor a = t.alloc("rows of groups", wide, {rows, k}), b = t.alloc("weights of groups", wide, {w.value.numel()}),
               c = t.alloc("products of groups", wide, {rows, n});
  if (ctx.dry_run) return;
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    gather<T>(a.as<A>(), x, index, rows);
    gather<T>(b.as<A>(), w.value, Tensor(), w.value.dim(0));
    openblas_set_num_threads(1);
    const int32_t* offset = offsets.as<int32_t>();
    parallel_for(w.groups, 1, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) {
        const int64_t first = offset[g], m = offset[g + 1] - first;
        if (m == 0) continue;
        gemm(CblasNoTrans, transposed ? CblasTrans : CblasNoTrans, m, n, k, a.as<A>() + first * k, k,
             b.as<A>() + g * n * k, transposed ? k : n, A(0), c.as<A>() + first * n);
        for (int64_t i = first * n; i < (first + m) * n; ++i) store(y.as<T>() + i, c.as<A>()[i]);
      }
    });
  });
}

}  // namespace

LinearPackedBytes grouped_linear_packed_bytes(Context&, DType, int64_t, int64_t, int64_t) { return {}; }

void grouped_linear_pack(Context&, const LinearWeight&) {}

void grouped_linear_forward(Context& ctx, Tensor y, const Tensor& x, const LinearWeight& w, const Tensor& offsets,
                            const Tensor& index) {
  product_of_rows(ctx, y, x, w, offsets, index, true);
}

void grouped_linear_backward_input(Context& ctx, Tensor dx, const Tensor& dy, const LinearWeight& w, const Tensor& offsets,
                                   const Tensor& index) {
  product_of_rows(ctx, dx, dy, w, offsets, index, false);
}

void grouped_linear_backward_weight(Context& ctx, Tensor dw, const Tensor& dy, const Tensor& x, const Tensor& offsets,
                                    const Tensor& dy_index, const Tensor& x_index) {
  const int64_t groups = offsets.dim(0) - 1, n = dy.dim(1), k = x.dim(1);
  const int64_t rows = dy_index ? dy_index.dim(0) : x_index ? x_index.dim(0) : x.dim(0);
  if (rows == 0) return;
  ScratchScope t(ctx.scratch);
  const Tensor a = t.alloc("dy of groups", dw.dtype, {rows, n}), b = t.alloc("x of groups", dw.dtype, {rows, k});
  if (ctx.dry_run) return;
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    gather<T>(a.as<A>(), dy, dy_index, rows);
    gather<T>(b.as<A>(), x, x_index, rows);
    openblas_set_num_threads(1);
    const int32_t* offset = offsets.as<int32_t>();
    parallel_for(groups, 1, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) {
        const int64_t first = offset[g], m = offset[g + 1] - first;
        if (m > 0)
          gemm(CblasTrans, CblasNoTrans, n, k, m, a.as<A>() + first * n, n, b.as<A>() + first * k, k, A(1),
               dw.as<A>() + g * n * k);
      }
    });
  });
}

#include "ops/cpu/isa_end.h"
