// Memory-bound. Forward: a thread per logit counts the larger ones, which gives its rank among the chosen;
// then a thread processes kN channels of a head and reads them only from the chosen experts. Backward: kLanes
// threads process an expert of a head in the same way as a headwise gate processes a head (cuda/gate.cu), so
// that a single expert gives the bits of a gate; they write zeros for experts that were not chosen. Not yet
// run on a GPU.
#include "common/math.cuh"
#include "common/rows.cuh"
#include "ops/switch_heads.h"

namespace sluice::cuda {
namespace {

constexpr int kBlock = 256;

template <class T>
struct Experts {
  T *v, *dlogits, *dprojected;  // forward writes v, backward the others
  int* chosen;
  const T *dv, *logits, *projected;
  int64_t rows, channels, width;  // rows: (token, head)
  int experts, picked, slots;     // slots = channels / width
};

/// NaN ranks above all numbers, so that it is chosen and becomes visible.
DEVICE_INLINE float key_of(float z) { return isnan(z) ? INFINITY : z; }

template <class T>
__global__ void __launch_bounds__(kBlock) choose_kernel(Experts<T> s) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x, row = i / s.experts;
  if (row >= s.rows) return;
  const int mine = static_cast<int>(i - row * s.experts);
  const T* const z = s.logits + row * s.experts;
  const float key = key_of(to_float(z[mine]));
  int place = 0;
#pragma unroll 4
  for (int e = 0; e < s.experts; ++e) {
    const float other = key_of(to_float(z[e]));
    place += other > key || (other == key && e < mine);
  }
  if (place < s.picked) s.chosen[row * s.picked + place] = mine;
}

/// units: groups of kN channels.
template <class T, int kN>
__global__ void __launch_bounds__(kBlock)
    combine_kernel(Experts<T> s, int64_t units, Divider per_row, Divider per_slot) {
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (unit >= units) return;
  const int64_t row = per_row.quotient(unit), channel = unit * kN - row * s.channels;
  const int slot = static_cast<int>(per_slot.quotient(channel));
  const int64_t within = channel - slot * s.width;
  float sum[kN] = {};
  bool first = true;  // 0 + x would lose the sign of a zero
  for (int k = 0; k < s.picked; ++k) {
    const int e = s.chosen[row * s.picked + k];
    if (e % s.slots != slot) continue;
    const float r = sigmoid(to_float(s.logits[row * s.experts + e]));
    const Vec<T, kN> x = load_vec<kN>(s.projected + (row * s.experts + e) * s.width + within);
#pragma unroll
    for (int i = 0; i < kN; ++i) sum[i] = first ? to_float(x.v[i]) * r : sum[i] + to_float(x.v[i]) * r;
    first = false;
  }
  Vec<T, kN> out;
#pragma unroll
  for (int i = 0; i < kN; ++i) out.v[i] = from_float<T>(sum[i]);
  store_vec<kN>(s.v + unit * kN, out);
}

template <class T, int kLanes, int kN>
__global__ void __launch_bounds__(kBlock) experts_backward_kernel(Experts<T> s) {
  constexpr int kStep = kLanes * kN;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * (kBlock / kLanes) +
                    static_cast<int>(threadIdx.x) / kLanes,
                row = i / s.experts;
  const bool exists = row < s.rows;
  const int expert = static_cast<int>(i - row * s.experts);
  bool mine = false;
  for (int k = 0; exists && k < s.picked; ++k) mine |= s.chosen[row * s.picked + k] == expert;
  const float r = mine ? sigmoid(to_float(s.logits[i])) : 0.f;
  const int64_t from = row * s.channels + expert % s.slots * s.width, at = i * s.width;
  float ds = 0;
#pragma unroll 2
  for (int64_t c = lane * kN; exists && c < s.width; c += kStep) {
    Vec<T, kN> d = {}, x;
    if (mine) {
      d = load_vec<kN>(s.dv + from + c);
      x = load_vec<kN>(s.projected + at + c);
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const float de = to_float(d.v[e]);
        ds += de * to_float(x.v[e]);
        d.v[e] = from_float<T>(de * r);
      }
    }
    store_vec<kN>(s.dprojected + at + c, d);
  }
  ds = GroupSum<kBlock, kLanes>()(ds);
  if (exists && lane == 0) s.dlogits[i] = from_float<T>(mine ? ds * (r * (1.f - r)) : 0.f);
}

template <class T>
Experts<T> experts_of(const Tensor& v, const Tensor& chosen, const Tensor& logits, const Tensor& projected) {
  Experts<T> s = {};
  s.chosen = device_data<int>(chosen);
  s.logits = device_data<T>(logits);
  s.projected = device_data<T>(projected);
  s.rows = v.dim(0) * v.dim(1);
  s.channels = v.dim(2);
  s.width = projected.dim(3);
  s.experts = static_cast<int>(projected.dim(2));
  s.picked = static_cast<int>(chosen.dim(2));
  s.slots = static_cast<int>(s.channels / s.width);
  return s;
}

}  // namespace

void switch_heads_forward(Context& ctx, Tensor v, Tensor chosen, const Tensor& logits,
                          const Tensor& projected) {
  if (ctx.dry_run || v.numel() == 0) return;
  const char* const name = "switch_heads_forward";
  dispatch_storage(name, v, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    Experts<T> s = experts_of<T>(v, chosen, logits, projected);
    s.v = device_data<T>(v);
    launch(ctx, "switch_heads_forward choose",
           {.grid = dim3(blocks_for(s.rows * s.experts, kBlock)), .block = dim3(kBlock)}, choose_kernel<T>,
           s);
    const auto combine = [&](auto width) {
      const int64_t units = s.rows * s.channels / width();
      launch(ctx, name, {.grid = dim3(blocks_for(units, kBlock)), .block = dim3(kBlock)},
             combine_kernel<T, width()>, s, units, Divider(s.channels / width()), Divider(s.width));
    };
    if (s.width % kVecWidth<T> == 0 && aligned(s.v, s.projected))
      combine(std::integral_constant<int, kVecWidth<T>>());
    else
      combine(std::integral_constant<int, 1>());
  });
}

void switch_heads_backward(Context& ctx, Tensor dlogits, Tensor dprojected, const Tensor& dv,
                           const Tensor& logits, const Tensor& projected, const Tensor& chosen) {
  if (ctx.dry_run || dv.numel() == 0) return;
  const char* const name = "switch_heads_backward";
  dispatch_storage(name, dv, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    constexpr int kN = kVecWidth<T>;
    Experts<T> s = experts_of<T>(dv, chosen, logits, projected);
    s.dlogits = device_data<T>(dlogits);
    s.dprojected = device_data<T>(dprojected);
    s.dv = device_data<T>(dv);
    const auto go = [&](auto lanes, auto width) {
      launch(ctx, name,
             {.grid = dim3(blocks_for(s.rows * s.experts, kBlock / lanes())), .block = dim3(kBlock)},
             experts_backward_kernel<T, lanes(), width()>, s);
    };
    if (s.width % kN != 0 || !aligned(s.dv, s.projected, s.dprojected))
      go(std::integral_constant<int, 32>(), std::integral_constant<int, 1>());
    else if (s.width / kN <= 8)
      go(std::integral_constant<int, 8>(), std::integral_constant<int, kN>());
    else
      go(std::integral_constant<int, 16>(), std::integral_constant<int, kN>());
  });
}

}  // namespace sluice::cuda
