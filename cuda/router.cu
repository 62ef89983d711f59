// The logits and their gradients are products of cuBLASLt. The rest is bound by memory, (T, E) numbers in f32
// read and written once, as long as its instructions keep up: a warp takes a token, lane l its experts l, l +
// 32, ... in registers. At 8 of 128 experts a row is 1 KiB of traffic and some 250 instructions, most of them
// the choice. Not yet run on a GPU.
#include "common/map.cuh"
#include "common/ptx.cuh"
#include "matmul.h"
#include "ops/router.h"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kFinalThreads = 1024;

/// f(experts of a lane), a std::integral_constant.
template <class F>
void with_per_lane(int64_t experts, F&& f) {
  if (experts <= 32)
    f(std::integral_constant<int, 1>());
  else if (experts <= 64)
    f(std::integral_constant<int, 2>());
  else if (experts <= 128)
    f(std::integral_constant<int, 4>());
  else if (experts <= 256)
    f(std::integral_constant<int, 8>());
  else if (experts <= 512)
    f(std::integral_constant<int, 16>());
  else
    f(std::integral_constant<int, 32>());
}

struct Route {
  float *probabilities, *lse, *weights;
  int* experts;
  const float* logits;
  int64_t tokens;
  int num_experts, chosen;
  bool norm_topk_prob;
};

/// The choice is K rounds of a maximum over the warp. What is compared is the bits of p plus one: their order
/// is that of non-negative numbers, NaN is above all of them, and 0 is left for what is chosen already or no
/// expert.
template <int kPerLane>
__global__ void __launch_bounds__(kThreads) route_kernel(Route r) {
  const int lane = static_cast<int>(threadIdx.x) % 32, E = r.num_experts;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (token >= r.tokens) return;  // the whole warp
  float p[kPerLane];
  float largest = -INFINITY;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int e = j * 32 + lane;
    p[j] = e < E ? r.logits[token * E + e] : -INFINITY;
    largest = fmaxf(largest, p[j]);
  }
  largest = warp_max(largest);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    if (j * 32 + lane < E) {
      p[j] = ex2((p[j] - largest) * 1.4426950408889634f);
      sum += p[j];
    }
  }
  sum = warp_sum(sum);
  const float inverse = 1.f / sum;
  unsigned keys[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int e = j * 32 + lane;
    keys[j] = 0;
    if (e < E) {
      p[j] *= inverse;
      r.probabilities[token * E + e] = p[j];
      keys[j] = (__float_as_uint(p[j]) & 0x7fffffffu) + 1;
    }
  }

  float weight = 0, chosen_sum = 0;  // lane k: of the token's k-th expert; of all of them
  int expert = 0;
  for (int k = 0; k < r.chosen; ++k) {
    unsigned best = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) best = max(best, keys[j]);
    best = __reduce_max_sync(kFullWarp, best);
    unsigned id = ~0u;
#pragma unroll
    for (int j = kPerLane - 1; j >= 0; --j)
      if (keys[j] == best) id = static_cast<unsigned>(j * 32 + lane);
    id = __reduce_min_sync(kFullWarp, id);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j)
      if (id == static_cast<unsigned>(j * 32 + lane)) keys[j] = 0;
    const float value = __uint_as_float(best - 1);
    chosen_sum += value;
    if (lane == k) weight = value, expert = static_cast<int>(id);
  }
  if (lane < r.chosen) {
    r.weights[token * r.chosen + lane] = r.norm_topk_prob ? weight / chosen_sum : weight;
    r.experts[token * r.chosen + lane] = expert;
  }
  if (lane == 0) r.lse[token] = largest + logf(sum);
}

/// share_e = balance E f_e, one block.
__global__ void __launch_bounds__(kFinalThreads)
    balance_share_kernel(float* share, const double* counts, int num_experts, double balance) {
  const int e = static_cast<int>(threadIdx.x);
  const double count = e < num_experts ? counts[e] : 0;
  const double total = block_sum<kFinalThreads>(count);
  if (e < num_experts) share[e] = static_cast<float>(total > 0 ? balance * num_experts * count / total : 0);
}

struct RouteBackward {
  float* dlogits;
  const float *dweights, *probabilities, *lse, *weights, *share;
  const int* experts;
  int64_t tokens;
  int num_experts, chosen;
  float z;  // 2 scale.z
  bool norm_topk_prob;
};

template <int kPerLane>
__global__ void __launch_bounds__(kThreads) route_backward_kernel(RouteBackward r) {
  const int lane = static_cast<int>(threadIdx.x) % 32, E = r.num_experts;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (token >= r.tokens) return;  // the whole warp
  const float* const row = r.probabilities + token * E;
  float p[kPerLane], f[kPerLane], balanced = 0;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int e = j * 32 + lane;
    p[j] = e < E ? row[e] : 0;
    f[j] = e < E ? r.share[e] : 0;
    balanced += f[j] * p[j];
  }
  const bool is_chosen = lane < r.chosen;  // lane k: the k-th expert
  const int64_t at = token * r.chosen + lane;
  const int expert = is_chosen ? r.experts[at] : 0;
  const float dweight = is_chosen ? r.dweights[at] : 0, chosen_p = is_chosen ? row[expert] : 0;
  float common = 0, inverse = 1;  // through the division by the sum of the chosen
  if (r.norm_topk_prob) {
    common = warp_sum(is_chosen ? dweight * r.weights[at] : 0.f);
    inverse = 1.f / warp_sum(chosen_p);
  }
  const float part = chosen_p * ((dweight - common) * inverse);
  const float shift = r.z * r.lse[token] - warp_sum(balanced + part);
  __syncwarp();  // dlogits may be probabilities: every lane has read its own
  float* const out = r.dlogits + token * E;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int e = j * 32 + lane;
    if (e < E) out[e] = p[j] * (f[j] + shift);
  }
  __syncwarp();
  if (is_chosen) out[expert] = chosen_p * (r.share[expert] + shift) + part;
}

// ---- what routers add up

constexpr int kColumns = 32, kRows = kThreads / kColumns;

struct Load {
  double *counts, *totals;             // totals null: nothing is added up
  double *probability_sums, *squares;  // partial results: (chunks, E), (chunks)
  const int* offsets;
  const float *probabilities, *lse;
  int64_t tokens, chunk;  // tokens of a chunk
  int chunks, num_experts;
};

/// Block (columns, chunk): thread (x, y) adds up rows y, y + 8, ... of column x.
__global__ void __launch_bounds__(kThreads) load_chunks_kernel(Load l) {
  STATIC_SMEM(double, partial, [kRows][kColumns]);
  const int x = static_cast<int>(threadIdx.x) % kColumns, y = static_cast<int>(threadIdx.x) / kColumns,
            E = l.num_experts;
  const int64_t begin = blockIdx.y * l.chunk, end = begin + l.chunk < l.tokens ? begin + l.chunk : l.tokens;
  const int column = static_cast<int>(blockIdx.x) * kColumns + x;
  double sum = 0;
  if (column < E) {
#pragma unroll 8
    for (int64_t t = begin + y; t < end; t += kRows) sum += l.probabilities[t * E + column];
  }
  partial[y][x] = sum;
  __syncthreads();
  if (y == 0 && column < E) {
#pragma unroll
    for (int i = 1; i < kRows; ++i) sum += partial[i][x];
    l.probability_sums[blockIdx.y * static_cast<int64_t>(E) + column] = sum;
  }
  if (blockIdx.x > 0) return;  // the whole block
  double squares = 0;
  for (int64_t t = begin + static_cast<int>(threadIdx.x); t < end; t += kThreads)
    squares += static_cast<double>(l.lse[t]) * l.lse[t];
  squares = block_sum<kThreads>(squares);
  if (threadIdx.x == 0) l.squares[blockIdx.y] = squares;
}

/// One block: 32 columns at a time, lane x of warp y adding up chunks y, y + 32, ... of column x; then warp
/// x, which gets the 32 sums of that column.
__global__ void __launch_bounds__(kFinalThreads) load_kernel(Load l) {
  STATIC_SMEM(double, partial, [32][33]);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32, E = l.num_experts;
  if (thread < E) l.counts[thread] = l.offsets[thread + 1] - l.offsets[thread];
  if (!l.totals) return;  // the whole block
  const double pairs = l.offsets[E] - l.offsets[0];
  double balance = 0;
  for (int first = 0; first < E; first += 32) {
    double sum = 0;
    if (first + lane < E) {
#pragma unroll 4
      for (int c = warp; c < l.chunks; c += 32)
        sum += l.probability_sums[static_cast<int64_t>(c) * E + first + lane];
    }
    partial[warp][lane] = sum;
    __syncthreads();
    sum = warp_sum(partial[lane][warp]);
    __syncthreads();
    const int e = first + warp;
    if (lane == 0 && e < E) {
      const double count = l.offsets[e + 1] - l.offsets[e];
      l.totals[e] += count;
      l.totals[E + e] += sum;
      if (pairs > 0) balance += count / pairs * sum;
    }
  }
  double squares = 0;
  for (int c = thread; c < l.chunks; c += kFinalThreads) squares += l.squares[c];
  balance = block_sum<kFinalThreads>(balance);
  squares = block_sum<kFinalThreads>(squares);
  if (thread == 0) {
    l.totals[2 * E] += E * balance;
    l.totals[2 * E + 1] += squares;
    l.totals[2 * E + 2] += static_cast<double>(l.tokens);
  }
}

struct Identity {
  DEVICE_INLINE float operator()(float x) const { return x; }
};

}  // namespace

void router_logits_forward(Context& ctx, Tensor logits, const Tensor& x, const LinearWeight& weight) {
  check_storage("router_logits_forward", x);
  Product p;
  p.in = x.dtype, p.out = DType::f32;
  p.m = x.dim(0), p.n = weight.value.dim(0), p.k = x.dim(1);
  p.b_transposed = true;
  multiply(ctx, p, x.data, weight.value.data, logits.data);
}

void router_logits_backward(Context& ctx, Tensor dx, Tensor dweight, const Tensor& dlogits, const Tensor& x,
                            const LinearWeight& weight, Into into) {
  check_storage("router_logits_backward", x);
  const int64_t rows = x.dim(0), width = x.dim(1), experts = dlogits.dim(1);
  ScratchScope scratch(ctx.scratch);
  Tensor d = dlogits;
  if (x.dtype == DType::bf16) {
    d = scratch.alloc("router_dlogits", DType::bf16, {rows, experts});
    if (!ctx.dry_run) {
      const UnaryMap<Identity, nv_bf16, float> op = {
          device_data<nv_bf16>(d), device_data<float>(dlogits), {}};
      map(ctx, "router_logits_backward", op, d.numel(), aligned(op.y, op.x));
    }
  }
  Product input;
  input.in = input.out = x.dtype;
  input.m = rows, input.n = width, input.k = experts;
  input.accumulate = into == Into::add;
  multiply(ctx, input, d.data, weight.value.data, dx.data);
  Product gradient;
  gradient.in = x.dtype, gradient.out = DType::f32;
  gradient.m = experts, gradient.n = width, gradient.k = rows;
  gradient.a_transposed = true, gradient.accumulate = true;
  multiply(ctx, gradient, d.data, x.data, dweight.data);
}

void route_forward(Context& ctx, Tensor probabilities, Tensor lse, Tensor weights, Tensor experts,
                   const Tensor& logits, bool norm_topk_prob) {
  check_storage("route_forward", logits);
  if (ctx.dry_run || logits.dim(0) == 0) return;
  const Route r = {
      device_data<float>(probabilities), device_data<float>(lse),          device_data<float>(weights),
      device_data<int>(experts),         device_data<float>(logits),       logits.dim(0),
      static_cast<int>(logits.dim(1)),   static_cast<int>(experts.dim(1)), norm_topk_prob};
  with_per_lane(r.num_experts, [&](auto per_lane) {
    launch(ctx, "route_forward", {.grid = dim3(blocks_for(r.tokens, kWarps)), .block = dim3(kThreads)},
           route_kernel<per_lane()>, r);
  });
}

void route_backward(Context& ctx, Tensor dlogits, const Tensor& dweights, const Tensor& probabilities,
                    const Tensor& lse, const Tensor& weights, const Tensor& experts, const Tensor& counts,
                    bool norm_topk_prob, RouterLossScale scale) {
  check_storage("route_backward", probabilities);
  const int64_t tokens = probabilities.dim(0), num_experts = probabilities.dim(1);
  ScratchScope scratch(ctx.scratch);
  const Tensor share = scratch.alloc("router_balance_share", DType::f32, {num_experts});
  if (ctx.dry_run || tokens == 0) return;
  launch(ctx, "route_backward share", {.grid = dim3(1), .block = dim3(kFinalThreads)}, balance_share_kernel,
         device_data<float>(share), device_data<double>(counts), static_cast<int>(num_experts),
         scale.balance);
  const RouteBackward r = {device_data<float>(dlogits),       device_data<float>(dweights),
                           device_data<float>(probabilities), device_data<float>(lse),
                           device_data<float>(weights),       device_data<float>(share),
                           device_data<int>(experts),         tokens,
                           static_cast<int>(num_experts),     static_cast<int>(experts.dim(1)),
                           static_cast<float>(2 * scale.z),   norm_topk_prob};
  with_per_lane(num_experts, [&](auto per_lane) {
    launch(ctx, "route_backward", {.grid = dim3(blocks_for(tokens, kWarps)), .block = dim3(kThreads)},
           route_backward_kernel<per_lane()>, r);
  });
}

void router_load(Context& ctx, Tensor counts, Tensor totals, const Tensor& offsets,
                 const Tensor& probabilities, const Tensor& lse) {
  check_storage("router_load", probabilities);
  const int64_t tokens = probabilities.dim(0), num_experts = probabilities.dim(1);
  // At most two blocks of 32 columns for every multiprocessor of a large GPU; by shapes alone, so that sums
  // repeat.
  constexpr int64_t kChunk = 128, kChunks = 264;
  const int64_t chunk = std::max((tokens + kChunks - 1) / kChunks, kChunk),
                chunks = (tokens + chunk - 1) / chunk;
  ScratchScope scratch(ctx.scratch);
  const Tensor sums =
      scratch.alloc("router_probability_sums", DType::f64, {std::max<int64_t>(chunks, 1), num_experts});
  const Tensor squares = scratch.alloc("router_squares", DType::f64, {std::max<int64_t>(chunks, 1)});
  if (ctx.dry_run) return;
  const Load l = {device_data<double>(counts),
                  device_data<double>(totals),
                  device_data<double>(sums),
                  device_data<double>(squares),
                  device_data<int>(offsets),
                  device_data<float>(probabilities),
                  device_data<float>(lse),
                  tokens,
                  chunk,
                  static_cast<int>(chunks),
                  static_cast<int>(num_experts)};
  if (l.totals && chunks > 0)
    launch(ctx, "router_load chunks",
           {.grid = dim3(blocks_for(num_experts, kColumns), static_cast<unsigned>(chunks)),
            .block = dim3(kThreads)},
           load_chunks_kernel, l);
  launch(ctx, "router_load", {.grid = dim3(1), .block = dim3(kFinalThreads)}, load_kernel, l);
}

}  // namespace sluice::cuda
