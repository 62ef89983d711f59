// Attention over selected keys, which are read where they are, for all heads of a group at once. Queries are
// taken in blocks, and a block goes through the keys range by range, so that a range stays in caches while
// every query of the block takes its own from it. Backward has two such passes for a block: in parallel over
// queries, probabilities and score gradients, which give dq; then, in parallel over ranges of keys, every key
// collects from the block's queries in ascending order.
#include "ops/sparse_attention.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/parallel_for.h"

// In this order.
// clang-format off
#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"
#include "ops/cpu/vectors.h"
#include "ops/cpu/attention_blocks.h"
#include "ops/cpu/gathered_rows.h"
// clang-format on

namespace {

constexpr int64_t kMostQueries = 128;               // of a block
constexpr int64_t kBlockScores = int64_t{1} << 18;  // likewise, where they have fewer than so many keys

template <class T>
struct Sparse {
  using A = accumulate_t<T>;
  static constexpr int64_t W = Simd<A>::kWidth;
  const T *q, *k, *v;
  const int32_t *first_key, *own_key, *first, *count;
  int64_t tq, tk, heads, kv_heads, depth, sets, room, block;
  int64_t head_stride, row_stride;  // of k and v
  A scale;

  Sparse(const AttentionInputs& in, const Selection& keys)
      : q(in.q.as<T>()),
        k(in.k.as<T>()),
        v(in.v.as<T>()),
        first_key(in.first_key.as<int32_t>()),
        own_key(in.own_key ? in.own_key.as<int32_t>() : nullptr),
        first(keys.first.as<int32_t>()),
        count(keys.count.as<int32_t>()),
        tq(in.q.dim(0)),
        tk(in.k.dim(0)),
        heads(in.q.dim(1)),
        kv_heads(in.k.dim(1)),
        depth(in.q.dim(2)),
        sets(keys.first.dim(0)),
        room(keys.first.dim(2)),
        block(keys.block),
        head_stride(depth),
        row_stride(kv_heads * depth),
        scale(static_cast<A>(in.scale)) {}
  int64_t group() const { return heads / kv_heads; }
  /// The first and the last key that query t sees.
  int64_t first_of(int64_t t) const { return own_key ? first_key[t] + own_key[t] - t : first_key[t]; }
  int64_t last_of(int64_t t) const { return own_key ? own_key[t] : t + tk - tq; }
  int64_t set_of(int64_t kv_head) const { return kv_head / (kv_heads / sets); }
  int64_t most_tokens() const { return std::min(room * block, tk); }
  int64_t row_size() const { return padded(most_tokens(), W); }

  /// Room for the keys of a query where the selection does not have them as they are.
  int64_t expanded_tokens() const { return block == 1 ? 0 : most_tokens(); }
  /// The keys of query t, and in n their number.
  const int32_t* tokens_of(int32_t* expanded, int64_t set, int64_t t, int64_t& n) const {
    const int32_t* const row = first + (set * tq + t) * room;
    n = count[set * tq + t];
    if (block == 1) return row;
    n = expand_blocks(expanded, row, n, block, last_of(t));
    return expanded;
  }
  Rows<const T> rows_of(const T* base, int64_t kv_head, const int32_t* tokens) const {
    return {base + kv_head * head_stride, tokens, row_stride};
  }
  /// As many queries as leave a block's scores of one key/value head in the second cache.
  int64_t queries_per_block() const {
    return std::clamp<int64_t>(kBlockScores / (group() * row_size()), 1, std::min(kMostQueries, tq));
  }
  /// The most scores of a block of one key/value head with as many keys or fewer: fewer keys have larger
  /// blocks.
  int64_t most_scores() const {
    return std::min(std::min(kMostQueries, tq) * group() * row_size(),
                    std::max(kBlockScores, group() * row_size()));
  }
  /// Threads for this many rows of products with the keys.
  int64_t team(int64_t rows) const {
    return std::clamp<int64_t>(rows * most_tokens() * depth / 500000, 1, num_threads());
  }
  /// Whether rows are read so often that copies of each head's rows side by side are worth it: few pages,
  /// which fit into caches one head at a time.
  bool packs() const { return kv_heads > 1 && tq * most_tokens() > 2 * tk; }
  int64_t packed_size(int64_t kv_heads_at_once) const { return packs() ? tk * kv_heads_at_once * depth : 0; }
  /// The largest size of all with as many keys or fewer. Memory for a cache is measured when it is full.
  int64_t most_packed() const {
    return kv_heads > 1 ? std::min(tk, tq * most_tokens() / 2) * kv_heads * depth : 0;
  }
  /// Rows [begin, end) of one key/value head.
  void pack(T* keys, T* values, int64_t kv_head, int64_t begin, int64_t end) const {
    for (int64_t s = begin; s < end; ++s) {
      std::copy_n(k + (s * kv_heads + kv_head) * depth, depth, keys + s * depth);
      std::copy_n(v + (s * kv_heads + kv_head) * depth, depth, values + s * depth);
    }
  }
  /// Reads packed rows from now on; `apart`: the distance of heads, 0 if there is one at a time.
  void read(const T* keys, const T* values, int64_t apart) {
    k = keys, v = values, head_stride = apart, row_stride = depth;
  }
  /// Indices of the selection are memory indices.
  void check(const char* op) const {
    for (int64_t row = 0; row < sets * tq; ++row) {
      const int64_t t = row % tq, last = last_of(t);
      SLUICE_CHECK(last >= 0 && last < tk && (t == 0 || last > last_of(t - 1)),
                   "{}: own_key[{}] = {} must be above its predecessor, and one of {} keys", op, t, last, tk);
      SLUICE_CHECK(count[row] >= 1 && count[row] <= room, "{}: query {} selects {} blocks of at most {}", op,
                   t, count[row], room);
      for (int64_t i = 0, low = first_of(t); i < count[row]; ++i) {
        const int64_t s = first[row * room + i];
        SLUICE_CHECK(s >= low && s <= last, "{}: query {} selects key {}, which is not in [{}, {}]", op, t, s,
                     low, last);
        low = s + block;
      }
    }
  }
};

/// The keys of queries [begin, begin + count), of one index set.
template <class T>
struct QueryLists {
  const int32_t* tokens[kMostQueries];
  int64_t n[kMostQueries];
  int64_t count;

  /// expanded: room for (count, expanded_tokens).
  QueryLists(const Sparse<T>& p, int32_t* expanded, int64_t set, int64_t begin, int64_t count_)
      : count(count_),
        keys_(p.last_of(begin + count - 1) + 1),
        range_(rows_per_range<T>(p.tk, p.most_tokens(), p.depth)) {
    for (int64_t i = 0; i < count; ++i)
      tokens[i] = p.tokens_of(expanded + i * p.expanded_tokens(), set, begin + i, n[i]);
  }
  /// Calls f(query, first, end) for the part [first, end) of the list of every query in [begin, end), in
  /// range after range of the keys.
  template <class F>
  void by_ranges(int64_t begin, int64_t end, F&& f) const {
    int64_t next[kMostQueries] = {};
    for (int64_t low = 0; low < keys_; low += range_)
      for (int64_t i = begin; i < end; ++i) {
        const int64_t from = next[i];
        next[i] = std::lower_bound(tokens[i] + from, tokens[i] + n[i], low + range_) - tokens[i];
        if (next[i] > from) f(i, from, next[i]);
      }
  }
  template <class F>
  void by_ranges(F&& f) const {
    by_ranges(0, count, f);
  }
  /// The part of a query's list within keys [low, high).
  std::pair<int64_t, int64_t> part(int64_t i, int64_t low, int64_t high) const {
    const int32_t *const end = tokens[i] + n[i], *const from = std::lower_bound(tokens[i], end, low);
    return {from - tokens[i], std::lower_bound(from, end, high) - tokens[i]};
  }

 private:
  int64_t keys_, range_;
};

// ---- forward ----

/// Queries [begin, begin + count) of one key/value head. work: their rows of q, then of the output, scores
/// (count, H/Hkv, row_size) and factors (count, H/Hkv).
template <class T>
void forward_block(const Sparse<T>& p, int64_t begin, int64_t count, int64_t kv_head, accumulate_t<T>* work,
                   int32_t* expanded, T* o, accumulate_t<T>* lse, accumulate_t<T>* z0) {
  using A = accumulate_t<T>;
  const int64_t group = p.group(), size = p.row_size(), depth = p.depth, head = kv_head * group;
  A *const q = work, *const y = work, *const s = work + padded(count * group * depth, 16),
           *const inverse = s + count * group * size;
  QueryLists<T> lists(p, expanded, p.set_of(kv_head), begin, count);
  for (int64_t i = 0; i < count; ++i)
    convert_row(q + i * group * depth, p.q + ((begin + i) * p.heads + head) * depth, group * depth, p.scale);
  lists.by_ranges([&](int64_t i, int64_t from, int64_t end) {
    dot_rows(s + i * group * size + from, size, q + i * group * depth, depth, group,
             p.rows_of(p.k, kv_head, lists.tokens[i] + from), end - from, depth);
  });
  for (int64_t i = 0; i < count; ++i)
    for (int64_t h = 0; h < group; ++h) {
      A* const row = s + (i * group + h) * size;
      const int64_t n = lists.n[i], at = (head + h) * p.tq + begin + i;
      if (z0) z0[at] = lists.tokens[i][0] == p.first_of(begin + i) ? row[0] : static_cast<A>(kNotSelected);
      const A m = largest_of(row, n), l = exp_row(row, n, m);
      lse[at] = m + std::log(l);
      inverse[i * group + h] = A(1) / l;
    }
  std::fill_n(y, count * group * depth, A(0));
  lists.by_ranges([&](int64_t i, int64_t from, int64_t end) {
    mix_rows(y + i * group * depth, depth, s + i * group * size + from, size, group,
             p.rows_of(p.v, kv_head, lists.tokens[i] + from), end - from, depth);
  });
  for (int64_t i = 0; i < count; ++i)
    for (int64_t h = 0; h < group; ++h)
      for (int64_t d = 0; d < depth; ++d)
        store(o + ((begin + i) * p.heads + head + h) * depth + d,
              y[(i * group + h) * depth + d] * inverse[i * group + h]);
}

template <class T>
void forward_t(Context& ctx, const AttentionState& out, const AttentionInputs& in, const Selection& keys) {
  using A = accumulate_t<T>;
  Sparse<T> p(in, keys);
  const int64_t threads = num_threads(), queries = p.queries_per_block(), most = p.expanded_tokens(),
                work_size = padded(
                    p.most_scores() + std::min(kMostQueries, p.tq) * p.group() * (p.depth + 1) + 16, 16),
                tokens_size = most > 0 ? padded(p.most_scores() / p.group(), 16) : 0;
  ScratchScope scratch(ctx.scratch);
  A* const work = scratch.alloc("sparse work", dtype_of<A>::value, {threads, work_size}).template as<A>();
  int32_t* const tokens =
      scratch.alloc("sparse tokens", DType::i32, {threads, tokens_size}).template as<int32_t>();
  T* const k = scratch.alloc("sparse k", in.k.dtype, {p.most_packed()}).template as<T>();
  T* const v = scratch.alloc("sparse v", in.k.dtype, {p.most_packed()}).template as<T>();
  if (ctx.dry_run) return;
  p.check("sparse_attention_forward");
  if (p.packs()) {
    parallel_for(p.tk, 64, [&](int64_t begin, int64_t end) {
      for (int64_t head = 0; head < p.kv_heads; ++head)
        p.pack(k + head * p.tk * p.depth, v + head * p.tk * p.depth, head, begin, end);
    });
    p.read(k, v, p.tk * p.depth);
  }
  A* const z0 = out.z0 ? out.z0.as<A>() : nullptr;
  const int64_t team = p.team(p.tq * p.heads), blocks = (p.tq + queries - 1) / queries;
  // One key/value head after the other, whose rows then stay in caches.
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast <int>(team))
  for (int64_t task = 0; task < blocks * p.kv_heads; ++task) {
    const int64_t me = omp_get_thread_num(), begin = task % blocks * queries;
    forward_block(p, begin, std::min(queries, p.tq - begin), task / blocks, work + me * work_size,
                  tokens + me * tokens_size, out.o.as<T>(), out.lse.as<A>(), z0);
  }
}

// ---- backward ----

/// What a block of queries leaves for the keys of one key/value head.
template <class T>
struct QueryBlock {
  using A = accumulate_t<T>;
  A *q, *d_o;  // (queries, H/Hkv, D)
  A *p, *ds;   // (queries, H/Hkv, row_size): probabilities and score gradients
  A* scaled;   // (queries, H/Hkv, D): q with the scale, then dq
};

template <class T>
struct Backward {
  using A = accumulate_t<T>;
  const Sparse<T>&source, &p;  // p reads packed rows, which `source` has apart
  QueryBlock<T> b;
  const T *d_o, *o;
  const A *lse, *dlse, *coef0;
  T *dq, *dk, *dv;
  A *dk_sum, *dv_sum;      // (Tk, D) of one key/value head
  T *packed_k, *packed_v;  // the same, or empty

  /// Queries [t0 + begin, t0 + end) of the block that begins with t0, of one key/value head: their rows of
  /// dq, and what their keys need.
  void query_pass(const QueryLists<T>& all, int64_t t0, int64_t begin, int64_t end, int64_t kv_head) const {
    const int64_t group = p.group(), size = p.row_size(), depth = p.depth, width = group * depth;
    const auto row_of = [&](int64_t i) { return ((t0 + i) * p.heads + kv_head * group) * depth; };
    for (int64_t i = begin; i < end; ++i) {
      convert_row(b.q + i * width, p.q + row_of(i), width, A(1));
      convert_row(b.scaled + i * width, p.q + row_of(i), width, p.scale);
      convert_row(b.d_o + i * width, d_o + row_of(i), width, A(1));
    }
    all.by_ranges(begin, end, [&](int64_t i, int64_t from, int64_t to) {
      const int32_t* const tokens = all.tokens[i] + from;
      dot_rows(b.ds + i * group * size + from, size, b.d_o + i * width, depth, group,
               p.rows_of(p.v, kv_head, tokens), to - from, depth);
      dot_rows(b.p + i * group * size + from, size, b.scaled + i * width, depth, group,
               p.rows_of(p.k, kv_head, tokens), to - from, depth);
    });
    for (int64_t i = begin; i < end; ++i) {
      score_gradients(t0 + i, i, kv_head, all.tokens[i], all.n[i]);
      std::fill_n(b.scaled + i * width, width, A(0));
    }
    all.by_ranges(begin, end, [&](int64_t i, int64_t from, int64_t to) {
      mix_rows(b.scaled + i * width, depth, b.ds + i * group * size + from, size, group,
               p.rows_of(p.k, kv_head, all.tokens[i] + from), to - from, depth);
    });
    for (int64_t i = begin; i < end; ++i) store_row(dq + row_of(i), b.scaled + i * width, width);
  }

  /// b.p: scores become probabilities; b.ds: gradients of these become gradients of the products.
  void score_gradients(int64_t t, int64_t i, int64_t kv_head, const int32_t* tokens, int64_t n) const {
    const int64_t group = p.group(), size = p.row_size(), depth = p.depth, head = kv_head * group,
                  at = (t * p.heads + head) * depth;
    for (int64_t h = 0; h < group; ++h) {
      const int64_t of = (head + h) * p.tq + t;
      A *const x = b.ds + (i * group + h) * size, *const w = b.p + (i * group + h) * size;
      exp_row(w, n, lse[of]);
      const A delta =
          dot_row<T, A>(d_o + at + h * depth, o + at + h * depth, depth) - (dlse ? dlse[of] : A(0));
#pragma GCC ivdep
      for (int64_t e = 0; e < n; ++e) x[e] = w[e] * (x[e] - delta) * p.scale;
      if (coef0 && tokens[0] == p.first_of(t)) x[0] += coef0[of] * p.scale;
    }
  }

  /// Keys [begin, end) of one key/value head collect from the block's queries.
  void key_pass(const QueryLists<T>& all, int64_t begin, int64_t end) const {
    const int64_t group = p.group(), size = p.row_size(), depth = p.depth;
    for (int64_t i = 0; i < all.count; ++i) {
      const auto [from, to] = all.part(i, begin, end);
      const int32_t* const tokens = all.tokens[i] + from;
      const int64_t of = i * group * size + from, x = i * group * depth;
      scatter_rows(Rows<A>{dv_sum, tokens, depth}, b.p + of, size, b.d_o + x, depth, group, to - from, depth);
      scatter_rows(Rows<A>{dk_sum, tokens, depth}, b.ds + of, size, b.q + x, depth, group, to - from, depth);
    }
  }

  /// Queries [t0, t0 + count) of one key/value head, by a team of threads.
  void block_pass(int64_t t0, int64_t count, int64_t kv_head, int32_t* expanded) const {
    const int64_t threads = omp_get_num_threads(), chunk = (count + threads - 1) / threads,
                  chunks = (count + chunk - 1) / chunk, keys = p.last_of(t0 + count - 1) + 1,
                  range = std::clamp<int64_t>(keys / (4 * threads), 64,
                                              rows_per_range<T>(p.tk, p.most_tokens(), p.depth)),
                  ranges = (keys + range - 1) / range;
    const QueryLists<T> all(p, expanded, p.set_of(kv_head), t0, count);
#pragma omp for schedule(dynamic, 1)
    for (int64_t c = 0; c < chunks; ++c)
      query_pass(all, t0, c * chunk, std::min((c + 1) * chunk, count), kv_head);
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < ranges; ++r) key_pass(all, r * range, (r + 1) * range);
  }

  /// All queries of one key/value head, by a team of threads.
  void head_pass(int64_t kv_head, int64_t queries, int32_t* expanded) const {
    constexpr int64_t kRows = 256;
    const int64_t parts = (p.tk + kRows - 1) / kRows, depth = p.depth;
#pragma omp for schedule(static)
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = part * kRows, end = std::min(begin + kRows, p.tk);
      std::fill(dk_sum + begin * depth, dk_sum + end * depth, A(0));
      std::fill(dv_sum + begin * depth, dv_sum + end * depth, A(0));
      if (p.packs()) source.pack(packed_k, packed_v, kv_head, begin, end);
    }
    for (int64_t t0 = 0; t0 < p.tq; t0 += queries)
      block_pass(t0, std::min(queries, p.tq - t0), kv_head, expanded);
#pragma omp for schedule(static)
    for (int64_t part = 0; part < parts; ++part)
      for (int64_t s = part * kRows; s < std::min((part + 1) * kRows, p.tk); ++s) {
        const int64_t at = (s * p.kv_heads + kv_head) * depth;
        store_row(dk + at, dk_sum + s * depth, depth);
        store_row(dv + at, dv_sum + s * depth, depth);
      }
  }
};

template <class T>
void backward_t(Context& ctx, const AttentionGrads& grads, const Tensor& d_o, const AttentionInputs& in,
                const AttentionState& state, const Selection& keys, const ScoreGrads& of_scores) {
  using A = accumulate_t<T>;
  const Sparse<T> source(in, keys);
  Sparse<T> p = source;
  constexpr DType kSum = dtype_of<A>::value;
  const int64_t queries = p.queries_per_block(), per_head = queries * p.group();
  ScratchScope scratch(ctx.scratch);
  const auto sum = [&](const char* name, int64_t rows, int64_t columns) {
    return scratch.alloc(name, kSum, {rows, columns}).template as<A>();
  };
  QueryBlock<T> b{};
  b.q = sum("sparse q", per_head, p.depth);
  b.d_o = sum("sparse d_o", per_head, p.depth);
  b.scaled = sum("sparse dq", per_head, p.depth);
  b.p = sum("sparse p", per_head, p.row_size());
  b.ds = sum("sparse ds", per_head, p.row_size());
  int32_t* const tokens =
      scratch.alloc("sparse tokens", DType::i32, {num_threads(), queries * p.expanded_tokens()})
          .template as<int32_t>();
  A *const dk_sum = sum("sparse dk", p.tk, p.depth), *const dv_sum = sum("sparse dv", p.tk, p.depth);
  T* const k = scratch.alloc("sparse k", in.k.dtype, {p.packed_size(1)}).template as<T>();
  T* const v = scratch.alloc("sparse v", in.k.dtype, {p.packed_size(1)}).template as<T>();
  if (ctx.dry_run) return;
  p.check("sparse_attention_backward");
  if (p.packs()) p.read(k, v, 0);
  const auto given = [](const Tensor& t) { return t ? t.as<A>() : nullptr; };
  const Backward<T> pass{source,
                         p,
                         b,
                         d_o.as<T>(),
                         state.o.as<T>(),
                         state.lse.as<A>(),
                         given(of_scores.dlse),
                         given(of_scores.coef0),
                         grads.dq.as<T>(),
                         grads.dk.as<T>(),
                         grads.dv.as<T>(),
                         dk_sum,
                         dv_sum,
                         k,
                         v};
#pragma omp parallel num_threads(static_cast <int>(p.team(2 * p.tq * p.heads)))
  // One key/value head after the other, so that its rows and their sums stay in caches.
  for (int64_t kv_head = 0; kv_head < p.kv_heads; ++kv_head)
    pass.head_pass(kv_head, queries, tokens + omp_get_thread_num() * queries * p.expanded_tokens());
}

}  // namespace

void sparse_attention_forward(Context& ctx, const AttentionState& out, const AttentionInputs& in,
                              const Selection& keys) {
  with_storage_type(in.q.dtype, [&](auto t) { forward_t<decltype(t)>(ctx, out, in, keys); });
}

void sparse_attention_backward(Context& ctx, const AttentionGrads& grads, const Tensor& d_o,
                               const AttentionInputs& in, const AttentionState& state, const Selection& keys,
                               const ScoreGrads& of_scores) {
  with_storage_type(in.q.dtype,
                    [&](auto t) { backward_t<decltype(t)>(ctx, grads, d_o, in, state, keys, of_scores); });
}

#include "ops/cpu/isa_end.h"
