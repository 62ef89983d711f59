// The choice of keys. Queries are taken in chunks, whose scores stay in the second cache: a kernel of scores
// (64 queries x 64 candidates per block and all index heads, whose weighted activations are added up in
// registers), then a block per query that finds the k-th largest score exactly, by digits of its order-
// preserving bits, and writes the chosen keys in ascending order. Scores: bound by the tensor cores in bf16
// with d of 32, 64 or 128, by shared memory otherwise; the choice: by the second cache (five readings of a
// row of scores) and, where many scores are nearly equal, by atomics in shared memory. Not yet run on a GPU.
#include "attention/mma.cuh"
#include "common/map.cuh"
#include "core/targets.h"
#include "sparse/index.cuh"

namespace sluice::cuda {
namespace {

constexpr int kTile = 64;  // queries, and candidates, of a block of the score kernels

/// The queries of a tile that see the same sequence, [begin, end), and the candidates of the last of them.
struct Segment {
  int64_t begin, end;
  int first_key, candidates;
};
template <class T>
DEVICE_INLINE Segment segment_at(const Index<T>& x, int64_t begin, int64_t tile_end) {
  Segment s = {begin, begin + 1, x.first_key[begin], 0};
  while (s.end < tile_end && x.first_key[s.end] == s.first_key) ++s.end;
  s.candidates = x.candidates(s.end - 1);
  return s;
}

// ---- scores by FMA: any type, any depth

constexpr int kScoreThreads = 256, kScoreDepth = 32, kScoreStride = kTile + 4;

/// Grid (tiles of candidates, tiles of queries, sets). scores (sets, chunk, row) of queries [t0, t0 + chunk).
/// A thread computes 4 x 4 scores.
template <class T>
__global__ void __launch_bounds__(kScoreThreads)
    index_scores_kernel(Index<T> x, float* scores, int64_t t0, int64_t chunk, int64_t row) {
  STATIC_SMEM_16(float, q, [kScoreDepth * kScoreStride]);
  STATIC_SMEM_16(float, k, [kScoreDepth * kScoreStride]);
  const int set = static_cast<int>(blockIdx.z), c0 = static_cast<int>(blockIdx.x) * kTile;
  const int64_t begin = t0 + static_cast<int64_t>(blockIdx.y) * kTile,
                end = min(begin + kTile, min(t0 + chunk, x.queries));
  const int thread = static_cast<int>(threadIdx.x), qi = thread / 16 * 4, ci = thread % 16 * 4;
  for (Segment s = {begin, begin, 0, 0}; s.end < end;) {
    s = segment_at(x, s.end, end);
    if (c0 >= s.candidates) continue;
    float total[4][4] = {};
    for (int j = 0; j < x.per_set(); ++j) {
      const int head = set * x.per_set() + j;
      float u[4][4] = {};
      for (int d0 = 0; d0 < x.depth; d0 += kScoreDepth) {
        __syncthreads();  // the last part has been read
        for (int i = thread; i < kTile * kScoreDepth; i += kScoreThreads) {
          const int r = i / kScoreDepth, d = i % kScoreDepth, at = d * kScoreStride + r;
          const bool deep = d0 + d < x.depth;
          q[at] = deep && s.begin + r < s.end
                      ? to_float(x.q[((s.begin + r) * x.heads + head) * x.depth + d0 + d]) * x.scale
                      : 0.0f;
          k[at] =
              deep && c0 + r < s.candidates
                  ? to_float(x.k[(s.first_key + static_cast<int64_t>(c0 + r) * x.block) * x.depth + d0 + d])
                  : 0.0f;
        }
        __syncthreads();
#pragma unroll 4
        for (int d = 0; d < kScoreDepth; ++d) {
          const float4 a = *reinterpret_cast<const float4*>(q + d * kScoreStride + qi),
                       b = *reinterpret_cast<const float4*>(k + d * kScoreStride + ci);
          const float av[4] = {a.x, a.y, a.z, a.w}, bv[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
          for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) u[i][c] += av[i] * bv[c];
        }
      }
      const float bias = x.bias_of(head);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (s.begin + qi + i >= s.end) break;
        const float weight = x.head_weight(s.begin + qi + i, head);
#pragma unroll
        for (int c = 0; c < 4; ++c) total[i][c] += weight * x.activate(u[i][c] + bias);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t t = s.begin + qi + i;
      if (t >= s.end) break;
      float* const out = scores + (set * chunk + t - t0) * row;
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (c0 + ci + c < s.candidates) out[c0 + ci + c] = total[i][c];
    }
  }
}

// ---- scores by tensor cores: bf16

constexpr int kMmaThreads = 128;

/// As index_scores_kernel. A warp owns 16 queries; the tile of keys serves all heads.
template <int kDepth>
__global__ void __launch_bounds__(kMmaThreads)
    index_scores_mma_kernel(Index<nv_bf16> x, float* scores, int64_t t0, int64_t chunk, int64_t row) {
  constexpr int kChunks = kDepth / 8, kStep = kMmaThreads / kChunks, kRowBytes = 2 * kDepth;
  DYN_SMEM(unsigned char, smem, 1024);
  const uint32_t q_tile = smem_addr(smem), k_tile = q_tile + kTile * kRowBytes;
  const int set = static_cast<int>(blockIdx.z), c0 = static_cast<int>(blockIdx.x) * kTile;
  const int64_t begin = t0 + static_cast<int64_t>(blockIdx.y) * kTile,
                end = min(begin + kTile, min(t0 + chunk, x.queries));
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32,
            chunk_of = thread % kChunks, first = thread / kChunks;
  const uint32_t q_lane = q_tile + swizzled<kDepth>(warp * 16 + fragment_row(lane), fragment_chunk(lane)),
                 k_lane = k_tile + swizzled<kDepth>(fragment_row_t(lane), fragment_chunk_t(lane));
  for (Segment s = {begin, begin, 0, 0}; s.end < end;) {
    s = segment_at(x, s.end, end);
    if (c0 >= s.candidates) continue;
    const int rows = static_cast<int>(s.end - s.begin);
    float total[kTile / 8][4] = {};
    __syncthreads();  // the tiles of the last segment have been read
#pragma unroll
    for (int i = 0; i < kTile / kStep; ++i) {
      const int r = first + i * kStep, c = min(c0 + r, s.candidates - 1);
      cp_async_16(k_tile + swizzled<kDepth>(r, chunk_of),
                  x.k + (s.first_key + static_cast<int64_t>(c) * x.block) * kDepth + chunk_of * 8,
                  c0 + r < s.candidates);
    }
    for (int j = 0; j < x.per_set(); ++j) {
      const int head = set * x.per_set() + j;
      if (j > 0) __syncthreads();  // the queries of the last head have been read
      load_rows_async<kTile, kDepth, kMmaThreads>(q_tile, x.q + (s.begin * x.heads + head) * kDepth,
                                                  x.heads * kDepth, rows);
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
      float u[kTile / 8][4] = {};
      multiply_rows<kDepth>(u, q_lane, k_lane);
      const float bias = x.bias_of(head);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = min(warp * 16 + (lane >> 2) + 8 * i, rows - 1);
        const float weight = x.head_weight(s.begin + r, head);
#pragma unroll
        for (int n = 0; n < kTile / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            total[n][2 * i + e] += weight * x.activate(u[n][2 * i + e] * x.scale + bias);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = warp * 16 + (lane >> 2) + 8 * i;
      if (r >= rows) continue;
      float* const out = scores + (set * chunk + s.begin + r - t0) * row;
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (const int c = c0 + n * 8 + 2 * (lane & 3) + e; c < s.candidates) out[c] = total[n][2 * i + e];
    }
  }
}

template <class T>
void launch_scores(Context& ctx, const Index<T>& x, float* scores, int64_t t0, int64_t chunk, int64_t row) {
  const auto candidates = static_cast<unsigned>((x.keys + x.block - 1) / x.block);
  const dim3 grid(blocks_for(candidates, kTile), blocks_for(chunk, kTile), static_cast<unsigned>(x.sets));
  if constexpr (std::is_same_v<T, nv_bf16>) {
    const auto by_tensor_cores = [&](auto depth) {
      constexpr int kDepth = depth;
      launch(ctx, "index_scores_mma",
             {.grid = grid, .block = dim3(kMmaThreads), .smem = size_t{2} * kTile * kDepth * 2},
             index_scores_mma_kernel<kDepth>, x, scores, t0, chunk, row);
    };
    if (aligned(x.q, x.k)) {
      if (x.depth == 32) return by_tensor_cores(std::integral_constant<int, 32>());
      if (x.depth == 64) return by_tensor_cores(std::integral_constant<int, 64>());
      if (x.depth == 128) return by_tensor_cores(std::integral_constant<int, 128>());
    }
  }
  launch(ctx, "index_scores", {.grid = grid, .block = dim3(kScoreThreads)}, index_scores_kernel<T>, x, scores,
         t0, chunk, row);
}

// ---- the choice

constexpr int kThreads = 256, kWarps = kThreads / 32, kDigitBits = 11, kDigits = 1 << kDigitBits;

struct Choice {
  const float* scores;  // (sets, chunk, row)
  const int* first_key;
  OwnKeys own;
  int *first, *count;  // (sets, Tq, room), (sets, Tq)
  double* variances;   // (sets, Tq)
  KernelStatus* status;
  Scalar mean_variance;
  Budget budget;
  int64_t t0, chunk, row, queries, room;
  int block, where;
};

/// Larger for a larger number; 0 and -0 are equal.
DEVICE_INLINE unsigned order_of(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/// k by the budget (ops/indexer.h), of n > 0 candidates.
DEVICE_INLINE int budget_of(const Budget& b, double mean, double variance, double entropy, int n) {
  if (b.policy == BudgetPolicy::fixed) return static_cast<int>(b.base < n ? b.base : n);
  const auto base = static_cast<double>(b.base);
  const bool known = mean > 0;
  double k = base;
  if (b.policy == BudgetPolicy::eq8 && known) k = base * variance / mean;
  if (b.policy == BudgetPolicy::inverse && known) k = base * mean / fmax(variance, 1e-30);
  if (b.policy == BudgetPolicy::code && known) k = base * (0.5 + 1 / (1 + b.temperature * variance / mean));
  if (b.policy == BudgetPolicy::entropy)
    k = base * (0.5 + b.temperature * entropy / log(static_cast<double>(n) + 1));
  k = fmin(fmax(floor(k), static_cast<double>(b.min)), static_cast<double>(b.max));
  return k < n ? static_cast<int>(k) : n;
}

/// Of softmax(x), in nats.
DEVICE_INLINE double entropy_of(const float* x, int n, float top) {
  if (!(fabsf(top) < INFINITY)) return 0;  // the whole block
  double sum = 0, weighted = 0;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    const double z = static_cast<double>(x[i]) - top, e = exp(z);
    sum += e, weighted += e > 0 ? e * z : 0;
  }
  sum = block_sum<kThreads>(sum);
  weighted = block_sum<kThreads>(weighted);
  return log(sum) - weighted / sum;
}

/// The smallest and the largest order_of a row.
struct Range {
  unsigned low, high;
};
DEVICE_INLINE Range range_of(const float* x, int n) {
  STATIC_SMEM(unsigned, lows, [kWarps]);
  STATIC_SMEM(unsigned, highs, [kWarps]);
  Range r = {kFullWarp, 0};
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    const unsigned key = order_of(x[i]);
    r.low = min(r.low, key), r.high = max(r.high, key);
  }
  r.low = __reduce_min_sync(kFullWarp, r.low), r.high = __reduce_max_sync(kFullWarp, r.high);
  __syncthreads();
  if (threadIdx.x % 32 == 0) lows[threadIdx.x / 32] = r.low, highs[threadIdx.x / 32] = r.high;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) r.low = min(r.low, lows[w]), r.high = max(r.high, highs[w]);
  return r;
}

/// The k-th largest order of x[0, n), 0 < k <= n, and in `equal` how many of its kind are among the k
/// largest. Digit by digit from the highest in which scores differ: a histogram of those that agree so far.
DEVICE_INLINE unsigned kth_largest(const float* x, int n, int k, Range range, int& equal) {
  STATIC_SMEM(int, histogram, [kDigits]);
  STATIC_SMEM(int, sums, [kThreads]);
  STATIC_SMEM(int, found, [2]);
  constexpr int kPerThread = kDigits / kThreads;
  const int thread = static_cast<int>(threadIdx.x);
  unsigned prefix = 0;  // digits of key - range.low that are known, above `shift`
  int shift = 32 - __clz(static_cast<int>(range.high - range.low));
  while (shift > 0) {
    const int width = shift < kDigitBits ? shift : kDigitBits, above = shift;
    shift -= width;
    __syncthreads();
    for (int i = thread; i < kDigits; i += kThreads) histogram[i] = 0;
    __syncthreads();
    for (int i = thread; i < n; i += kThreads) {
      const unsigned key = order_of(x[i]) - range.low;
      if (above == 32 || key >> above == prefix) atomicAdd(&histogram[key >> shift & ((1u << width) - 1)], 1);
    }
    __syncthreads();
    // Digits in descending order, kPerThread of them per thread.
    int sum = 0;
    for (int i = 0; i < kPerThread; ++i) sum += histogram[kDigits - 1 - (thread * kPerThread + i)];
    sums[thread] = sum;
    __syncthreads();
    int before = 0;
    for (int i = 0; i < thread; ++i) before += sums[i];
    if (before < k && k <= before + sum) {
      int digit = kDigits - 1 - thread * kPerThread;
      while (before + histogram[digit] < k) before += histogram[digit--];
      found[0] = digit, found[1] = k - before;
    }
    __syncthreads();
    prefix = (above == 32 ? 0u : prefix << width) | static_cast<unsigned>(found[0]);
    k = found[1];
  }
  equal = k;
  return range.low + prefix;
}

/// Positions of the scores above `threshold` and of the last `equal` of those that equal it, in ascending
/// order, as first tokens of blocks.
DEVICE_INLINE void write_chosen(int* out, const float* x, int n, unsigned threshold, int equal, int first,
                                int block) {
  STATIC_SMEM(int, warp_counts, [2 * kWarps]);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const unsigned before_lane = (1u << lane) - 1;
  const auto counts = [&](bool flag, int place, int& mine, int& all) {
    const unsigned votes = __ballot_sync(kFullWarp, flag);
    if (lane == 0) warp_counts[place * kWarps + warp] = __popc(votes);
    mine = __popc(votes & before_lane), all = 0;
  };
  // How many equal ones there are: the first of them are left out.
  int total_equal = 0;
  for (int i = thread; i < n; i += kThreads) total_equal += order_of(x[i]) == threshold;
  int skip = static_cast<int>(block_sum<kThreads>(static_cast<double>(total_equal))) - equal, written = 0;
  for (int i0 = 0; i0 < n; i0 += kThreads) {
    const int i = i0 + thread;
    const unsigned key = i < n ? order_of(x[i]) : 0;
    const bool same = i < n && key == threshold, larger = i < n && key > threshold;
    int equal_before, unused;
    __syncthreads();  // the counts of the last turn have been read
    counts(same, 0, equal_before, unused);
    __syncthreads();
    int all_equal = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) equal_before += warp_counts[w];
      all_equal += warp_counts[w];
    }
    const bool chosen = larger || (same && equal_before >= skip);
    int place, all_chosen = 0;
    counts(chosen, 1, place, unused);
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) place += warp_counts[kWarps + w];
      all_chosen += warp_counts[kWarps + w];
    }
    if (chosen) out[written + place] = first + i * block;
    written += all_chosen, skip = max(skip - all_equal, 0);
  }
}

/// Grid (queries of the chunk, sets).
__global__ void __launch_bounds__(kThreads) choose_kernel(Choice c) {
  STATIC_SMEM(int, decided, [1]);
  const int thread = static_cast<int>(threadIdx.x), set = static_cast<int>(blockIdx.y);
  const int64_t t = c.t0 + blockIdx.x, at = set * c.queries + t;
  const int first = c.first_key[t], last = c.own.of(t), before = last - first,
            n = c.block == 1 ? before + 1 : before / c.block;
  const float* const x = c.scores + (set * c.chunk + blockIdx.x) * c.row;
  int* const out = c.first + at * c.room;
  double variance = 0, entropy = 0;
  int k = 0;
  Range range = {0, 0};
  if (n > 0) {  // the whole block
    int bad = 0;
    for (int i = thread; i < n; i += kThreads) bad |= !(x[i] == x[i]);
    if (__syncthreads_or(bad) && thread == 0)
      report(c.status, KernelStatus::index_score_not_a_number, c.where);
    range = range_of(x, n);
    if (c.budget.needs_variance()) {
      double sum = 0, squares = 0;
      for (int i = thread; i < n; i += kThreads) sum += static_cast<double>(x[i]);
      const double mean = block_sum<kThreads>(sum) / n;
      for (int i = thread; i < n; i += kThreads) squares += (x[i] - mean) * (x[i] - mean);
      variance = block_sum<kThreads>(squares) / n;
      if (!(variance < INFINITY)) variance = INFINITY;
    }
    if (c.budget.policy == BudgetPolicy::entropy) {
      const unsigned bits = range.high & 0x80000000u ? range.high & 0x7fffffffu : ~range.high;
      entropy = entropy_of(x, n, __uint_as_float(bits));
    }
    if (thread == 0) decided[0] = budget_of(c.budget, c.mean_variance.value(0), variance, entropy, n);
    __syncthreads();
    k = decided[0];
  }
  if (thread == 0) c.variances[at] = variance;
  if (k < n) {  // the whole block
    const int self = c.budget.force_self && c.block == 1;
    if (k > self) {
      int equal;
      if (self) range = range_of(x, n - 1);
      const unsigned threshold = kth_largest(x, n - self, k - self, range, equal);
      write_chosen(out, x, n - self, threshold, equal, first, c.block);
    }
    if (self && thread == 0) out[k - 1] = last;
  } else {
    for (int i = thread; i < n; i += kThreads) out[i] = first + i * c.block;
  }
  if (thread > 0) return;
  if (c.block > 1) out[k++] = first + n * c.block;
  c.count[at] = k;
}

// ---- sums over queries

constexpr int kSumThreads = 512;  // 1,024 threads leave 64 registers to each, and this kernel spills

/// One block, which says so: ptxas leaves room for others otherwise, and spills for sm_80.
__global__ void __launch_bounds__(kSumThreads, 1)
    selection_sums_kernel(double* sums, const double* variances, const int* count, const int* first_key,
                          const int* targets, OwnKeys own, int sets, int64_t queries, int block) {
  double variance = 0, pairs = 0, selected = 0, squares = 0;
  for (int64_t t = threadIdx.x; t < queries; t += kSumThreads) {
    if (own.of(t) - first_key[t] + (block == 1) < block) continue;  // no candidate
    if (targets && targets[t] == kPadding) continue;
    for (int set = 0; set < sets; ++set) {
      const int64_t row = set * queries + t;
      const double k = count[row] - (block > 1);
      if (variances[row] < INFINITY) variance += variances[row];
      pairs += 1, selected += k, squares += k * k;
    }
  }
  variance = block_sum<kSumThreads>(variance);
  pairs = block_sum<kSumThreads>(pairs);
  selected = block_sum<kSumThreads>(selected);
  squares = block_sum<kSumThreads>(squares);
  if (threadIdx.x > 0) return;
  sums[kIndexVariance] += variance, sums[kIndexQueries] += pairs;
  sums[kIndexSelected] += selected, sums[kIndexSquares] += squares;
}

}  // namespace

void select_keys(Context& ctx, const Selection& out, const IndexInputs& in, const Budget& budget,
                 const Tensor& mean_variance, Tensor sums, const char* where, const Tensor& targets) {
  dispatch_storage("select_keys", in.q, [&](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    const int64_t queries = in.q.dim(0), sets = in.sets, row = (most_candidates(in) + 3) / 4 * 4,
                  chunk = queries_at_once(queries, sets * row * 4);
    ScratchScope scratch(ctx.scratch);
    const Tensor scores = scratch.alloc("index scores", DType::f32, {sets, chunk, row}),
                 variances = scratch.alloc("index variance", DType::f64, {sets, queries});
    const VisibleKeys visible = visible_keys(ctx, scratch, in.first_key, in.own_key, in.k.dim(0));
    if (ctx.dry_run || queries == 0) return;
    const Index<T> x = index_of<T>(in, visible);
    Choice c = {};
    c.scores = device_data<float>(scores), c.first_key = x.first_key, c.own = x.own;
    c.first = device_data<int>(out.first), c.count = device_data<int>(out.count);
    c.variances = device_data<double>(variances), c.status = kernel_status(ctx);
    c.mean_variance = Scalar(mean_variance), c.budget = budget;
    c.row = row, c.queries = queries, c.room = out.first.dim(2);
    c.block = x.block, c.where = place_number(ctx, where);
    for (c.t0 = 0; c.t0 < queries; c.t0 += chunk) {
      c.chunk = chunk < queries - c.t0 ? chunk : queries - c.t0;
      launch_scores(ctx, x, device_data<float>(scores), c.t0, c.chunk, row);
      launch(ctx, "choose_keys",
             {.grid = dim3(static_cast<unsigned>(c.chunk), static_cast<unsigned>(sets)),
              .block = dim3(kThreads)},
             choose_kernel, c);
    }
    if (sums)
      launch(ctx, "selection_sums", {.grid = dim3(1), .block = dim3(kSumThreads)}, selection_sums_kernel,
             device_data<double>(sums), static_cast<const double*>(c.variances),
             static_cast<const int*>(c.count), x.first_key,
             static_cast<const int*>(targets ? device_data<int>(targets) : nullptr), x.own, x.sets, queries,
             x.block);
  });
}

}  // namespace sluice::cuda
