// Memory-bound: 30 bytes per bf16 parameter with its master copy, 28 per f32 parameter. A block processes
// 4096 elements of the flat buffers, each thread 4 at a time with four 16-byte loads in flight. A warp finds
// the first segment of its block's tile by a search of 32 places at once and continues from there. A vector
// that spans segments is processed element by element. All scalars of the step are read on the device. Not
// yet run on a GPU.
#include "common/map.cuh"
#include "ops/adamw.h"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 256, kPasses = 4;

__global__ void judge_update_kernel(UpdateControl* control, double beta1, double beta2) {
  UpdateControl& c = *control;
  const double loss = c.loss * c.gradient_scale, norm = sqrt(c.squares);
  // Not loss - loss == 0: contracted with the product, that is its rounding error.
  const bool finite = isfinite(loss) && isfinite(norm);
  c.loss = loss;
  c.grad_norm = norm;
  c.apply = finite && loss <= c.loss_limit && norm <= c.grad_norm_limit ? 1 : 0;
  c.clip = c.max_grad_norm > 0 && norm > c.max_grad_norm ? c.max_grad_norm / norm : 1;
  c.correction1 = 1 - pow(beta1, c.step);
  c.correction2 = 1 - pow(beta2, c.step);
}

template <class T>
struct Update {
  T* value;
  float* master;  // null: value is its own master
  float *m, *v;
  const float* gradient;
  const double* segments;  // (S, 4): begin, end, lr multiplier, weight decay
  const UpdateControl* control;
  int64_t count;
  int num_segments;
  float b1, c1, b2, c2, eps;
};

/// One row of segments with values derived from it.
struct Segment {
  int64_t begin, end;
  float rate, keep;
};

DEVICE_INLINE Segment read_segment(const double* row, const UpdateControl& c) {
  const double lr = c.lr * row[2];
  return {static_cast<int64_t>(row[0]), static_cast<int64_t>(row[1]), static_cast<float>(lr / c.correction1),
          static_cast<float>(1 - lr * row[3])};
}

/// The first segment that ends after `position`; `count` if none does. Segments ascend. Each round asks 32
/// places in one read, so that a thousand segments take two reads that wait for each other instead of ten.
/// All threads of a warp call it together.
DEVICE_INLINE int first_segment(const double* segments, int count, double position) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int first = 0, last = count;  // it lies in [first, last]
  while (first < last) {
    const int step = (last - first + 31) / 32, at = first + (lane + 1) * step - 1;
    const bool before = at < last && segments[4 * at + 1] <= position;
    const int passed = __popc(__ballot_sync(kFullWarp, before));
    first += passed * step;
    last = min(last, first + step - 1);
  }
  return first;
}

/// Elements [i, i + N), all in one segment.
template <int N, class T>
DEVICE_INLINE void update_elements(const Update<T>& u, int64_t i, const Segment& s, float clip, float root) {
  const Vec<float, N> g = load_vec<N>(u.gradient + i);
  Vec<float, N> m = load_vec<N>(u.m + i), v = load_vec<N>(u.v + i), w;
  if constexpr (sizeof(T) == 4)
    w = load_vec<N>((u.master ? u.master : u.value) + i);
  else
    w = load_vec<N>(u.master + i);
  Vec<T, N> out;
#pragma unroll
  for (int e = 0; e < N; ++e) {
    const float ge = g.v[e] * clip;
    m.v[e] = u.b1 * m.v[e] + u.c1 * ge;
    v.v[e] = u.b2 * v.v[e] + u.c2 * ge * ge;
    w.v[e] = w.v[e] * s.keep - s.rate * m.v[e] / (sqrtf(v.v[e]) * root + u.eps);
    out.v[e] = from_float<T>(w.v[e]);
  }
  store_vec<N>(u.m + i, m);
  store_vec<N>(u.v + i, v);
  if (u.master) store_vec<N>(u.master + i, w);
  store_vec<N>(u.value + i, out);
}

template <int kN, class T>
__global__ void __launch_bounds__(kThreads) adamw_kernel(Update<T> u) {
  const UpdateControl& c = *u.control;
  if (c.apply == 0) return;
  const float clip = static_cast<float>(c.clip), root = static_cast<float>(1 / sqrt(c.correction2));
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * (kThreads * kPasses * kN);
  int s = first_segment(u.segments, u.num_segments, static_cast<double>(tile));
  if (s == u.num_segments) return;
  Segment segment = read_segment(u.segments + 4 * s, c);
  for (int pass = 0; pass < kPasses; ++pass) {
    const int64_t i = tile + (pass * kThreads + static_cast<int>(threadIdx.x)) * kN;
    if (i >= u.count) return;
    int64_t at = i;
    while (at < i + kN) {  // once, except at segment boundaries
      while (segment.end <= at) {
        if (++s == u.num_segments) return;
        segment = read_segment(u.segments + 4 * s, c);
      }
      if (kN > 1 && at == i && segment.begin <= i && i + kN <= segment.end) {
        update_elements<kN>(u, i, segment, clip, root);
        break;
      }
      if (segment.begin <= at) update_elements<1>(u, at, segment, clip, root);
      ++at;
    }
  }
}

}  // namespace

void judge_update(Context& ctx, Tensor control, const AdamwSettings& settings) {
  if (ctx.dry_run) return;
  launch(ctx, "judge_update", {.grid = dim3(1), .block = dim3(1)}, judge_update_kernel,
         device_data<UpdateControl>(control), settings.beta1, settings.beta2);
}

void adamw_update(Context& ctx, Tensor value, Tensor master, Tensor m, Tensor v, const Tensor& gradient,
                  const Tensor& segments, const Tensor& control, const AdamwSettings& settings) {
  if (ctx.dry_run) return;
  const int64_t count = value.numel();
  if (count == 0 || segments.dim(0) == 0) return;
  dispatch_storage("adamw_update", value, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const Update<T> u = {device_data<T>(value),
                         device_data<float>(master),
                         device_data<float>(m),
                         device_data<float>(v),
                         device_data<float>(gradient),
                         device_data<double>(segments),
                         device_data<UpdateControl>(control),
                         count,
                         static_cast<int>(segments.dim(0)),
                         static_cast<float>(settings.beta1),
                         static_cast<float>(1 - settings.beta1),
                         static_cast<float>(settings.beta2),
                         static_cast<float>(1 - settings.beta2),
                         static_cast<float>(settings.eps)};
    // A vector is 4 elements: 16 bytes of f32, 8 of bf16. The remainder of a flat buffer needs no special
    // case, because no segment extends past the end.
    constexpr int kN = 4;
    const bool vectors = aligned(u.value, u.master, u.m, u.v, u.gradient);
    const LaunchConfig config = {.grid = dim3(blocks_for(count, kThreads * kPasses * (vectors ? kN : 1))),
                                 .block = dim3(kThreads)};
    if (vectors)
      launch(ctx, "adamw_update", config, adamw_kernel<kN, T>, u);
    else
      launch(ctx, "adamw_update", config, adamw_kernel<1, T>, u);
  });
}

}  // namespace sluice::cuda
