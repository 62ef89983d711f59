// The logits and their gradients are cuBLASLt products. The rest is memory-bound as long as instruction
// throughput suffices: (T, E) numbers in f32 are read and written once. A warp processes a token, lane l its
// experts l, l + 32, ... in registers. With 8 of 128 experts a row is 1 KiB of traffic and about 230
// instructions, half of them for the selection. Not yet run on a GPU.
#include "common/map.cuh"
#include "common/ptx.cuh"
#include "core/targets.h"
#include "matmul.h"
#include "ops/router.h"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kFinalThreads = 1024;

/// f(experts of a lane), a std::integral_constant: one of a few numbers, none much above what is needed.
template <int kFirst = 0, class F>
void with_per_lane(int64_t experts, F&& f) {
  constexpr int kPerLane[] = {1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32};
  if constexpr (kPerLane[kFirst] == kMaxExperts / 32) {
    f(std::integral_constant<int, kPerLane[kFirst]>());
  } else {
    if (experts <= kPerLane[kFirst] * 32)
      f(std::integral_constant<int, kPerLane[kFirst]>());
    else
      with_per_lane<kFirst + 1>(experts, f);
  }
}

struct Route {
  float *probabilities, *lse, *weights;
  int* experts;
  const float* logits;
  int64_t tokens;
  int num_experts, chosen;
  bool norm_topk_prob;
};

/// A token's largest p one after the other, ties to the lower id. What is compared is the bits of p plus one:
/// their order is that of p, and 0 is left for no expert and for what was taken. NaN is put on top of all.
template <int kPerLane>
struct Candidates {
  unsigned keys[kPerLane];

  DEVICE_INLINE void set(int j, float p) { keys[j] = key_of(p); }
  DEVICE_INLINE void set_none(int j) { keys[j] = 0; }
  DEVICE_INLINE void complete() {}
  /// The whole warp gets the same.
  DEVICE_INLINE void take(int lane, unsigned& key, int& place) {
    key = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) key = max(key, keys[j]);
    key = __reduce_max_sync(kFullWarp, key);
    unsigned id = ~0u;
#pragma unroll
    for (int j = kPerLane - 1; j >= 0; --j)
      if (keys[j] == key) id = static_cast<unsigned>(j * 32 + lane);
    id = __reduce_min_sync(kFullWarp, id);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j)
      if (id == static_cast<unsigned>(j * 32 + lane)) keys[j] = 0;
    place = static_cast<int>(id);
  }
  static DEVICE_INLINE float value(unsigned key) { return __uint_as_float(key - 1); }
  static DEVICE_INLINE int expert(unsigned, int place) { return place; }

  static DEVICE_INLINE unsigned key_of(float p) { return min(__float_as_uint(p), 0x3ffffffeu) + 1; }
};

/// p is at most one, so that two bits of its key are free: for j, the lower the larger. A lane sorts its keys
/// once and then has its largest at hand.
template <int kPerLane>
requires(kPerLane <= 4) struct Candidates<kPerLane> {
  unsigned keys[kPerLane];

  DEVICE_INLINE void set(int j, float p) {
    keys[j] = ((min(__float_as_uint(p), 0x3ffffffeu) + 1) << 2) + static_cast<unsigned>(3 - j);
  }
  DEVICE_INLINE void set_none(int j) { keys[j] = 0; }
  DEVICE_INLINE void complete() {
#pragma unroll
    for (int last = kPerLane - 1; last > 0; --last)
#pragma unroll
      for (int j = 0; j < last; ++j) {
        const unsigned larger = max(keys[j], keys[j + 1]);
        keys[j + 1] = min(keys[j], keys[j + 1]);
        keys[j] = larger;
      }
  }
  DEVICE_INLINE void take(int lane, unsigned& key, int& place) {
    key = __reduce_max_sync(kFullWarp, keys[0]);
    place = __ffs(static_cast<int>(__ballot_sync(kFullWarp, keys[0] == key))) - 1;
    if (lane == place) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) keys[j] = j + 1 < kPerLane ? keys[j + 1 < kPerLane ? j + 1 : 0] : 0;
    }
  }
  static DEVICE_INLINE float value(unsigned key) { return __uint_as_float((key >> 2) - 1); }
  static DEVICE_INLINE int expert(unsigned key, int place) {
    return (3 - static_cast<int>(key & 3)) * 32 + place;
  }
};

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
  Candidates<kPerLane> candidates;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int e = j * 32 + lane;
    candidates.set_none(j);
    if (e < E) {
      p[j] *= inverse;
      r.probabilities[token * E + e] = p[j];
      candidates.set(j, p[j]);
    }
  }
  candidates.complete();

  unsigned key = 0;  // lane k: of the token's k-th expert
  int place = 0;
  for (int k = 0; k < r.chosen; ++k) {
    unsigned next;
    int next_place;
    candidates.take(lane, next, next_place);
    if (lane == k) key = next, place = next_place;
  }
  const bool is_chosen = lane < r.chosen;
  float weight = is_chosen ? candidates.value(key) : 0.f;
  if (r.norm_topk_prob) weight /= warp_sum(weight);
  if (is_chosen) {
    r.weights[token * r.chosen + lane] = isnan(sum) ? sum : weight;
    r.experts[token * r.chosen + lane] = candidates.expert(key, place);
  }
  if (lane == 0) r.lse[token] = largest + logf(sum);
}

/// share_e = balance E f_e, and behind these 2 z, both times *token_weight (null: 1); one block.
__global__ void __launch_bounds__(kFinalThreads)
    balance_share_kernel(float* share, const double* counts, const double* token_weight, int num_experts,
                         double balance, double z) {
  const double weight = token_weight ? *token_weight : 1;
  const int e = static_cast<int>(threadIdx.x);
  const double count = e < num_experts ? counts[e] : 0;
  const double total = block_sum<kFinalThreads>(count);
  if (e < num_experts)
    share[e] = static_cast<float>(total > 0 ? weight * balance * num_experts * count / total : 0);
  if (e == 0) share[num_experts] = static_cast<float>(2 * z * weight);
}

struct RouteBackward {
  float* dlogits;
  const float *dweights, *probabilities, *lse, *weights, *share;  // share (E + 1)
  const int* experts;
  int64_t tokens;
  int num_experts, chosen;
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
  const float shift = r.share[E] * r.lse[token] - warp_sum(balanced + part);
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

// ---- routers' totals

constexpr int kColumns = 32, kRows = kThreads / kColumns;

struct Load {
  double *counts, *totals;             // totals may be null
  double *probability_sums, *squares;  // partial results: (chunks, E), (chunks)
  double *removed, *kept;              // likewise, with targets: pairs of padding, tokens that are not
  const int *offsets, *experts, *targets;  // targets null: no padding
  const float *probabilities, *lse;
  int64_t tokens, chunk;  // tokens of a chunk
  int chunks, num_experts, chosen;

  DEVICE_INLINE bool is_padding(int64_t t) const { return targets && targets[t] == kPadding; }
};

/// Block (columns, chunk): thread (x, y) sums rows y, y + 8, ... of column x.
__global__ void __launch_bounds__(kThreads) load_chunks_kernel(Load l) {
  STATIC_SMEM(double, partial, [kRows][kColumns]);
  const int x = static_cast<int>(threadIdx.x) % kColumns, y = static_cast<int>(threadIdx.x) / kColumns,
            E = l.num_experts;
  const int64_t begin = blockIdx.y * l.chunk, end = begin + l.chunk < l.tokens ? begin + l.chunk : l.tokens;
  const int column = static_cast<int>(blockIdx.x) * kColumns + x;
  double sum = 0;
  if (column < E) {
#pragma unroll 8
    for (int64_t t = begin + y; t < end; t += kRows)
      if (!l.is_padding(t)) sum += l.probabilities[t * E + column];
  }
  partial[y][x] = sum;
  __syncthreads();
  if (y == 0 && column < E) {
#pragma unroll
    for (int i = 1; i < kRows; ++i) sum += partial[i][x];
    l.probability_sums[blockIdx.y * static_cast<int64_t>(E) + column] = sum;
  }
  if (l.targets) {
    double removed = 0;
    __syncthreads();
    if (column < E)
      for (int64_t t = begin + y; t < end; t += kRows)
        for (int k = 0; l.is_padding(t) && k < l.chosen; ++k)
          removed += l.experts[t * l.chosen + k] == column ? 1 : 0;
    partial[y][x] = removed;
    __syncthreads();
    if (y == 0 && column < E) {
#pragma unroll
      for (int i = 1; i < kRows; ++i) removed += partial[i][x];
      l.removed[blockIdx.y * static_cast<int64_t>(E) + column] = removed;
    }
  }
  if (blockIdx.x > 0) return;  // the whole block
  double squares = 0, kept = 0;
  for (int64_t t = begin + static_cast<int>(threadIdx.x); t < end; t += kThreads) {
    if (l.is_padding(t)) continue;
    squares += static_cast<double>(l.lse[t]) * l.lse[t];
    kept += 1;
  }
  squares = block_sum<kThreads>(squares);
  kept = block_sum<kThreads>(kept);
  if (threadIdx.x == 0) l.squares[blockIdx.y] = squares, l.kept[blockIdx.y] = kept;
}

/// One block: 32 columns at a time, lane x of warp y adding up chunks y, y + 32, ... of column x; then warp
/// x, which gets the 32 sums of that column.
__global__ void __launch_bounds__(kFinalThreads) load_kernel(Load l) {
  STATIC_SMEM(double, partial, [32][33]);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32, E = l.num_experts;
  double own = 0;  // count of the thread's expert
  if (thread < E) {
    own = l.offsets[thread + 1] - l.offsets[thread];
    for (int c = 0; l.targets && c < l.chunks; ++c) own -= l.removed[static_cast<int64_t>(c) * E + thread];
    l.counts[thread] = own;
  }
  if (!l.totals) return;  // the whole block
  const double pairs = block_sum<kFinalThreads>(own);  // its barriers order counts as well
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
      const double count = l.counts[e];
      l.totals[e] += count;
      l.totals[E + e] += sum;
      if (pairs > 0) balance += count / pairs * sum;
    }
  }
  double squares = 0, kept = 0;
  for (int c = thread; c < l.chunks; c += kFinalThreads) squares += l.squares[c], kept += l.kept[c];
  balance = block_sum<kFinalThreads>(balance);
  squares = block_sum<kFinalThreads>(squares);
  kept = block_sum<kFinalThreads>(kept);
  if (thread == 0) {
    l.totals[2 * E] += E * balance;
    l.totals[2 * E + 1] += squares;
    l.totals[2 * E + 2] += kept;
  }
}

struct Identity {
  DEVICE_INLINE float operator()(float x) const { return x; }
};

}  // namespace

void router_logits_forward(Context& ctx, Tensor logits, const Tensor& x, const LinearWeight& weight) {
  check_storage("router_logits_forward", x);
  GpuProduct p;
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
  GpuProduct input;
  input.in = input.out = x.dtype;
  input.m = rows, input.n = width, input.k = experts;
  input.accumulate = into == Into::add;
  multiply(ctx, input, d.data, weight.value.data, dx.data);
  GpuProduct gradient;
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
                    bool norm_topk_prob, const RouterLossScale& scale) {
  check_storage("route_backward", probabilities);
  const int64_t tokens = probabilities.dim(0), num_experts = probabilities.dim(1);
  ScratchScope scratch(ctx.scratch);
  const Tensor share = scratch.alloc("router_balance_share", DType::f32, {num_experts + 1});
  if (ctx.dry_run || tokens == 0) return;
  launch(ctx, "route_backward share", {.grid = dim3(1), .block = dim3(kFinalThreads)}, balance_share_kernel,
         device_data<float>(share), static_cast<const double*>(device_data<double>(counts)),
         static_cast<const double*>(scale.token_weight ? device_data<double>(scale.token_weight) : nullptr),
         static_cast<int>(num_experts), scale.balance, scale.z);
  const RouteBackward r = {device_data<float>(dlogits),
                           device_data<float>(dweights),
                           device_data<float>(probabilities),
                           device_data<float>(lse),
                           device_data<float>(weights),
                           device_data<float>(share),
                           device_data<int>(experts),
                           tokens,
                           static_cast<int>(num_experts),
                           static_cast<int>(experts.dim(1)),
                           norm_topk_prob};
  with_per_lane(num_experts, [&](auto per_lane) {
    launch(ctx, "route_backward", {.grid = dim3(blocks_for(tokens, kWarps)), .block = dim3(kThreads)},
           route_backward_kernel<per_lane()>, r);
  });
}

void router_load(Context& ctx, Tensor counts, Tensor totals, const Tensor& offsets,
                 const Tensor& probabilities, const Tensor& lse, const Tensor& experts,
                 const Tensor& targets) {
  check_storage("router_load", probabilities);
  const int64_t tokens = probabilities.dim(0), num_experts = probabilities.dim(1);
  // At most two blocks of 32 columns per SM of a large GPU; depends only on shapes, so that sums are
  // reproducible.
  constexpr int64_t kChunk = 128, kChunks = 264;
  const int64_t chunk = std::max((tokens + kChunks - 1) / kChunks, kChunk),
                chunks = (tokens + chunk - 1) / chunk;
  ScratchScope scratch(ctx.scratch);
  const Tensor sums =
      scratch.alloc("router_probability_sums", DType::f64, {std::max<int64_t>(chunks, 1), num_experts});
  const auto of_chunks = [&](const char* name) {
    return scratch.alloc(name, DType::f64, {std::max<int64_t>(chunks, 1)});
  };
  const Tensor squares = of_chunks("router_squares"), kept = of_chunks("router_tokens");
  const Tensor removed = targets ? scratch.like("router_padding", sums) : Tensor();
  if (ctx.dry_run) return;
  const Load l = {device_data<double>(counts),
                  device_data<double>(totals),
                  device_data<double>(sums),
                  device_data<double>(squares),
                  targets ? device_data<double>(removed) : nullptr,
                  device_data<double>(kept),
                  device_data<int>(offsets),
                  targets ? device_data<int>(experts) : nullptr,
                  targets ? device_data<int>(targets) : nullptr,
                  device_data<float>(probabilities),
                  device_data<float>(lse),
                  tokens,
                  chunk,
                  static_cast<int>(chunks),
                  static_cast<int>(num_experts),
                  targets ? static_cast<int>(experts.dim(1)) : 0};
  if ((l.totals || l.targets) && chunks > 0)
    launch(ctx, "router_load chunks",
           {.grid = dim3(blocks_for(num_experts, kColumns), static_cast<unsigned>(chunks)),
            .block = dim3(kThreads)},
           load_chunks_kernel, l);
  launch(ctx, "router_load", {.grid = dim3(1), .block = dim3(kFinalThreads)}, load_kernel, l);
}

}  // namespace sluice::cuda
