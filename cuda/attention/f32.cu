// Attention with f32 FMA, forward and backward: verifies the tensor-core kernels and serves head_dims that
// they do not support. Written for correctness, not speed. Not yet run on a GPU. A block owns kRows rows
// (queries, or keys for dk and dv) of one head and iterates over tiles of kRows rows of the other side, all
// f32 in shared memory. Four threads process a row: scores by column modulo 4, channels by float4 modulo 4.
// Bound by shared memory (9 loads of 16 bytes per 32 FMA in the scores, 1 per 4 in the mixing). dq and (dk,
// dv) come from two kernels that compute the scores twice: no sum crosses a block, so bits never change.
#include "attention/f32.h"

namespace sluice::cuda {
namespace {

template <int kDepth>
struct Tile {
  static constexpr int kRows = kDepth == 256 ? 16 : 32;  // four tiles within 99 KB, which every GPU has
  static constexpr int kThreads = 4 * kRows;
  static constexpr int kStride = kDepth + 4;  // eight rows of float4 fall into different banks
  static constexpr int kFloats = kRows * kStride;
  static constexpr int kColumns = kRows / 4;  // scores of a thread
  static constexpr int kVectors = kDepth / 16;
};

/// Goes through the keys of one query in ascending order: blocks of `block` keys that begin at [at, end), up
/// to key `last`.
struct Members {
  const int *at, *end;
  int block, last;

  /// Bit i: whether key k0 + i is one of them, i < rows <= 32. k0 grows by `rows` from call to call.
  DEVICE_INLINE unsigned next(int k0, int rows) {
    unsigned bits = 0;
    for (; at < end && *at < k0 + rows; ++at) {
      const int from = max(*at, k0) - k0, to = min(min(*at + block, last + 1) - k0, rows);
      if (from < to) bits |= (to == 32 ? kFullWarp : (1u << to) - 1) & ~((1u << from) - 1);
      if (*at + block > k0 + rows) break;  // goes on in the next tile
    }
    return bits;
  }
  /// Leaves out what lies before k0.
  DEVICE_INLINE void skip_to(int k0) {
    int n = static_cast<int>(end - at);
    while (n > 0) {
      const int half = n / 2;
      if (at[half] + block <= k0)
        at += half + 1, n -= half + 1;
      else
        n = half;
    }
  }
};
constexpr int kAllKeys = 1 << 30;  // as a block: every key from the first one on

template <class T>
struct Problem {
  const T *q, *k, *v, *d_o;
  const int* first_key;  // counted among the keys
  OwnKeys own;
  const int *selected, *counts;  // Selection: (G, Tq, room), (G, Tq); or null: all visible keys
  T *o, *dq, *dk, *dv;
  int64_t dv_row;  // elements from one token's dv to the next's
  float *lse, *z0;
  const float *delta, *coef0;
  int64_t queries, keys;
  int heads, kv_heads, depth;
  int sets, room, block;
  float scale;
  bool softpick;

  DEVICE_INLINE Members members(int head, int64_t query) const {
    const int last = own.of(query);
    if (!selected) return {first_key + query, first_key + query + 1, kAllKeys, last};
    const int64_t row = head / (heads / sets) * queries + query;
    return {selected + row * room, selected + row * room + counts[row], block, last};
  }
};

/// log relu(e^x - 1)
DEVICE_INLINE float log_pick(float x) { return x > 0 ? x + logf(-expm1f(-x)) : -INFINITY; }

/// Rows [0, rows) of src into a tile, zero beyond and for channels >= depth.
template <int kDepth, class T>
DEVICE_INLINE void load_tile(float* dst, const T* src, int64_t row_stride, int64_t rows, int depth) {
  using S = Tile<kDepth>;
  for (int i = static_cast<int>(threadIdx.x); i < S::kRows * kDepth; i += S::kThreads) {
    const int r = i / kDepth, d = i % kDepth;
    dst[r * S::kStride + d] = r < rows && d < depth ? to_float(src[r * row_stride + d]) : 0.0f;
  }
}

/// s[c] = <a, row 4 c + part of tile>
template <int kDepth>
DEVICE_INLINE void row_products(float (&s)[Tile<kDepth>::kColumns], const float* a, const float* tile,
                                int part, int depth) {
  using S = Tile<kDepth>;
#pragma unroll
  for (int c = 0; c < S::kColumns; ++c) s[c] = 0;
  for (int d = 0; d < depth; d += 4) {
    const float4 x = *reinterpret_cast<const float4*>(a + d);
#pragma unroll
    for (int c = 0; c < S::kColumns; ++c) {
      const float4 y = *reinterpret_cast<const float4*>(tile + (4 * c + part) * S::kStride + d);
      s[c] += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
    }
  }
}

/// acc += sum_j weights[j] tile[j], for this thread's channels.
template <int kDepth>
DEVICE_INLINE void mix(float4 (&acc)[Tile<kDepth>::kVectors], const float* weights, const float* tile,
                       int part, int depth) {
  using S = Tile<kDepth>;
  for (int j = 0; j < S::kRows; ++j) {
    const float w = weights[j];
    const float* row = tile + j * S::kStride + 4 * part;
#pragma unroll
    for (int i = 0; i < S::kVectors; ++i) {
      if (16 * i >= depth) break;
      const float4 x = *reinterpret_cast<const float4*>(row + 16 * i);
      acc[i].x += w * x.x, acc[i].y += w * x.y, acc[i].z += w * x.z, acc[i].w += w * x.w;
    }
  }
}

template <int kDepth, class T>
DEVICE_INLINE void store_row(T* dst, const float4 (&acc)[Tile<kDepth>::kVectors], float factor, int part,
                             int depth) {
#pragma unroll
  for (int i = 0; i < Tile<kDepth>::kVectors; ++i) {
    const float x[4] = {acc[i].x, acc[i].y, acc[i].z, acc[i].w};
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (const int d = 16 * i + 4 * part + e; d < depth) dst[d] = from_float<T>(factor * x[e]);
  }
}

/// Grid (heads, tiles of queries); late queries, which attend to most keys, first.
template <int kDepth, class T>
__global__ void __launch_bounds__(Tile<kDepth>::kThreads, 1) attention_f32_forward_kernel(Problem<T> p) {
  using S = Tile<kDepth>;
  DYN_SMEM(float, smem, 16);
  float *const q = smem, *const k = q + S::kFloats, *const v = k + S::kFloats, *const w = v + S::kFloats;
  const int head = static_cast<int>(blockIdx.x), kv_head = head / (p.heads / p.kv_heads);
  const int64_t q0 = static_cast<int64_t>(gridDim.y - 1 - blockIdx.y) * S::kRows;
  const int64_t rows = min(static_cast<int64_t>(S::kRows), p.queries - q0);
  const int row = static_cast<int>(threadIdx.x) / 4, part = static_cast<int>(threadIdx.x) % 4;
  const int64_t query = min(q0 + row, p.queries - 1);
  const int64_t first = p.first_key[query];
  Members members = p.members(head, query);
  if (p.z0 && p.selected && part == 0 && row < rows && *members.at != first)
    p.z0[head * p.queries + query] = static_cast<float>(kNotSelected);
  load_tile<kDepth>(q, p.q + (q0 * p.heads + head) * p.depth, static_cast<int64_t>(p.heads) * p.depth, rows,
                    p.depth);

  float4 acc[S::kVectors] = {};
  // Softpick's maxima are at least 0, and a hidden score is 0, whose weight is 0.
  const float hidden = p.softpick ? 0.0f : -INFINITY;
  float m = hidden, l = 0;
  float* const weights = w + row * (S::kRows + 1);
  for (int64_t k0 = p.first_key[q0]; k0 <= p.own.of(q0 + rows - 1); k0 += S::kRows) {
    const int64_t stride = static_cast<int64_t>(p.kv_heads) * p.depth, at = k0 * stride + kv_head * p.depth;
    const unsigned bits = row < rows ? members.next(static_cast<int>(k0), S::kRows) : 0;
    if (!__syncthreads_or(bits != 0)) continue;  // the tiles of the previous step have been read
    load_tile<kDepth>(k, p.k + at, stride, p.keys - k0, p.depth);
    load_tile<kDepth>(v, p.v + at, stride, p.keys - k0, p.depth);
    __syncthreads();
    float s[S::kColumns];
    row_products<kDepth>(s, q + row * S::kStride, k, part, p.depth);
    float top = m;
#pragma unroll
    for (int c = 0; c < S::kColumns; ++c) {
      const int64_t key = k0 + 4 * c + part;
      s[c] *= p.scale;
      const bool member = bits >> (4 * c + part) & 1;
      if (p.z0 && key == first && member) p.z0[head * p.queries + query] = p.softpick ? log_pick(s[c]) : s[c];
      if (!member) s[c] = hidden;
      top = fmaxf(top, s[c]);
    }
    top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
    const float base = top == -INFINITY ? 0.0f : top, rescale = expf(m - base);
    m = top, l *= rescale;
#pragma unroll
    for (int i = 0; i < S::kVectors; ++i)
      acc[i].x *= rescale, acc[i].y *= rescale, acc[i].z *= rescale, acc[i].w *= rescale;
#pragma unroll
    for (int c = 0; c < S::kColumns; ++c) {
      const float e = expf(s[c] - base), above = e - expf(-base);
      l += p.softpick ? fabsf(above) : e;
      weights[4 * c + part] = p.softpick ? fmaxf(above, 0.0f) : e;
    }
    __syncwarp();  // a row's four threads are of one warp
    mix<kDepth>(acc, weights, v, part, p.depth);
    __syncwarp();
  }
  l += __shfl_xor_sync(kFullWarp, l, 1);
  l += __shfl_xor_sync(kFullWarp, l, 2);
  if (row >= rows) return;
  l = p.softpick ? l + static_cast<float>(kSoftpickEps) * expf(-m) : fmaxf(l, 1.0f);  // l >= 1: lse >= z0
  if (part == 0) p.lse[head * p.queries + query] = m + logf(l);
  store_row<kDepth>(p.o + (query * p.heads + head) * p.depth, acc, 1.0f / l, part, p.depth);
}

/// The weight of one pair, and dS without the scale, from its score z and dP.
struct PairGradient {
  float weight, ds;
};
template <class T>
DEVICE_INLINE PairGradient pair_gradient(const Problem<T>& p, float z, float dp, int64_t statistic,
                                         bool first) {
  const float lse = p.lse[statistic], delta = p.delta[statistic], e = expf(z - lse);
  const float direct = first && p.coef0 ? p.coef0[statistic] : 0.0f;
  if (!p.softpick) return {e, e * (dp - delta) + direct};
  if (!(z > 0)) return {0.0f, z < 0 ? e * delta : 0.0f};
  return {e - expf(-lse), e * (dp - delta) + direct / -expm1f(-z)};
}

/// Grid as in forward.
template <int kDepth, class T>
__global__ void __launch_bounds__(Tile<kDepth>::kThreads, 1) attention_f32_dq_kernel(Problem<T> p) {
  using S = Tile<kDepth>;
  DYN_SMEM(float, smem, 16);
  float *const q = smem, *const d_o = q + S::kFloats, *const k = d_o + S::kFloats, *const v = k + S::kFloats,
               *const w = v + S::kFloats;
  const int head = static_cast<int>(blockIdx.x), kv_head = head / (p.heads / p.kv_heads);
  const int64_t q0 = static_cast<int64_t>(gridDim.y - 1 - blockIdx.y) * S::kRows;
  const int64_t rows = min(static_cast<int64_t>(S::kRows), p.queries - q0);
  const int row = static_cast<int>(threadIdx.x) / 4, part = static_cast<int>(threadIdx.x) % 4;
  const int64_t query = min(q0 + row, p.queries - 1), statistic = head * p.queries + query;
  const int64_t first = p.first_key[query], q_stride = static_cast<int64_t>(p.heads) * p.depth;
  load_tile<kDepth>(q, p.q + q0 * q_stride + head * p.depth, q_stride, rows, p.depth);
  load_tile<kDepth>(d_o, p.d_o + q0 * q_stride + head * p.depth, q_stride, rows, p.depth);

  float4 acc[S::kVectors] = {};
  float* const weights = w + row * (S::kRows + 1);
  Members members = p.members(head, query);
  for (int64_t k0 = p.first_key[q0]; k0 <= p.own.of(q0 + rows - 1); k0 += S::kRows) {
    const int64_t stride = static_cast<int64_t>(p.kv_heads) * p.depth, at = k0 * stride + kv_head * p.depth;
    const unsigned bits = row < rows ? members.next(static_cast<int>(k0), S::kRows) : 0;
    if (!__syncthreads_or(bits != 0)) continue;
    load_tile<kDepth>(k, p.k + at, stride, p.keys - k0, p.depth);
    load_tile<kDepth>(v, p.v + at, stride, p.keys - k0, p.depth);
    __syncthreads();
    float s[S::kColumns], dp[S::kColumns];
    row_products<kDepth>(s, q + row * S::kStride, k, part, p.depth);
    row_products<kDepth>(dp, d_o + row * S::kStride, v, part, p.depth);
#pragma unroll
    for (int c = 0; c < S::kColumns; ++c) {
      const int64_t key = k0 + 4 * c + part;
      const bool member = bits >> (4 * c + part) & 1;
      weights[4 * c + part] =
          member ? pair_gradient(p, p.scale * s[c], dp[c], statistic, key == first).ds : 0.0f;
    }
    __syncwarp();
    mix<kDepth>(acc, weights, k, part, p.depth);
    __syncwarp();
  }
  if (row < rows) store_row<kDepth>(p.dq + query * q_stride + head * p.depth, acc, p.scale, part, p.depth);
}

/// Grid (kv heads, tiles of keys); early keys, which are visible to most queries, first. A row is a key here.
template <int kDepth, class T>
__global__ void __launch_bounds__(Tile<kDepth>::kThreads, 1) attention_f32_dkv_kernel(Problem<T> p) {
  using S = Tile<kDepth>;
  DYN_SMEM(float, smem, 16);
  float *const k = smem, *const v = k + S::kFloats, *const q = v + S::kFloats, *const d_o = q + S::kFloats,
               *const w = d_o + S::kFloats;
  const int kv_head = static_cast<int>(blockIdx.x), group = p.heads / p.kv_heads;
  const int64_t k0 = static_cast<int64_t>(blockIdx.y) * S::kRows;
  const int64_t rows = min(static_cast<int64_t>(S::kRows), p.keys - k0);
  const int row = static_cast<int>(threadIdx.x) / 4, part = static_cast<int>(threadIdx.x) % 4;
  const int64_t key = k0 + row, stride = static_cast<int64_t>(p.kv_heads) * p.depth;
  const int64_t q_stride = static_cast<int64_t>(p.heads) * p.depth;
  load_tile<kDepth>(k, p.k + k0 * stride + kv_head * p.depth, stride, rows, p.depth);
  load_tile<kDepth>(v, p.v + k0 * stride + kv_head * p.depth, stride, rows, p.depth);

  STATIC_SMEM(unsigned, members, [S::kRows]);  // of each query of a tile: which keys of the block it has
  float4 dk[S::kVectors] = {}, dv[S::kVectors] = {};
  float* const weights = w + row * (S::kRows + 1);
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
    for (int64_t q0 = p.own.first_query(static_cast<int>(k0)) / S::kRows * S::kRows;
         q0 < p.queries && p.first_key[q0] < k0 + rows; q0 += S::kRows) {
      const int64_t count = p.queries - q0, mine = q0 + row;
      unsigned bits = 0;
      if (row < count) {
        Members m = p.members(head, mine);
        m.skip_to(static_cast<int>(k0));
        bits = m.next(static_cast<int>(k0), S::kRows);
      }
      if (!__syncthreads_or(bits != 0)) continue;
      if (part == 0) members[row] = bits;
      load_tile<kDepth>(q, p.q + q0 * q_stride + head * p.depth, q_stride, count, p.depth);
      load_tile<kDepth>(d_o, p.d_o + q0 * q_stride + head * p.depth, q_stride, count, p.depth);
      __syncthreads();
      float s[S::kColumns], dp[S::kColumns];
      row_products<kDepth>(s, k + row * S::kStride, q, part, p.depth);
      row_products<kDepth>(dp, v + row * S::kStride, d_o, part, p.depth);
#pragma unroll
      for (int c = 0; c < S::kColumns; ++c) {
        const int64_t query = min(q0 + 4 * c + part, p.queries - 1), statistic = head * p.queries + query;
        const bool member = members[4 * c + part] >> row & 1;
        const PairGradient pair =
            member ? pair_gradient(p, p.scale * s[c], dp[c], statistic, key == p.first_key[query])
                   : PairGradient{0.0f, 0.0f};
        dp[c] = pair.ds;
        weights[4 * c + part] = pair.weight;
      }
      __syncwarp();
      mix<kDepth>(dv, weights, d_o, part, p.depth);
      __syncwarp();
#pragma unroll
      for (int c = 0; c < S::kColumns; ++c) weights[4 * c + part] = dp[c];
      __syncwarp();
      mix<kDepth>(dk, weights, q, part, p.depth);
      __syncwarp();
    }
  if (row >= rows) return;
  store_row<kDepth>(p.dk + key * stride + kv_head * p.depth, dk, p.scale, part, p.depth);
  store_row<kDepth>(p.dv + key * p.dv_row + kv_head * p.depth, dv, 1.0f, part, p.depth);
}

template <int kDepth>
LaunchConfig config_of(int heads, int64_t rows, int tiles) {
  using S = Tile<kDepth>;
  LaunchConfig c;
  c.grid = dim3(static_cast<unsigned>(heads), blocks_for(rows, S::kRows));
  c.block = dim3(S::kThreads);
  c.smem = sizeof(float) * static_cast<size_t>(tiles * S::kFloats + S::kRows * (S::kRows + 1));
  return c;
}

template <class F>
void dispatch_depth(const char* op, int64_t depth, F&& f) {
  SLUICE_CHECK(depth <= 256, "{}: head_dim {} is larger than 256", op, depth);
  if (depth <= 64)
    f(std::integral_constant<int, 64>());
  else if (depth <= 128)
    f(std::integral_constant<int, 128>());
  else
    f(std::integral_constant<int, 256>());
}

template <class T>
Problem<T> problem_of(const AttentionInputs& in, const VisibleKeys& visible, const Selection* selection) {
  Problem<T> p = {};
  p.q = device_data<T>(in.q), p.k = device_data<T>(in.k), p.v = device_data<T>(in.v);
  p.first_key = visible.first, p.own = visible.own;
  p.queries = in.q.dim(0), p.keys = in.k.dim(0);
  p.heads = static_cast<int>(in.q.dim(1)), p.kv_heads = static_cast<int>(in.k.dim(1)),
  p.depth = static_cast<int>(in.q.dim(2));
  p.scale = static_cast<float>(in.scale);
  p.softpick = in.weights == AttentionWeights::softpick;
  if (!selection) return p;
  p.selected = device_data<int>(selection->first), p.counts = device_data<int>(selection->count);
  p.sets = static_cast<int>(selection->first.dim(0)), p.room = static_cast<int>(selection->first.dim(2));
  p.block = static_cast<int>(selection->block);
  return p;
}

}  // namespace

void attention_f32_forward(Context& ctx, const AttentionState& out, const AttentionInputs& in,
                           const VisibleKeys& visible, const Selection* selection) {
  dispatch_storage("attention_forward", in.q, [&](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    dispatch_depth("attention_forward", in.q.dim(2), [&](auto depth) {
      constexpr int kDepth = depth;
      if (ctx.dry_run) return;
      Problem<T> p = problem_of<T>(in, visible, selection);
      p.o = device_data<T>(out.o), p.lse = device_data<float>(out.lse);
      p.z0 = out.z0 ? device_data<float>(out.z0) : nullptr;
      launch(ctx, "attention_f32_forward", config_of<kDepth>(p.heads, p.queries, 3),
             attention_f32_forward_kernel<kDepth, T>, p);
    });
  });
}

void attention_f32_backward(Context& ctx, const AttentionGrads& grads, const Tensor& d_o, const Tensor& delta,
                            const AttentionInputs& in, const VisibleKeys& visible, const Tensor& lse,
                            const Tensor& coef0, const Selection* selection) {
  dispatch_storage("attention_backward", in.q, [&](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    dispatch_depth("attention_backward", in.q.dim(2), [&](auto depth) {
      constexpr int kDepth = depth;
      if (ctx.dry_run) return;
      Problem<T> p = problem_of<T>(in, visible, selection);
      p.d_o = device_data<T>(d_o), p.lse = device_data<float>(lse), p.delta = device_data<float>(delta);
      p.coef0 = coef0 ? device_data<float>(coef0) : nullptr;
      p.dq = device_data<T>(grads.dq), p.dk = device_data<T>(grads.dk), p.dv = device_data<T>(grads.dv);
      p.dv_row = grads.dv.stride();
      launch(ctx, "attention_f32_dq", config_of<kDepth>(p.heads, p.queries, 4),
             attention_f32_dq_kernel<kDepth, T>, p);
      launch(ctx, "attention_f32_dkv", config_of<kDepth>(p.kv_heads, p.keys, 4),
             attention_f32_dkv_kernel<kDepth, T>, p);
    });
  });
}

}  // namespace sluice::cuda
