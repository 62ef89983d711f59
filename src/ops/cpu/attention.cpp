// How a block is computed: attention_blocks.h. Here: blocks of rows, the online softmax, and who computes what.
#include "ops/attention.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "core/parallel_for.h"
#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"
#include "ops/cpu/attention_blocks.h"

namespace {

/// The arguments that forward and backward share.
template <class T>
struct Problem {
  using A = accumulate_t<T>;
  const T *q, *k, *v;
  const int32_t* first_key;
  int64_t tq, tk, heads, kv_heads, depth, padded_depth;
  A scale;

  Problem(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& first_key_, double scale_)
      : q(q_.as<T>()), k(k_.as<T>()), v(v_.as<T>()), first_key(first_key_.as<int32_t>()),
        tq(q_.dim(0)), tk(k_.dim(0)), heads(q_.dim(1)), kv_heads(k_.dim(1)), depth(q_.dim(2)),
        padded_depth((depth + Simd<A>::kWidth - 1) / Simd<A>::kWidth * Simd<A>::kWidth), scale(static_cast<A>(scale_)) {}
  int64_t group() const { return heads / kv_heads; }
  int64_t offset() const { return tk - tq; }  // query t is key t + offset
  int64_t pairs() const {                      // that see each other, over all heads
    int64_t n = 0;
    for (int64_t t = 0; t < tq; ++t) n += t + offset() + 1 - first_key[t];
    return n * heads;
  }

  /// Everything that indexes memory rests on these.
  void check_first_keys(const char* op) const {
    for (int64_t t = 0; t < tq; ++t) {
      SLUICE_CHECK(first_key[t] >= (t ? first_key[t - 1] : 0) && first_key[t] <= t + offset(),
                   "{}: first_key[{}] = {} must not be below its predecessor {} nor above {}", op, t, first_key[t],
                   t ? first_key[t - 1] : 0, t + offset());
    }
  }
};

/// Threads worth waking for so many pairs of query and key: each gets some tens of microseconds of work.
int64_t useful_threads(int64_t pairs, int64_t depth) {
  return std::clamp<int64_t>(pairs * depth / 500000, 1, num_threads());
}

/// A block of up to kLanes rows of one kv head; row r is query token r / group, head g * group + r % group, so that the
/// group's heads share one pass over the keys.
template <class T>
struct RowBlock {
  using A = accumulate_t<T>;
  using Int = typename Simd<A>::Int;
  int64_t row, count, lanes, head, group;  // lanes: count rounded up to whole vectors
  int64_t first_min, first_max, last_min, last_max;
  alignas(64) Int first[kLanes], last[kLanes];  // visible keys of a lane, ends included

  RowBlock(const Problem<T>& p, int64_t kv_head, int64_t row_, int64_t count_)
      : row(row_), count(count_), head(kv_head * p.group()), group(p.group()) {
    constexpr int64_t W = Simd<A>::kWidth;
    lanes = (count + W - 1) / W * W;
    for (int64_t i = 0; i < count; ++i) {
      first[i] = p.first_key[token(i)];
      last[i] = static_cast<Int>(token(i) + p.offset());
    }
    first_min = first[0], first_max = first[count - 1];
    last_min = last[0], last_max = last[count - 1];
    for (int64_t i = count; i < lanes; ++i) first[i] = 0, last[i] = std::numeric_limits<Int>::max();
  }
  int64_t token(int64_t i) const { return (row + i) / group; }
  int64_t head_of(int64_t i) const { return head + (row + i) % group; }
  template <class P>
  void pointers(P** out, P* tensor, const Problem<T>& p) const {
    for (int64_t i = 0; i < count; ++i) out[i] = tensor + (token(i) * p.heads + head_of(i)) * p.depth;
  }
  /// Index into (H, Tq).
  int64_t statistic(int64_t i, int64_t tq) const { return head_of(i) * tq + token(i); }

  /// Lanes [lane, lane + width) and the keys of [begin, end) that some of them sees. A block of keys at an edge of the
  /// mask is computed in strips of the products' tile width, so that little is computed in vain; others as a whole.
  struct Strip {
    int64_t lane, width, begin, end;
    bool cut;  // some lane does not see some key
    int64_t keys() const { return end - begin; }
  };
  int64_t strip_width(int64_t k0, int64_t k1) const {
    return k0 < first_max || k1 - 1 > last_min ? 2 * Simd<A>::kWidth : lanes;
  }
  Strip strip(int64_t lane, int64_t max_width, int64_t k0, int64_t k1) const {
    const int64_t width = std::min(max_width, lanes - lane), end = std::min(lane + width, count) - 1;
    Strip s{lane, width, std::max<int64_t>(k0, first[lane]), std::min<int64_t>(k1, last[end] + 1), false};
    s.cut = s.begin < first[end] || s.end - 1 > last[lane];
    return s;
  }

  /// s[key][lane] = -inf where the lane does not see the key.
  void mask(A* s, int64_t lane, int64_t width, int64_t k0, int64_t keys) const {
    const Vec<A> hidden = splat(-std::numeric_limits<A>::infinity());
    for (int64_t i = lane; i < lane + width; i += Simd<A>::kWidth) {
      const auto lo = *reinterpret_cast<const typename Simd<A>::Mask*>(first + i);
      const auto hi = *reinterpret_cast<const typename Simd<A>::Mask*>(last + i);
      for (int64_t j = 0; j < keys; ++j) {
        const typename Simd<A>::Mask key = typename Simd<A>::Mask{} + static_cast<Int>(k0 + j);
        A* x = s + j * kLaneStride + i;
        store_vec(x, (key >= lo) & (key <= hi) ? load_vec(x) : hidden);
      }
    }
  }
};

/// dst[key][d] of keys [k0, k0 + keys) of one kv head, zero for depth <= d < padded_depth.
template <class T>
void pack_keys(accumulate_t<T>* dst, const T* src, const Problem<T>& p, int64_t kv_head, int64_t k0, int64_t keys) {
  const int64_t stride = head_stride(p.depth);
  for (int64_t j = 0; j < keys; ++j) {
    convert_row(dst + j * stride, src + ((k0 + j) * p.kv_heads + kv_head) * p.depth, p.depth, accumulate_t<T>(1));
    for (int64_t d = p.depth; d < p.padded_depth; ++d) dst[j * stride + d] = 0;
  }
}

// ---- forward ----

template <class A>
int64_t forward_workspace(int64_t padded_depth, int64_t depth) {
  return 2 * padded_depth * kLaneStride + 2 * kKeys * head_stride(depth) + kKeys * kLaneStride;
}

/// One step of the online softmax: s becomes exp(s - m) under the new row maxima m; l the row sums; alpha what earlier
/// sums and outputs must be multiplied by.
template <class A>
void softmax_step(A* s, int64_t keys, int64_t lanes, A* m, A* l, A* alpha) {
  for (int64_t i = 0; i < lanes; i += Simd<A>::kWidth) {
    const Vec<A> m_old = load_vec(m + i);
    Vec<A> m0 = m_old, m1 = m_old;
    int64_t j = 0;
    for (; j + 2 <= keys; j += 2) {
      const Vec<A> a = load_vec(s + j * kLaneStride + i), b = load_vec(s + (j + 1) * kLaneStride + i);
      m0 = m0 > a ? m0 : a;
      m1 = m1 > b ? m1 : b;
    }
    if (j < keys) {
      const Vec<A> a = load_vec(s + j * kLaneStride + i);
      m0 = m0 > a ? m0 : a;
    }
    const Vec<A> m_new = m0 > m1 ? m0 : m1;
    const Vec<A> rescale = exp_vec(m_old - m_new);
    Vec<A> sum = load_vec(l + i) * rescale;
    for (j = 0; j < keys; ++j) {
      A* x = s + j * kLaneStride + i;
      const Vec<A> e = exp_vec(load_vec(x) - m_new);
      store_vec(x, e);
      sum += e;
    }
    store_vec(m + i, m_new);
    store_vec(l + i, sum);
    store_vec(alpha + i, rescale);
  }
}

template <class T>
void forward_block(const Problem<T>& p, int64_t kv_head, int64_t row, int64_t count, accumulate_t<T>* work, T* o,
                   accumulate_t<T>* lse, accumulate_t<T>* z0) {
  using A = accumulate_t<T>;
  const RowBlock<T> block(p, kv_head, row, count);
  A* const q_t = work;
  A* const o_t = q_t + p.padded_depth * kLaneStride;
  A* const k = o_t + p.padded_depth * kLaneStride;
  A* const v = k + kKeys * head_stride(p.depth);
  A* const s = v + kKeys * head_stride(p.depth);
  alignas(64) A m[kLanes], l[kLanes], alpha[kLanes];
  // Half the lowest number: a lane that has seen no key yet must not take exp(-inf - -inf).
  std::fill_n(m, kLanes, std::numeric_limits<A>::lowest() / 2);
  std::fill_n(l, kLanes, A(0));

  const T* q_rows[kLanes];
  block.pointers(q_rows, p.q, p);
  pack_transposed(q_t, q_rows, count, block.lanes, p.depth, p.padded_depth, p.scale);
  std::fill_n(o_t, p.padded_depth * kLaneStride, A(0));
  for (int64_t k0 = block.first_min; k0 <= block.last_max; k0 += kKeys) {
    const int64_t k1 = std::min(k0 + kKeys, block.last_max + 1), stride = head_stride(p.depth);
    pack_keys(k, p.k, p, kv_head, k0, k1 - k0);
    pack_keys(v, p.v, p, kv_head, k0, k1 - k0);
    const int64_t width = block.strip_width(k0, k1);
    for (int64_t lane = 0; lane < block.lanes; lane += width) {
      const auto strip = block.strip(lane, width, k0, k1);
      const int64_t keys = strip.keys(), from = (strip.begin - k0) * stride;
      if (keys <= 0) continue;
      scores(keys, strip.width, p.depth, k + from, q_t + lane, s + lane);
      if (z0 && k0 <= block.first_max)
        for (int64_t i = lane; i < std::min(lane + strip.width, count); ++i)
          if (const int64_t j = block.first[i] - strip.begin; j >= 0 && j < keys)
            z0[block.statistic(i, p.tq)] = s[j * kLaneStride + i];
      if (strip.cut) block.mask(s, lane, strip.width, strip.begin, keys);
      softmax_step(s + lane, keys, strip.width, m + lane, l + lane, alpha + lane);
      mix_keys(p.padded_depth, strip.width, keys, v + from, stride, s + lane, o_t + lane, Onto::rescale_add,
               alpha + lane);
    }
  }
  for (int64_t i = 0; i < count; ++i) lse[block.statistic(i, p.tq)] = m[i] + std::log(l[i]);  // l >= 1: lse >= z0
  for (int64_t i = 0; i < block.lanes; ++i) l[i] = A(1) / l[i];
  T* o_rows[kLanes];
  block.pointers(o_rows, o, p);
  unpack_transposed(o_rows, o_t, l, count, p.depth);
}

template <class T>
void forward_t(Context& ctx, Tensor o, Tensor lse, Tensor z0, const Tensor& q, const Tensor& k, const Tensor& v,
               const Tensor& first_key, double scale) {
  using A = accumulate_t<T>;
  const Problem<T> p(q, k, v, first_key, scale);
  const int64_t threads = num_threads(), work_size = forward_workspace<A>(p.padded_depth, p.depth);
  ScratchScope temporaries(ctx.scratch);
  A* const work = temporaries.alloc("attention blocks", dtype_of<A>::value, {threads, work_size}).template as<A>();
  if (ctx.dry_run) return;
  p.check_first_keys("attention_forward");

  T* const out = o.as<T>();
  A* const lse_out = lse.as<A>();
  A* const z0_out = z0.empty() ? nullptr : z0.as<A>();
  const int64_t rows = p.tq * p.group(), blocks = (rows + kLanes - 1) / kLanes, tasks = blocks * p.kv_heads;
  // Late rows see most keys: they go first, so that the threads end together.
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(std::min(useful_threads(p.pairs(), p.depth), tasks)))
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t row = (blocks - 1 - task / p.kv_heads) * kLanes;
    forward_block(p, task % p.kv_heads, row, std::min(kLanes, rows - row), work + omp_get_thread_num() * work_size, out,
                  lse_out, z0_out);
  }
}

// ---- backward ----
//
// Keys and rows are cut into chunks that do not see one another (a chunk begins where first_key_t == t), chunks into
// blocks of rows and blocks of keys counted from the chunk's first token. For one pair of blocks there are five products:
// S, dP, dQ, dK, dV. Either one thread takes a whole chunk of one kv head (one pass), or, when there are too few of
// those, row blocks (dQ) and key blocks (dK, dV) are shared out apart, which computes S and dP twice. Both add the same
// numbers in the same order - dQ over key blocks ascending, dK and dV over row blocks ascending - so bits do not depend
// on the choice, nor on the number of threads.

constexpr int64_t kMinChunk = 128;  // tokens; shorter documents share a chunk, so that their blocks are full

template <class T>
struct Backward {
  using A = accumulate_t<T>;
  const Problem<T>& p;
  const T* d_o;
  const A *lse, *delta, *coef0;  // (H, T); coef0 may be null
  T *dq, *dk, *dv;
  A *dk_sum, *dv_sum;  // row j of kv head g at g * sum_head + j * sum_row
  int64_t sum_head, sum_row;

  static int64_t workspace(int64_t padded_depth, int64_t depth) {
    return 3 * padded_depth * kLaneStride + 2 * (kLanes + kKeys) * head_stride(depth) + 2 * kKeys * kLaneStride;
  }
  /// A thread's memory.
  struct Work {
    A *q_t, *d_o_t, *dq_t;   // [d][lane]
    A *q, *d_o;              // [lane][d]
    A *k, *v;                // [key][d]
    A *s, *dp;               // [key][lane]
    alignas(64) A lse[kLanes], delta[kLanes];
    Work(A* base, const Problem<T>& p) {
      const int64_t transposed = p.padded_depth * kLaneStride, stride = head_stride(p.depth);
      const auto take = [&](int64_t n) { return std::exchange(base, base + n); };
      q_t = take(transposed), d_o_t = take(transposed), dq_t = take(transposed);
      q = take(kLanes * stride), d_o = take(kLanes * stride), k = take(kKeys * stride), v = take(kKeys * stride);
      s = take(kKeys * kLaneStride), dp = take(kKeys * kLaneStride);
    }
  };

  void load_rows(Work& w, const RowBlock<T>& block, bool for_keys) const {
    const T *q_rows[kLanes], *d_o_rows[kLanes];
    block.pointers(q_rows, p.q, p);
    block.pointers(d_o_rows, d_o, p);
    pack_transposed(w.q_t, q_rows, block.count, block.lanes, p.depth, p.padded_depth, p.scale);
    pack_transposed(w.d_o_t, d_o_rows, block.count, block.lanes, p.depth, p.padded_depth, A(1));
    const int64_t stride = head_stride(p.depth);
    for (int64_t i = 0; i < block.count && for_keys; ++i) {
      convert_row(w.q + i * stride, q_rows[i], p.depth, p.scale);
      convert_row(w.d_o + i * stride, d_o_rows[i], p.depth, A(1));
      for (int64_t d = p.depth; d < p.padded_depth; ++d) w.q[i * stride + d] = w.d_o[i * stride + d] = 0;
    }
    for (int64_t i = 0; i < block.lanes; ++i) {
      const bool real = i < block.count;
      w.lse[i] = real ? lse[block.statistic(i, p.tq)] : A(0);
      w.delta[i] = real ? delta[block.statistic(i, p.tq)] : A(0);
    }
  }

  /// S and dP become P and dS, in place.
  void score_gradients(Work& w, const RowBlock<T>& block, const typename RowBlock<T>::Strip& strip) const {
    const int64_t keys = strip.keys();
    if (strip.cut) block.mask(w.s, strip.lane, strip.width, strip.begin, keys);
    for (int64_t i = strip.lane; i < strip.lane + strip.width; i += Simd<A>::kWidth) {
      const Vec<A> lse_i = load_vec(w.lse + i), delta_i = load_vec(w.delta + i);
      for (int64_t j = 0; j < keys; ++j) {
        A *s = w.s + j * kLaneStride + i, *dp = w.dp + j * kLaneStride + i;
        const Vec<A> e = exp_vec(load_vec(s) - lse_i);
        store_vec(s, e);
        store_vec(dp, e * (load_vec(dp) - delta_i));
      }
    }
    if (coef0 && strip.begin <= block.first_max)
      for (int64_t i = strip.lane; i < std::min(strip.lane + strip.width, block.count); ++i)
        if (const int64_t j = block.first[i] - strip.begin; j >= 0 && j < keys)
          w.dp[j * kLaneStride + i] += coef0[block.statistic(i, p.tq)];
  }

  /// One pair of blocks: the keys of [k0, k1) that some row of the block sees.
  void pair(Work& w, const RowBlock<T>& block, int64_t kv_head, int64_t k0, int64_t k1, bool for_rows,
            bool for_keys) const {
    k0 = std::max(k0, block.first_min);
    k1 = std::min(k1, block.last_max + 1);
    if (k0 >= k1) return;
    const int64_t stride = head_stride(p.depth), width = block.strip_width(k0, k1);
    pack_keys(w.k, p.k, p, kv_head, k0, k1 - k0);
    pack_keys(w.v, p.v, p, kv_head, k0, k1 - k0);
    for (int64_t lane = 0; lane < block.lanes; lane += width) {
      const auto strip = block.strip(lane, width, k0, k1);
      const int64_t keys = strip.keys(), from = (strip.begin - k0) * stride;
      if (keys <= 0) continue;
      scores(keys, strip.width, p.depth, w.k + from, w.q_t + lane, w.s + lane);
      scores(keys, strip.width, p.depth, w.v + from, w.d_o_t + lane, w.dp + lane);
      score_gradients(w, block, strip);
      if (for_rows)
        mix_keys(p.padded_depth, strip.width, keys, w.k + from, stride, w.dp + lane, w.dq_t + lane, Onto::add);
      if (for_keys) {
        const int64_t at = kv_head * sum_head + strip.begin * sum_row, real = std::min(strip.width, block.count - lane);
        mix_lanes(keys, p.padded_depth, real, w.s + lane, w.d_o + lane * stride, stride, dv_sum + at, sum_row);
        mix_lanes(keys, p.padded_depth, real, w.dp + lane, w.q + lane * stride, stride, dk_sum + at, sum_row);
      }
    }
  }

  void store_rows(Work& w, const RowBlock<T>& block) const {
    T* dq_rows[kLanes];
    alignas(64) A scale[kLanes];
    std::fill_n(scale, kLanes, p.scale);
    block.pointers(dq_rows, dq, p);
    unpack_transposed(dq_rows, w.dq_t, scale, block.count, p.depth);
  }
  void zero_keys(int64_t kv_head, int64_t k0, int64_t k1) const {
    for (int64_t j = k0; j < k1; ++j) {
      std::fill_n(dk_sum + kv_head * sum_head + j * sum_row, p.padded_depth, A(0));
      std::fill_n(dv_sum + kv_head * sum_head + j * sum_row, p.padded_depth, A(0));
    }
  }
  void store_keys(int64_t kv_head, int64_t k0, int64_t k1) const {
    if (static_cast<const void*>(dk_sum) == dk) return;  // summed in place
    for (int64_t j = k0; j < k1; ++j) {
      const int64_t from = kv_head * sum_head + j * sum_row, to = (j * p.kv_heads + kv_head) * p.depth;
      store_row(dk + to, dk_sum + from, p.depth);
      store_row(dv + to, dv_sum + from, p.depth);
    }
  }

  RowBlock<T> block_of(int64_t kv_head, int64_t c0, int64_t c1, int64_t index) const {
    const int64_t row = c0 * p.group() + index * kLanes;
    return RowBlock<T>(p, kv_head, row, std::min(kLanes, c1 * p.group() - row));
  }
  int64_t row_blocks(int64_t c0, int64_t c1) const { return ((c1 - c0) * p.group() + kLanes - 1) / kLanes; }

  /// All keys for one block of rows: dQ, and with for_keys the rows' part of dK and dV.
  void row_pass(Work& w, int64_t kv_head, int64_t c0, int64_t c1, int64_t index, bool for_keys) const {
    const RowBlock<T> block = block_of(kv_head, c0, c1, index);
    load_rows(w, block, for_keys);
    std::fill_n(w.dq_t, p.padded_depth * kLaneStride, A(0));
    for (int64_t k0 = c0 + (block.first_min - c0) / kKeys * kKeys; k0 <= block.last_max; k0 += kKeys)
      pair(w, block, kv_head, k0, k0 + kKeys, true, for_keys);
    store_rows(w, block);
  }
  /// All rows for one block of keys: dK and dV.
  void key_pass(Work& w, int64_t kv_head, int64_t c0, int64_t c1, int64_t index) const {
    const int64_t k0 = c0 + index * kKeys, k1 = std::min(k0 + kKeys, c1);
    zero_keys(kv_head, k0, k1);
    for (int64_t b = (k0 - c0) * p.group() / kLanes; b < row_blocks(c0, c1); ++b) {
      const RowBlock<T> block = block_of(kv_head, c0, c1, b);
      if (block.first_min >= k1) break;
      load_rows(w, block, true);
      pair(w, block, kv_head, k0, k1, false, true);
    }
    store_keys(kv_head, k0, k1);
  }
  void one_pass(Work& w, int64_t kv_head, int64_t c0, int64_t c1) const {
    zero_keys(kv_head, c0, c1);
    for (int64_t b = 0; b < row_blocks(c0, c1); ++b) row_pass(w, kv_head, c0, c1, b, true);
    store_keys(kv_head, c0, c1);
  }
};

/// Chunk i is tokens [cuts[i], cuts[i + 1]). Returns the number of chunks.
int64_t cut_chunks(int32_t* cuts, const int32_t* first_key, int64_t tokens) {
  int64_t n = 0;
  cuts[0] = 0;
  for (int64_t t = kMinChunk; t < tokens; ++t)
    if (first_key[t] == t && t - cuts[n] >= kMinChunk) cuts[++n] = static_cast<int32_t>(t);
  cuts[++n] = static_cast<int32_t>(tokens);
  return n;
}

/// True if threads that take whole chunks in turn end sooner than threads that share 7/5 of the work (and the packing)
/// evenly. load holds one number per thread.
bool chunks_suffice(double* load, int64_t threads, const int32_t* cuts, int64_t chunks, const int32_t* first_key,
                    int64_t kv_heads) {
  std::fill_n(load, threads, 0.0);
  double total = 0;
  for (int64_t c = 0; c < chunks; ++c) {
    double cost = 0;
    for (int64_t t = cuts[c]; t < cuts[c + 1]; ++t) cost += static_cast<double>(t + 32 - first_key[t]);
    for (int64_t g = 0; g < kv_heads; ++g) *std::min_element(load, load + threads) += cost;
    total += cost * static_cast<double>(kv_heads);
  }
  return *std::max_element(load, load + threads) <= 1.45 * total / static_cast<double>(threads);
}

template <class T>
void backward_t(Context& ctx, Tensor dq, Tensor dk, Tensor dv, const Tensor& d_o, const Tensor& q, const Tensor& k,
                const Tensor& v, const Tensor& o, const Tensor& lse, const Tensor& first_key, double scale,
                const Tensor& dlse, const Tensor& coef0) {
  using A = accumulate_t<T>;
  const Problem<T> p(q, k, v, first_key, scale);
  const int64_t threads = num_threads(), work_size = Backward<T>::workspace(p.padded_depth, p.depth);
  const bool in_place = std::is_same_v<T, A> && p.padded_depth == p.depth;
  ScratchScope temporaries(ctx.scratch);
  constexpr DType kSum = dtype_of<A>::value;
  A* const delta = temporaries.alloc("attention delta", kSum, {p.heads, p.tq}).template as<A>();
  A* const work = temporaries.alloc("attention blocks", kSum, {threads, work_size}).template as<A>();
  int32_t* const cuts = temporaries.alloc("attention chunks", DType::i32, {p.tk / kMinChunk + 2}).template as<int32_t>();
  double* const load_of = temporaries.alloc("attention loads", DType::f64, {threads}).template as<double>();
  const int64_t sums = in_place ? 0 : p.kv_heads * p.tk * p.padded_depth;
  A* const dk_sum = temporaries.alloc("attention dk", kSum, {sums}).template as<A>();
  A* const dv_sum = temporaries.alloc("attention dv", kSum, {sums}).template as<A>();
  if (ctx.dry_run) return;
  p.check_first_keys("attention_backward");

  Backward<T> b{p, d_o.as<T>(), lse.as<A>(), delta, coef0.empty() ? nullptr : coef0.as<A>(), dq.as<T>(), dk.as<T>(),
                dv.as<T>(), dk_sum, dv_sum, p.tk * p.padded_depth, p.padded_depth};
  if constexpr (std::is_same_v<T, A>)
    if (in_place) b.dk_sum = b.dk, b.dv_sum = b.dv, b.sum_head = p.depth, b.sum_row = p.kv_heads * p.depth;

  const T *o_in = o.as<T>(), *d_o_in = d_o.as<T>();
  const A* const dlse_in = dlse.empty() ? nullptr : dlse.as<A>();
  parallel_for(p.tq, 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < p.heads; ++h) {
        const int64_t at = (t * p.heads + h) * p.depth, i = h * p.tq + t;
        delta[i] = dot_row<T, A>(d_o_in + at, o_in + at, p.depth) - (dlse_in ? dlse_in[i] : A(0));
      }
  });

  const int64_t chunks = cut_chunks(cuts, p.first_key, p.tq), team = useful_threads(2 * p.pairs(), p.depth);
  if (chunks_suffice(load_of, team, cuts, chunks, p.first_key, p.kv_heads)) {
    const int64_t tasks = chunks * p.kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(std::min(team, tasks)))
    for (int64_t task = 0; task < tasks; ++task) {
      typename Backward<T>::Work w(work + omp_get_thread_num() * work_size, p);
      const int64_t c = task / p.kv_heads;
      b.one_pass(w, task % p.kv_heads, cuts[c], cuts[c + 1]);
    }
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(team))
  {
    typename Backward<T>::Work w(work + omp_get_thread_num() * work_size, p);
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t c0 = cuts[c], c1 = cuts[c + 1];
      const int64_t row_blocks = b.row_blocks(c0, c1), key_blocks = (c1 - c0 + kKeys - 1) / kKeys;
      // Heavy ones first: early keys, late rows.
#pragma omp for schedule(dynamic, 1) nowait
      for (int64_t task = 0; task < key_blocks * p.kv_heads; ++task)
        b.key_pass(w, task % p.kv_heads, c0, c1, task / p.kv_heads);
#pragma omp for schedule(dynamic, 1) nowait
      for (int64_t task = 0; task < row_blocks * p.kv_heads; ++task)
        b.row_pass(w, task % p.kv_heads, c0, c1, row_blocks - 1 - task / p.kv_heads, false);
    }
  }
}

// ---- sink ----

template <class T>
void sink_forward_t(Tensor y, const Tensor& o, const Tensor& lse, const Tensor& sink) {
  using A = accumulate_t<T>;
  const int64_t tokens = o.dim(0), heads = o.dim(1), depth = o.dim(2);
  T* const out = y.as<T>();
  const T *in = o.as<T>(), *s = sink.as<T>();
  const A* const l = lse.as<A>();
  parallel_for(tokens, 32, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < heads; ++h) {
        const A gate = sigmoid(l[h * tokens + t] - load(s + h));
        const int64_t at = (t * heads + h) * depth;
#pragma GCC ivdep
        for (int64_t d = 0; d < depth; ++d) store(out + at + d, load(in + at + d) * gate);
      }
  });
}

template <class T>
void sink_backward_t(Tensor d_o, Tensor dlse, Tensor dsink, const Tensor& dy, const Tensor& o, const Tensor& lse,
                     const Tensor& sink) {
  using A = accumulate_t<T>;
  const int64_t tokens = o.dim(0), heads = o.dim(1), depth = o.dim(2);
  T* const out = d_o.as<T>();
  const T *dy_in = dy.as<T>(), *o_in = o.as<T>(), *s = sink.as<T>();
  const A* const l = lse.as<A>();
  A *const dl = dlse.as<A>(), *const ds = dsink.as<A>();
  parallel_for(tokens, 32, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at = (t * heads + h) * depth, i = h * tokens + t;
        const A gate = sigmoid(l[i] - load(s + h)), rest = sigmoid(load(s + h) - l[i]);
        dl[i] = gate * rest * dot_row<T, A>(dy_in + at, o_in + at, depth);
#pragma GCC ivdep
        for (int64_t d = 0; d < depth; ++d) store(out + at + d, load(dy_in + at + d) * gate);
      }
  });
  parallel_for(heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) {
      double sum = 0;
      for (int64_t t = 0; t < tokens; ++t) sum += static_cast<double>(dl[h * tokens + t]);
      ds[h] -= static_cast<A>(sum);
    }
  });
}

}  // namespace

void attention_forward(Context& ctx, Tensor o, Tensor lse, Tensor z0, const Tensor& q, const Tensor& k, const Tensor& v,
                       const Tensor& first_key, double scale) {
  if (q.dtype == DType::f32)
    forward_t<float>(ctx, o, lse, z0, q, k, v, first_key, scale);
  else if (q.dtype == DType::bf16)
    forward_t<bf16>(ctx, o, lse, z0, q, k, v, first_key, scale);
  else
    forward_t<double>(ctx, o, lse, z0, q, k, v, first_key, scale);
}

void attention_backward(Context& ctx, Tensor dq, Tensor dk, Tensor dv, const Tensor& d_o, const Tensor& q,
                        const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse, const Tensor& first_key,
                        double scale, const Tensor& dlse, const Tensor& coef0) {
  if (q.dtype == DType::f32)
    backward_t<float>(ctx, dq, dk, dv, d_o, q, k, v, o, lse, first_key, scale, dlse, coef0);
  else if (q.dtype == DType::bf16)
    backward_t<bf16>(ctx, dq, dk, dv, d_o, q, k, v, o, lse, first_key, scale, dlse, coef0);
  else
    backward_t<double>(ctx, dq, dk, dv, d_o, q, k, v, o, lse, first_key, scale, dlse, coef0);
}

void sink_forward(Context& ctx, Tensor y, const Tensor& o, const Tensor& lse, const Tensor& sink) {
  if (ctx.dry_run) return;
  if (o.dtype == DType::f32)
    sink_forward_t<float>(y, o, lse, sink);
  else if (o.dtype == DType::bf16)
    sink_forward_t<bf16>(y, o, lse, sink);
  else
    sink_forward_t<double>(y, o, lse, sink);
}

void sink_backward(Context& ctx, Tensor d_o, Tensor dlse, Tensor dsink, const Tensor& dy, const Tensor& o,
                   const Tensor& lse, const Tensor& sink) {
  if (ctx.dry_run) return;
  if (o.dtype == DType::f32)
    sink_backward_t<float>(d_o, dlse, dsink, dy, o, lse, sink);
  else if (o.dtype == DType::bf16)
    sink_backward_t<bf16>(d_o, dlse, dsink, dy, o, lse, sink);
  else
    sink_backward_t<double>(d_o, dlse, dsink, dy, o, lse, sink);
}

#include "ops/cpu/isa_end.h"
