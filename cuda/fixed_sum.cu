// Memory-bound: one vectorised pass each (common/map.cuh). Not yet run on a GPU.
#include "common/map.cuh"
#include "ops/fixed_sum.h"

namespace sluice::cuda {
namespace {

using Fixed = long long;  // the int64 type of CUDA's atomics

struct AddFixed {
  static constexpr int kWidth = 2, kUnroll = 4;
  Fixed *sums, *bad;
  const float* x;
  double limit;
  int64_t first;
  bool add;
  template <int N>
  struct In {
    Vec<float, N> x;
    Vec<Fixed, N> before;
  };
  template <int N>
  DEVICE_INLINE In<N> load(int64_t i) const {
    In<N> in;
    in.x = load_vec<N>(x + i);
    if (add) in.before = load_vec<N>(sums + i);
    return in;
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const In<N>& in) const {
    Vec<Fixed, N> out;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const double v = in.x.v[e];
      const bool good = fabs(v) < limit;  // NaN is not
      if (!good) atomicMin(bad, static_cast<Fixed>(first + i + e));
      out.v[e] = (add ? in.before.v[e] : 0) + (good ? llrint(v * kFixedOne) : 0);
    }
    store_vec<N>(sums + i, out);
  }
};

struct SumFixedRows {
  static constexpr int kWidth = 2, kUnroll = 2;
  Fixed* sum;
  const Fixed* rows;
  int64_t count, n;
  template <int N>
  using In = Vec<Fixed, N>;
  template <int N>
  DEVICE_INLINE In<N> load(int64_t i) const {
    return load_vec<N>(rows + i);
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, In<N> total) const {
#pragma unroll 4
    for (int64_t r = 1; r < count; ++r) {
      const Vec<Fixed, N> row = load_vec<N>(rows + r * n + i);
#pragma unroll
      for (int e = 0; e < N; ++e) total.v[e] += row.v[e];
    }
    store_vec<N>(sum + i, total);
  }
};

struct FromFixed {
  static constexpr int kWidth = 2, kUnroll = 4;
  float* x;
  const Fixed* sums;
  template <int N>
  using In = Vec<Fixed, N>;
  template <int N>
  DEVICE_INLINE In<N> load(int64_t i) const {
    return load_vec<N>(sums + i);
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const In<N>& in) const {
    Vec<float, N> out;
#pragma unroll
    for (int e = 0; e < N; ++e) out.v[e] = static_cast<float>(static_cast<double>(in.v[e]) / kFixedOne);
    store_vec<N>(x + i, out);
  }
};

Fixed* fixed_data(const Tensor& t) { return reinterpret_cast<Fixed*>(device_data<int32_t>(t)); }

float* gradients(const char* op, const Tensor& x) {
  SLUICE_CHECK(x.dtype == DType::f32, "{}: on a GPU x is f32, got {}", op, x.describe());
  return device_data<float>(x);
}

}  // namespace

void add_fixed(Context& ctx, Tensor sums, Tensor bad, const Tensor& x, double limit, int64_t first,
               Into into) {
  if (ctx.dry_run) return;
  const AddFixed op{fixed_data(sums), fixed_data(bad), gradients("add_fixed", x), limit, first,
                    into == Into::add};
  map(ctx, "add_fixed", op, x.numel(), aligned(op.sums, op.x));
}

void sum_fixed_rows(Context& ctx, Tensor sum, const Tensor& rows) {
  if (ctx.dry_run) return;
  const SumFixedRows op{fixed_data(sum), fixed_data(rows), rows.dim(0), sum.dim(0)};
  map(ctx, "sum_fixed_rows", op, op.n, op.n % SumFixedRows::kWidth == 0 && aligned(op.sum, op.rows));
}

void from_fixed(Context& ctx, Tensor x, const Tensor& sums) {
  if (ctx.dry_run) return;
  const FromFixed op{gradients("from_fixed", x), fixed_data(sums)};
  map(ctx, "from_fixed", op, x.numel(), aligned(op.x, op.sums));
}

}  // namespace sluice::cuda
