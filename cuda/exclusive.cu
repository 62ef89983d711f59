// Memory-bound: y, dz and v are read several times, from cache after the first. A block processes a token:
// warps take the dot products of its heads, then threads take the channels of its key/value heads, over all
// heads of one, so that dz may be the memory of dy. Not yet run on a GPU.
#include <cfloat>

#include "common/map.cuh"
#include "ops/exclusive.h"

namespace sluice::cuda {
namespace {

constexpr int kBlock = 256, kWarps = kBlock / 32;

template <class T>
struct Exclusive {
  T* out;     // z, or dy
  T* dv;      // backward
  float* ds;  // backward: (T, H), or null
  const T *y, *dz, *v, *s;
  int heads, group, depth;
  float rounding;  // exclusive_rounding, squared
};

template <class T>
DEVICE_INLINE float dot_of(const T* a, const T* b, int depth) {
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < depth; i += 32) sum += to_float(a[i]) * to_float(b[i]);
  return warp_sum(sum);
}

/// Per head of the block's token, in shared memory.
struct Parts {
  float kept;                // 1, or 1 - s where y counts as c v and the others are 0
  float of_v;                // forward: z = kept y - of_v v
  float of_dz, of_y, of_vv;  // backward: dy = kept dz - of_y v, dv = of_vv v - of_dz dz - of_y y
};

template <class T>
DEVICE_INLINE bool counts_as_parallel(const T* y, const T* v, float c, float rounding, int depth) {
  float rest = 0, square = 0;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < depth; i += 32) {
    const float x = to_float(y[i]), r = x - c * to_float(v[i]);
    rest += r * r, square += x * x;
  }
  return warp_sum(rest) < rounding * warp_sum(square);
}

template <class T, bool kBackward>
DEVICE_INLINE void head_parts(const Exclusive<T>& a, Parts* parts, int64_t token) {
  for (int h = static_cast<int>(threadIdx.x) / 32; h < a.heads; h += kWarps) {
    const int64_t row = token * a.heads + h;
    const T *y = a.y + row * a.depth, *v = a.v + row / a.group * a.depth;
    const float square = dot_of(v, v, a.depth), inverse = square >= FLT_MIN ? 1.f / square : 0.f;
    const float c = dot_of(y, v, a.depth) * inverse, scale = a.s ? to_float(a.s[h]) : 1.f;
    const bool parallel = counts_as_parallel(y, v, c, a.rounding, a.depth);
    Parts p = {};
    p.kept = parallel ? 1.f - scale : 1.f;
    if constexpr (kBackward) {
      const float dot = dot_of(a.dz + row * a.depth, v, a.depth);
      if (!parallel) p.of_dz = scale * c, p.of_y = scale * (dot * inverse), p.of_vv = 2.f * c * p.of_y;
      if (a.ds && threadIdx.x % 32 == 0) a.ds[row] = -c * dot;
    } else {
      p.of_v = parallel ? 0.f : scale * c;
    }
    if (threadIdx.x % 32 == 0) parts[h] = p;
  }
  __syncthreads();
}

template <class T, bool kBackward>
__global__ void __launch_bounds__(kBlock) exclusive_kernel(Exclusive<T> a) {
  DYN_SMEM(Parts, parts, 16);
  const int64_t token = blockIdx.x;
  head_parts<T, kBackward>(a, parts, token);
  const int kv_heads = a.heads / a.group;
  for (int i = static_cast<int>(threadIdx.x); i < kv_heads * a.depth; i += kBlock) {
    const int kv = i / a.depth, channel = i % a.depth;
    const float v = to_float(a.v[token * kv_heads * a.depth + i]);
    float dv = 0;
    for (int h = kv * a.group; h < (kv + 1) * a.group; ++h) {
      const int64_t at = (token * a.heads + h) * a.depth + channel;
      const Parts p = parts[h];
      if constexpr (kBackward) {
        const float d = to_float(a.dz[at]);
        dv += p.of_vv * v - p.of_dz * d - p.of_y * to_float(a.y[at]);
        a.out[at] = from_float<T>(p.kept * d - p.of_y * v);
      } else {
        a.out[at] = from_float<T>(p.kept * to_float(a.y[at]) - p.of_v * v);
      }
    }
    if constexpr (kBackward) a.dv[token * kv_heads * a.depth + i] = from_float<T>(dv);
  }
}

template <class T>
const T* data_or_null(const Tensor& t) {
  return t ? device_data<T>(t) : nullptr;
}

template <class T, bool kBackward>
void launch_exclusive(Context& ctx, const char* name, Exclusive<T> a, const Tensor& y, const Tensor& v,
                      const Tensor& s, bool normed) {
  const double rounding = exclusive_rounding(y.dtype, normed);
  a.rounding = static_cast<float>(rounding * rounding);
  a.y = data_or_null<T>(y), a.v = data_or_null<T>(v), a.s = data_or_null<T>(s);
  a.heads = static_cast<int>(y.dim(1)), a.depth = static_cast<int>(y.dim(2));
  a.group = static_cast<int>(y.dim(1) / v.dim(1));
  launch(ctx, name,
         {.grid = dim3(static_cast<unsigned>(y.dim(0))),
          .block = dim3(kBlock),
          .smem = static_cast<size_t>(a.heads) * sizeof(Parts)},
         exclusive_kernel<T, kBackward>, a);
}

}  // namespace

void exclusive_forward(Context& ctx, Tensor z, const Tensor& y, const Tensor& v, const Tensor& s,
                       bool normed) {
  if (ctx.dry_run || y.numel() == 0) return;
  dispatch_storage("exclusive_forward", y, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    Exclusive<T> a = {};
    a.out = device_data<T>(z);
    launch_exclusive<T, false>(ctx, "exclusive_forward", a, y, v, s, normed);
  });
}

void exclusive_backward_rows(Context& ctx, Tensor dy, Tensor dv, Tensor ds_rows, const Tensor& dz,
                             const Tensor& y, const Tensor& v, const Tensor& s, bool normed) {
  if (ctx.dry_run || y.numel() == 0) return;
  dispatch_storage("exclusive_backward", y, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    Exclusive<T> a = {};
    a.out = device_data<T>(dy), a.dv = device_data<T>(dv), a.dz = device_data<T>(dz);
    a.ds = ds_rows ? device_data<float>(ds_rows) : nullptr;
    launch_exclusive<T, true>(ctx, "exclusive_backward", a, y, v, s, normed);
  });
}

}  // namespace sluice::cuda
