// Memory-bound: each thread processes kN adjacent elements of the part. Not yet run on a GPU.
#include "common/map.cuh"
#include "ops/columns.h"

namespace sluice::cuda {
namespace {

enum class Way { add, put, take };

/// Sizes of the narrow matrix (rows, n); rows of the wide one have `width` elements.
template <class T, Way kWay>
struct Columns {
  static constexpr int kWidth = kVecWidth<T>, kUnroll = 2;
  T *whole, *part;
  Divider row;
  int64_t n, width, begin;
  template <int N>
  struct In {
    Vec<T, N> whole, part;
  };
  DEVICE_INLINE int64_t place(int64_t i) const {
    const int64_t r = row.quotient(i);
    return r * width + begin + (i - r * n);
  }
  template <int N>
  DEVICE_INLINE In<N> load(int64_t i) const {
    In<N> in;
    if constexpr (kWay != Way::put) in.whole = load_vec<N>(whole + place(i));
    if constexpr (kWay != Way::take) in.part = load_vec<N>(part + i);
    return in;
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const In<N>& in) const {
    if constexpr (kWay == Way::add) {
      Vec<T, N> sum;
#pragma unroll
      for (int e = 0; e < N; ++e) sum.v[e] = from_float<T>(to_float(in.whole.v[e]) + to_float(in.part.v[e]));
      store_vec<N>(whole + place(i), sum);
    } else if constexpr (kWay == Way::put) {
      store_vec<N>(whole + place(i), in.part);
    } else {
      store_vec<N>(part + i, in.whole);
    }
  }
};

template <Way kWay>
void run(Context& ctx, const char* name, const Tensor& whole, const Tensor& part, int64_t begin) {
  if (ctx.dry_run || part.numel() == 0) return;
  dispatch_storage(name, part, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const int64_t n = part.dim(1), width = whole.dim(1);
    const Columns<T, kWay> op = {device_data<T>(whole), device_data<T>(part), Divider(n), n, width, begin};
    const bool vectors = n % op.kWidth == 0 && width % op.kWidth == 0 && begin % op.kWidth == 0;
    map(ctx, name, op, part.numel(), vectors && aligned(op.whole, op.part));
  });
}

}  // namespace

void add_columns(Context& ctx, Tensor y, const Tensor& part, int64_t begin) {
  run<Way::add>(ctx, "add_columns", y, part, begin);
}

void put_columns(Context& ctx, Tensor y, const Tensor& part, int64_t begin) {
  run<Way::put>(ctx, "put_columns", y, part, begin);
}

void take_columns(Context& ctx, Tensor part, const Tensor& x, int64_t begin) {
  run<Way::take>(ctx, "take_columns", x, part, begin);
}

}  // namespace sluice::cuda
