#pragma once
// Elementwise kernels. A thread processes kUnroll vectors of 16 bytes (of the narrowest type), one block
// width apart, and loads all of them before the first store: outputs may alias inputs at the same index, and
// enough bytes are in flight (2048 threads per SM x 16 bytes x kUnroll) to hide memory latency, the only
// limit. An operation is a struct with
//   kWidth, kUnroll                              elements of a vector, vectors of a thread
//   template <int N> In<N> load(int64_t i)       inputs of elements [i, i + N)
//   template <int N> void apply(int64_t i, in)   computes and stores them
#include "common/launch.h"

namespace sluice::cuda {

constexpr int kMapThreads = 256;

template <int kN, class Op>
__global__ void __launch_bounds__(kMapThreads) map_kernel(Op op, int64_t vectors, int64_t n) {
  constexpr int kUnroll = Op::kUnroll, kTile = kMapThreads * kUnroll;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * kTile, first = tile + threadIdx.x;
  if (tile + kTile <= vectors) {
    typename Op::template In<kN> in[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) in[u] = op.template load<kN>((first + u * kMapThreads) * kN);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) op.template apply<kN>((first + u * kMapThreads) * kN, in[u]);
  } else {
    for (int64_t v = first; v < vectors; v += kMapThreads)
      op.template apply<kN>(v * kN, op.template load<kN>(v * kN));
  }
  if constexpr (kN > 1) {  // after the last whole vector: fewer elements than threads in a block
    const int64_t i = vectors * kN + first;
    if (i < n) op.template apply<1>(i, op.template load<1>(i));
  }
}

/// Over n elements; `vectors`: all addresses accessed as vectors are aligned to their width.
template <class Op>
void map(Context& ctx, const char* name, const Op& op, int64_t n, bool vectors) {
  if (n == 0) return;
  const int64_t count = vectors ? n / Op::kWidth : n, tile = kMapThreads * Op::kUnroll;
  const LaunchConfig config = {.grid = dim3(count > tile ? blocks_for(count, tile) : 1),
                               .block = dim3(kMapThreads)};
  if (vectors)
    launch(ctx, name, config, map_kernel<Op::kWidth, Op>, op, count, n);
  else
    launch(ctx, name, config, map_kernel<1, Op>, op, count, n);
}

/// i / d for i d < 2^64 by one multiplication: 64-bit division is a call on a GPU.
class Divider {
 public:
  explicit Divider(int64_t d) : magic_(d > 1 ? ~uint64_t{0} / static_cast<uint64_t>(d) + 1 : 0) {}
  DEVICE_INLINE int64_t quotient(int64_t i) const {
    const auto u = static_cast<uint64_t>(i);
#ifdef SLUICE_EMULATION
    const auto high = static_cast<uint64_t>(static_cast<unsigned __int128>(u) * magic_ >> 64);
#else
    const uint64_t high = __umul64hi(u, magic_);
#endif
    return static_cast<int64_t>(magic_ == 0 ? u : high);
  }

 private:
  uint64_t magic_;  // 2^64 / d rounded up; 0 stands for d = 1
};

/// Whether all pointers are aligned to 16 bytes.
template <class... P>
bool aligned(const P*... p) {
  return ((reinterpret_cast<uintptr_t>(p) % 16 == 0) && ...);
}

/// y = f(x), from one storage type to another.
template <class F, class To, class From = To>
struct UnaryMap {
  static constexpr int kWidth = kVecWidth<To> > kVecWidth<From> ? kVecWidth<To> : kVecWidth<From>;
  static constexpr int kUnroll = sizeof(To) == sizeof(From) ? 4 : 2;
  To* y;
  const From* x;
  F f;
  template <int N>
  using In = Vec<From, N>;
  template <int N>
  DEVICE_INLINE In<N> load(int64_t i) const {
    return load_vec<N>(x + i);
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const In<N>& in) const {
    Vec<To, N> out;
#pragma unroll
    for (int e = 0; e < N; ++e) out.v[e] = from_float<To>(f(to_float(in.v[e])));
    store_vec<N>(y + i, out);
  }
};

/// y = f(a, b), all of one storage type.
template <class F, class T>
struct BinaryMap {
  static constexpr int kWidth = kVecWidth<T>, kUnroll = 2;
  T* y;
  const T *a, *b;
  F f;
  template <int N>
  struct In {
    Vec<T, N> a, b;
  };
  template <int N>
  DEVICE_INLINE In<N> load(int64_t i) const {
    return {load_vec<N>(a + i), load_vec<N>(b + i)};
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const In<N>& in) const {
    Vec<T, N> out;
#pragma unroll
    for (int e = 0; e < N; ++e) out.v[e] = from_float<T>(f(to_float(in.a.v[e]), to_float(in.b.v[e])));
    store_vec<N>(y + i, out);
  }
};

template <class T, class F>
void map_unary(Context& ctx, const char* name, T* y, const T* x, int64_t n, F f) {
  map(ctx, name, UnaryMap<F, T>{y, x, f}, n, aligned(y, x));
}
template <class T, class F>
void map_binary(Context& ctx, const char* name, T* y, const T* a, const T* b, int64_t n, F f) {
  map(ctx, name, BinaryMap<F, T>{y, a, b, f}, n, aligned(y, a, b));
}

}  // namespace sluice::cuda
