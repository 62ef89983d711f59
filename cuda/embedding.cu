// Forward is a gather, bound by memory (common/map.cuh). Backward sums the rows of dy that belong to one
// token id in the order of the tokens, without float atomics:
//   1. positions are sorted by id, stably: a radix sort of 9 bits a pass, two for 151,936 words;
//   2. the sorted list is cut into units of 16 entries; a block sums the runs of equal ids in its unit. The
//      unit in which a run begins adds to dweight, one that continues a run stores its part;
//   3. parts of a run are added in order: a frequent id, with thousands of rows, is shared by many blocks.
// Bound by memory: dy is read once, a row of dweight read and written once per distinct id and once more for
// a long run. Where sums need not repeat (Context::deterministic off), one kernel adds atomically. Not yet
// run on a GPU.
#include "common/map.cuh"
#include "ops/embedding.h"

namespace sluice::cuda {
namespace {

template <class T>
struct Gather {
  static constexpr int kWidth = kVecWidth<T>, kUnroll = 4;
  T* y;
  const int* tokens;
  const T* weight;
  int64_t vocab_size, width;
  KernelStatus* status;
  Divider row = Divider(width);
  template <int N>
  using In = Vec<T, N>;
  template <int N>
  DEVICE_INLINE In<N> load(int64_t i) const {
    const int64_t t = row.quotient(i);
    const int token = tokens[t];
    if (token >= 0 && token < vocab_size) return load_vec<N>(weight + token * width + (i - t * width));
    report(status, KernelStatus::token_outside_vocabulary, token);
    In<N> zero;
#pragma unroll
    for (int e = 0; e < N; ++e) zero.v[e] = from_float<T>(0.f);
    return zero;
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const In<N>& in) const {
    store_vec<N>(y + i, in);
  }
};

/// dweight += rows, in any order.
template <class T>
struct Scatter {
  static constexpr int kWidth = kVecWidth<T>, kUnroll = 1;
  float* dweight;
  const T* dy;
  const int* tokens;
  int64_t vocab_size, width;
  KernelStatus* status;
  Divider row = Divider(width);
  template <int N>
  using In = Vec<T, N>;
  template <int N>
  DEVICE_INLINE In<N> load(int64_t i) const {
    return load_vec<N>(dy + i);
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const In<N>& in) const {
    const int64_t t = row.quotient(i);
    const int token = tokens[t];
    if (token < 0 || token >= vocab_size)
      return report(status, KernelStatus::token_outside_vocabulary, token);
    float* const out = dweight + token * width + (i - t * width);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    constexpr int kQuads = N / 4 * 4;  // Hopper adds 16 bytes at once
#else
    constexpr int kQuads = 0;
#endif
    if constexpr (kQuads > 0) {
#pragma unroll
      for (int e = 0; e < kQuads; e += 4)
        atomicAdd(reinterpret_cast<float4*>(out + e),
                  make_float4(to_float(in.v[e]), to_float(in.v[e + 1]), to_float(in.v[e + 2]),
                              to_float(in.v[e + 3])));
    } else {
#pragma unroll
      for (int e = 0; e < N; ++e) atomicAdd(out + e, to_float(in.v[e]));
    }
  }
};

// ---- the stable sort of positions by token id

constexpr int kDigitBits = 9, kDigits = 1 << kDigitBits;
constexpr int kSortThreads = kDigits, kSortWarps = kSortThreads / 32, kRounds = 4;
constexpr int kSortChunk = kSortThreads * kRounds;  // entries of a block, a warp's 128 contiguous

struct SortPass {
  const int *keys, *positions;  // positions null: the first pass, over the tokens themselves
  int *keys_out, *positions_out;
  int* histogram;  // (chunks, kDigits)
  int count, chunks, shift, vocab_size;
  KernelStatus* status;

  /// Ids outside the vocabulary sort behind all others, as vocab_size.
  DEVICE_INLINE int key(int i) const {
    const int k = keys[i];
    return k >= 0 && k < vocab_size ? k : vocab_size;
  }
  DEVICE_INLINE int digit(int k) const { return k >> shift & (kDigits - 1); }
};

/// A block counts the digits of its chunk.
__global__ void __launch_bounds__(kSortThreads) sort_histogram_kernel(SortPass p) {
  STATIC_SMEM(int, counts, [kDigits]);
  counts[threadIdx.x] = 0;
  __syncthreads();
  const int begin = static_cast<int>(blockIdx.x) * kSortChunk;
  for (int i = begin + static_cast<int>(threadIdx.x); i < begin + kSortChunk && i < p.count;
       i += kSortThreads) {
    const int k = p.key(i);
    if (!p.positions && k == p.vocab_size)
      report(p.status, KernelStatus::token_outside_vocabulary, p.keys[i]);
    atomicAdd(&counts[p.digit(k)], 1);
  }
  __syncthreads();
  p.histogram[static_cast<int>(blockIdx.x) * kDigits + static_cast<int>(threadIdx.x)] = counts[threadIdx.x];
}

/// A block places its chunk: behind smaller digits, behind equal digits of earlier chunks, of earlier warps,
/// of earlier rounds of its warp, of lower lanes.
__global__ void __launch_bounds__(kSortThreads) sort_scatter_kernel(SortPass p) {
  STATIC_SMEM(int,
              places, [kSortWarps][kDigits]);  // counts of a warp, then where its entries of a digit begin
  STATIC_SMEM(int, warp_totals, [kSortWarps]);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int chunk = static_cast<int>(blockIdx.x);
#pragma unroll
  for (int w = 0; w < kSortWarps; ++w) places[w][thread] = 0;
  // Thread d is digit d here.
  int before = 0, total = 0;
  for (int c = 0; c < p.chunks; ++c) {
    const int n = p.histogram[c * kDigits + thread];
    total += n;
    before += c < chunk ? n : 0;
  }
  int sum = total;  // inclusive over lanes
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const int lower = __shfl_up_sync(kFullWarp, sum, offset);
    if (lane >= offset) sum += lower;
  }
  if (lane == 31) warp_totals[warp] = sum;
  __syncthreads();
  int begin = sum - total + before;
  for (int w = 0; w < warp; ++w) begin += warp_totals[w];

  int keys[kRounds], ranks[kRounds];
  const int first = chunk * kSortChunk + warp * (32 * kRounds) + lane;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int i = first + round * 32;
    keys[round] = i < p.count ? p.key(i) : -1;
    const int digit = i < p.count ? p.digit(keys[round]) : kDigits;
    const unsigned peers = __match_any_sync(kFullWarp, digit);
    const int lower = __popc(peers & ((1u << lane) - 1));
    const int earlier = i < p.count ? places[warp][digit] : 0;
    __syncwarp();
    if (lower == 0 && i < p.count) places[warp][digit] = earlier + __popc(peers);
    __syncwarp();
    ranks[round] = earlier + lower;
  }
  __syncthreads();
  for (int w = 0; w < kSortWarps; ++w) {
    const int n = places[w][thread];
    places[w][thread] = begin;
    begin += n;
  }
  __syncthreads();
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int i = first + round * 32;
    if (i < p.count) {
      const int to = places[warp][p.digit(keys[round])] + ranks[round];
      p.keys_out[to] = keys[round];
      p.positions_out[to] = p.positions ? p.positions[i] : i;
    }
  }
}

// ---- sums over runs of equal ids

constexpr int kUnit = 16, kBatch = 4;  // entries of a unit, rows loaded at once
constexpr int kSumThreads = 256, kPartThreads = 64;

template <class T>
struct Runs {
  float *dweight, *parts;  // parts (units, C): of the run that a unit continues
  const T* dy;
  const int *keys, *positions;  // sorted
  int count, units, vocab_size;
  int64_t width;
};

/// Thread (x, y): kN columns of unit blockIdx.x blockDim.y + y.
template <int kN, class T>
__global__ void __launch_bounds__(kSumThreads) sum_runs_kernel(Runs<T> p) {
  const int unit = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y);
  const int64_t column = static_cast<int64_t>(blockIdx.y * blockDim.x + threadIdx.x) * kN;
  if (unit >= p.units || column >= p.width) return;
  const int begin = unit * kUnit, end = begin + kUnit < p.count ? begin + kUnit : p.count;
  bool continues = begin > 0 && p.keys[begin - 1] == p.keys[begin];
  float sum[kN] = {};
  for (int first = begin; first < end; first += kBatch) {
    int keys[kBatch + 1];
    Vec<T, kN> rows[kBatch];
#pragma unroll
    for (int j = 0; j <= kBatch; ++j) keys[j] = first + j < end ? p.keys[first + j] : -1;
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (first + j < end) rows[j] = load_vec<kN>(p.dy + p.positions[first + j] * p.width + column);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (first + j >= end || keys[j] == p.vocab_size) break;
#pragma unroll
      for (int e = 0; e < kN; ++e) sum[e] += to_float(rows[j].v[e]);
      if (keys[j] == keys[j + 1]) continue;
      float* const out = (continues ? p.parts + unit * p.width : p.dweight + keys[j] * p.width) + column;
      Vec<float, kN> total;
      if (!continues) total = load_vec<kN>(out);
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        total.v[e] = continues ? sum[e] : total.v[e] + sum[e];
        sum[e] = 0;
      }
      store_vec<kN>(out, total);
      continues = false;
    }
  }
}

/// Block (unit, columns): where the unit is the first to continue a run, adds the parts of the run.
template <int kN, class T>
__global__ void __launch_bounds__(kPartThreads) sum_parts_kernel(Runs<T> p) {
  const int unit = static_cast<int>(blockIdx.x) + 1;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kPartThreads + threadIdx.x) * kN;
  const int key = p.keys[unit * kUnit];
  if (column >= p.width || key == p.vocab_size || p.keys[unit * kUnit - 1] != key ||
      (unit > 1 && p.keys[(unit - 1) * kUnit - 1] == key))
    return;
  int end = unit + 1;  // behind the last unit that begins with the key
  for (int last = p.units; end < last;) {
    const int middle = (end + last) / 2;
    if (p.keys[middle * kUnit] == key)
      end = middle + 1;
    else
      last = middle;
  }
  float* const out = p.dweight + key * p.width + column;
  Vec<float, kN> sum = load_vec<kN>(out);
#pragma unroll 4
  for (int u = unit; u < end; ++u) {
    const Vec<float, kN> part = load_vec<kN>(p.parts + u * p.width + column);
#pragma unroll
    for (int e = 0; e < kN; ++e) sum.v[e] += part.v[e];
  }
  store_vec<kN>(out, sum);
}

template <int kN, int kPartN, class T>
void sum_runs(Context& ctx, const Runs<T>& p) {
  // Columns fill the block, units the rest of it.
  const int64_t columns = (p.width + kN - 1) / kN;
  unsigned x = 1;
  while (x < columns && x < kSumThreads) x *= 2;
  const dim3 block(x, kSumThreads / x), grid(blocks_for(p.units, block.y), blocks_for(columns, x));
  launch(ctx, "embedding_backward", {.grid = grid, .block = block}, sum_runs_kernel<kN, T>, p);
  if (p.units > 1)
    launch(ctx, "embedding_backward parts",
           {.grid = dim3(static_cast<unsigned>(p.units - 1), blocks_for(p.width, kPartThreads * kPartN)),
            .block = dim3(kPartThreads)},
           sum_parts_kernel<kPartN, T>, p);
}

}  // namespace

void embedding_forward(Context& ctx, Tensor y, const Tensor& tokens, const Tensor& weight) {
  if (ctx.dry_run) return;
  dispatch_storage("embedding_forward", weight, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const Gather<T> op = {device_data<T>(y), device_data<int>(tokens), device_data<T>(weight), weight.dim(0),
                          weight.dim(1),     kernel_status(ctx)};
    map(ctx, "embedding_forward", op, y.numel(), aligned(op.y, op.weight) && op.width % op.kWidth == 0);
  });
}

void embedding_backward(Context& ctx, Tensor dweight, const Tensor& dy, const Tensor& tokens) {
  const int64_t count = tokens.dim(0), width = dy.dim(1), vocab_size = dweight.dim(0);
  if (!ctx.deterministic) {
    if (ctx.dry_run) return;
    dispatch_storage("embedding_backward", dy, [&](auto* tag) {
      using T = std::remove_pointer_t<decltype(tag)>;
      const Scatter<T> op = {
          device_data<float>(dweight), device_data<T>(dy), device_data<int>(tokens), vocab_size, width,
          kernel_status(ctx)};
      map(ctx, "embedding_backward", op, dy.numel(), aligned(op.dweight, op.dy) && width % op.kWidth == 0);
    });
    return;
  }
  const int64_t chunks = (count + kSortChunk - 1) / kSortChunk, units = (count + kUnit - 1) / kUnit;
  ScratchScope scratch(ctx.scratch);
  const auto ints = [&](const char* name, int64_t n) {
    return scratch.alloc(name, DType::i32, {std::max<int64_t>(n, 1)});
  };
  const Tensor keys[2] = {ints("embedding_keys", count), ints("embedding_keys", count)};
  const Tensor positions[2] = {ints("embedding_positions", count), ints("embedding_positions", count)};
  const Tensor histogram = ints("embedding_histogram", chunks * kDigits);
  const Tensor parts = scratch.alloc("embedding_parts", DType::f32, {std::max<int64_t>(units, 1), width});
  if (ctx.dry_run || count * width == 0) return;

  int sorted = 1;  // which of the two holds the latest pass
  for (int shift = 0; shift == 0 || vocab_size >> shift > 0; shift += kDigitBits) {
    const int next = 1 - sorted;
    const SortPass pass = {shift == 0 ? device_data<int>(tokens) : device_data<int>(keys[sorted]),
                           shift == 0 ? nullptr : device_data<int>(positions[sorted]),
                           device_data<int>(keys[next]),
                           device_data<int>(positions[next]),
                           device_data<int>(histogram),
                           static_cast<int>(count),
                           static_cast<int>(chunks),
                           shift,
                           static_cast<int>(vocab_size),
                           kernel_status(ctx)};
    const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(chunks)), .block = dim3(kSortThreads)};
    launch(ctx, "embedding_backward histogram", config, sort_histogram_kernel, pass);
    launch(ctx, "embedding_backward sort", config, sort_scatter_kernel, pass);
    sorted = next;
  }
  dispatch_storage("embedding_backward", dy, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const Runs<T> p = {
        device_data<float>(dweight),    device_data<float>(parts),           device_data<T>(dy),
        device_data<int>(keys[sorted]), device_data<int>(positions[sorted]), static_cast<int>(count),
        static_cast<int>(units),        static_cast<int>(vocab_size),        width};
    if (width % kVecWidth<T> == 0 && aligned(p.dweight, p.dy))
      sum_runs<kVecWidth<T>, 4>(ctx, p);
    else
      sum_runs<1, 1>(ctx, p);
  });
}

}  // namespace sluice::cuda
