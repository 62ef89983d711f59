// Bound by memory: forward reads and writes a row once, backward reads x and dy and writes dx once; mapping
// in rope_rows.cuh. Backward is persistent as RMSNorm's is (rmsnorm.cu): a lane keeps dw of its columns in
// registers over all its rows. Nothing is rounded between the norm and the rotation. Not yet run on a GPU.
#include "ops/norm_rope.h"
#include "rope_rows.cuh"

namespace sluice::cuda {
namespace {

constexpr int kBlock = 128;  // of backward; three on a multiprocessor

template <class T>
struct Backward {
  T* dx;            // may be dy
  int64_t dx_gap;   // elements from the end of one token's dx to the next's
  float* partials;  // (chunks, weight rows, D); null, as weight: ones
  const T *dy, *x, *weight;
  const float* rstd;
  RopeTable table;
  int64_t units;       // (token, slice) pairs that the blocks of one weight row share
  int heads, slices;   // slices of kHeads heads; 1 with a weight per head
  Divider per_token;   // by slices
  int groups, chunks;  // weight rows: 1 or heads
};

/// A unit's token, where its heads begin among the rows of x, and how many are a thread's.
struct Place {
  int64_t token, row;
  int heads;
};

/// The vectors of a unit that a thread prefetches.
template <class T, int kHeads>
struct NextUnit {
  static constexpr int kAngles = kVecWidth<T> / 4;
  using Vectors = Prefetch<kBlock, 4 * kHeads + 2 * kAngles>;
  static constexpr int x(int head, int side) { return 2 * head + side; }
  static constexpr int dy(int head, int side) { return 2 * (kHeads + head) + side; }
  static constexpr int cosine(int v) { return 4 * kHeads + v; }
  static constexpr int sine(int v) { return 4 * kHeads + kAngles + v; }
};

/// Block (chunk, g): weight row g; with one row for all heads a unit is kHeads heads of a token, otherwise
/// head g of it. The next unit is on its way while this one is computed, and the position of the one after
/// it, on which its angles depend.
template <class T, int kLanes, int kHeads>
__global__ void __launch_bounds__(kBlock, 3) norm_rope_backward_kernel(Backward<T> p) {
  constexpr int kN = kVecWidth<T>, kUnits = kBlock / kLanes;
  using Next = NextUnit<T, kHeads>;
  DYN_SMEM(char, smem, 16);
  typename Next::Vectors next(smem);
  const int half = p.table.half, i = static_cast<int>(threadIdx.x) % kLanes * kN;
  const int group = static_cast<int>(blockIdx.x) % p.groups, chunk = static_cast<int>(blockIdx.x) / p.groups;
  const int64_t weight_at = group * 2 * half + i, stride = static_cast<int64_t>(p.chunks) * kUnits;
  const auto place = [&](int64_t unit) {
    const int64_t t = p.per_token.quotient(unit);
    const int first = p.groups > 1 ? group : static_cast<int>(unit - t * p.slices) * kHeads;
    const bool mine = unit < p.units && i < half;
    return Place{t, t * p.heads + first, mine ? (p.heads - first < kHeads ? p.heads - first : kHeads) : 0};
  };
  const auto angles = [&](int64_t unit) {
    return unit < p.units && i < half ? p.table.row(p.per_token.quotient(unit)) : -1;
  };
  float next_r[kHeads] = {};
  const auto ask = [&](int64_t unit, int64_t row_of_angles) {
    const Place at = place(unit);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < at.heads) {
        const int64_t element = (at.row + h) * 2 * half + i;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          next.ask(Next::x(h, side), p.x + element + side * half);
          next.ask(Next::dy(h, side), p.dy + element + side * half);
        }
        next_r[h] = p.rstd[at.row + h];
      }
    }
    if (at.heads > 0) {
      const bool inside = row_of_angles >= 0;  // otherwise zeros, which give a rotated vector of 0
      const int64_t element = inside ? row_of_angles + i : 0;
#pragma unroll
      for (int v = 0; v < Next::kAngles; ++v) {
        next.ask(Next::cosine(v), p.table.cos + element + v * 4, inside);
        next.ask(Next::sine(v), p.table.sin + element + v * 4, inside);
      }
    }
    next.commit();
  };
  int64_t unit = static_cast<int64_t>(chunk) * kUnits + static_cast<int>(threadIdx.x) / kLanes;
  ask(unit, angles(unit));
  int64_t next_angles = angles(unit + stride);
  GroupSum<kBlock, kLanes> group_sum;
  float dw[2][kN] = {};
  for (int64_t base = static_cast<int64_t>(chunk) * kUnits; base < p.units; base += stride, unit += stride) {
    const Place here = place(unit);          // every thread stays for the sums over its group
    Vec<T, kN> x[kHeads][2], dy[kHeads][2];  // what was not asked for is read, too, and not used
    float r[kHeads], c[kN], s[kN];
    next.wait();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        x[h][side] = next.template read<T>(Next::x(h, side));
        dy[h][side] = next.template read<T>(Next::dy(h, side));
      }
      r[h] = next_r[h];
    }
#pragma unroll
    for (int v = 0; v < Next::kAngles; ++v) {
      const Vec16<float> cosines = next.template read<float>(Next::cosine(v)),
                         sines = next.template read<float>(Next::sine(v));
#pragma unroll
      for (int e = 0; e < 4; ++e) c[v * 4 + e] = cosines.v[e], s[v * 4 + e] = sines.v[e] * p.table.direction;
    }
    ask(unit + stride, next_angles);
    next_angles = angles(unit + 2 * stride);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      NormRow<kN> row;
      float gx = 0;
      if (h < here.heads) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          to_floats(row.weight[side], load_weight<kN>(p.weight, weight_at + side * half));
          to_floats(row.d[side], dy[h][side]);
          to_floats(row.x[side], x[h][side]);
        }
#pragma unroll
        for (int e = 0; e < kN; ++e) rotate(row.d[0][e], row.d[1][e], c[e], s[e]);
        gx = row.sums(dw, r[h]);
      }
      gx = group_sum(gx);
      if (h < here.heads) {
        row.to_gradient(gx, r[h], half);
        T* const dx = p.dx + here.token * p.dx_gap + (here.row + h) * 2 * half + i;
        store_vec<kN>(dx, from_floats<T>(row.d[0]));
        store_vec<kN>(dx + half, from_floats<T>(row.d[1]));
      }
    }
  }
  if (p.partials)  // of the whole launch, or none of it
    store_columns<kBlock, kLanes>(p.partials + static_cast<int64_t>(blockIdx.x) * 2 * half, dw, half,
                                  2 * half);
}

/// Any head size: a block of one warp goes over its rows one by one, and keeps dw in the partials themselves.
template <class T>
__global__ void __launch_bounds__(32) norm_rope_backward_any_kernel(Backward<T> p) {
  const int half = p.table.half, lane = static_cast<int>(threadIdx.x);
  const int group = static_cast<int>(blockIdx.x) % p.groups, chunk = static_cast<int>(blockIdx.x) / p.groups;
  const auto weight = [&](int i) { return to_float(load_weight<1>(p.weight, group * 2 * half + i).v[0]); };
  float* const dw = p.partials ? p.partials + static_cast<int64_t>(blockIdx.x) * 2 * half : nullptr;
  for (int i = lane; dw && i < half; i += 32) dw[i] = dw[half + i] = 0;
  for (int64_t unit = chunk; unit < p.units; unit += p.chunks) {
    const int64_t row = p.groups > 1 ? unit * p.heads + group : unit, t = row / p.heads;
    const T *const x = p.x + row * 2 * half, *const dy = p.dy + row * 2 * half;
    T* const dx = p.dx + t * p.dx_gap + row * 2 * half;
    const int64_t angles = p.table.row(t);
    const float r = p.rstd[row];
    float gx = 0, c[1], s[1];
    for (int i = lane; i < half; i += 32) {
      float a = to_float(dy[i]), b = to_float(dy[half + i]);
      p.table.load(angles, i, c, s);
      rotate(a, b, c[0], s[0]);
      const float xa = to_float(x[i]), xb = to_float(x[half + i]);
      gx += a * xa * weight(i) + b * xb * weight(half + i);
      if (!dw) continue;
      dw[i] += a * xa * r;
      dw[half + i] += b * xb * r;
    }
    const float k = r * r * (warp_sum(gx) / static_cast<float>(2 * half));
    for (int i = lane; i < half; i += 32) {
      float a = to_float(dy[i]), b = to_float(dy[half + i]);
      p.table.load(angles, i, c, s);
      rotate(a, b, c[0], s[0]);
      dx[i] = from_float<T>(r * (a * weight(i) - to_float(x[i]) * k));
      dx[half + i] = from_float<T>(r * (b * weight(half + i) - to_float(x[half + i]) * k));
    }
  }
}

}  // namespace

void norm_rope_forward(Context& ctx, Tensor y, Tensor rstd, const Tensor& x, const Tensor& weight, double eps,
                       const Tensor& positions, const Tensor& cos, const Tensor& sin) {
  if (ctx.dry_run) return;
  dispatch_storage("norm_rope_forward", x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const int stride = !weight || weight.numel() == x.dim(2) ? 0 : static_cast<int>(x.dim(2));
    launch_rope<true, T>(
        ctx, "norm_rope_forward",
        {device_data<T>(y), y.stride(), device_data<T>(x), rope_angles(ctx, positions, cos, sin, 1.f),
         x.dim(0), static_cast<int>(x.dim(1)), 1, Divider(1), device_data<float>(rstd),
         device_data<T>(weight), stride, static_cast<float>(eps)});
  });
}

void norm_rope_backward(Context& ctx, Tensor dx, Tensor dweight, const Tensor& dy, const Tensor& x,
                        const Tensor& weight, const Tensor& rstd, const Tensor& positions, const Tensor& cos,
                        const Tensor& sin) {
  constexpr int kHeads = 2;
  const int64_t tokens = x.dim(0), heads = x.dim(1), width = x.dim(2),
                groups = weight ? weight.numel() / width : 1;
  const int64_t slices = groups > 1 ? 1 : (heads + kHeads - 1) / kHeads;
  // Three blocks for each of 132 multiprocessors, at least two rounds each; by shapes alone, as
  // rmsnorm_backward.
  const int64_t at_once = 2 * kBlock / 8, wanted = (tokens * slices + at_once - 1) / at_once;
  const int64_t chunks = std::max<int64_t>(std::min<int64_t>(wanted, 396 / groups), 1);
  ScratchScope scratch(ctx.scratch);
  const Tensor partials =
      weight ? scratch.alloc("norm_rope_dweight", DType::f32, {chunks, groups * width}) : Tensor();
  if (ctx.dry_run || tokens * heads * width == 0) return;
  dispatch_storage("norm_rope_backward", x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    Backward<T> p = {device_data<T>(dx),
                     dx.stride() - heads * width,
                     device_data<float>(partials),
                     device_data<T>(dy),
                     device_data<T>(x),
                     device_data<T>(weight),
                     device_data<float>(rstd),
                     rope_angles(ctx, positions, cos, sin, -1.f),
                     tokens * slices,
                     static_cast<int>(heads),
                     static_cast<int>(slices),
                     Divider(slices),
                     static_cast<int>(groups),
                     static_cast<int>(chunks)};
    const dim3 grid(static_cast<unsigned>(chunks * groups));
    const bool vectors =
        aligned(p.dx, p.dy, p.x, p.weight, p.table.cos, p.table.sin) && dx.stride() % kVecWidth<T> == 0;
    const bool done = with_rope_lanes<T>(p.table.half, vectors, [&](auto lanes) {
      const auto start = [&](auto heads_at_once) {
        launch(ctx, "norm_rope_backward",
               {.grid = grid, .block = dim3(kBlock), .smem = NextUnit<T, heads_at_once()>::Vectors::kBytes},
               norm_rope_backward_kernel<T, lanes(), heads_at_once()>, p);
      };
      if (groups > 1)
        start(std::integral_constant<int, 1>());
      else
        start(std::integral_constant<int, kHeads>());
    });
    if (!done) {
      p.units = groups > 1 ? tokens : tokens * heads;
      launch(ctx, "norm_rope_backward", {.grid = grid, .block = dim3(32)}, norm_rope_backward_any_kernel<T>,
             p);
    }
    if (weight)
      column_sums(ctx, "norm_rope_backward dweight", device_data<float>(dweight), p.partials, chunks,
                  groups * width, Into::add);
  });
}

}  // namespace sluice::cuda
