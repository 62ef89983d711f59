// Attention over selected keys. Forward takes the queries one by one and reads the selected rows of keys and
// values where they are, for all heads of a group at once. Backward goes through the queries in blocks:
// first, in parallel over queries, probabilities and score gradients, which give dq; then, in parallel over
// ranges of keys, every key collects from the block's queries in ascending order.
#include "ops/sparse_attention.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

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

constexpr int64_t kForwardQueries = 16, kBackwardQueries = 96;

template <class T>
struct Sparse {
  using A = accumulate_t<T>;
  static constexpr int64_t W = Simd<A>::kWidth;
  const T *q, *k, *v;
  const int32_t *first_key, *first, *count;
  int64_t tq, tk, heads, kv_heads, depth, sets, room, block;
  int64_t head_stride, row_stride;  // of k and v
  A scale;

  Sparse(const AttentionInputs& in, const Selection& keys)
      : q(in.q.as<T>()),
        k(in.k.as<T>()),
        v(in.v.as<T>()),
        first_key(in.first_key.as<int32_t>()),
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
  int64_t set_of(int64_t kv_head) const { return kv_head / (kv_heads / sets); }
  int64_t most_tokens() const { return std::min(room * block, tk); }
  int64_t row_size() const { return padded(most_tokens(), W); }

  int64_t tokens_of(int32_t* tokens, int64_t set, int64_t t) const {
    const int64_t row = set * tq + t;
    return expand_blocks(tokens, first + row * room, count[row], block, t + tk - tq);
  }
  void rows_of(const T** rows, const T* base, const int32_t* tokens, int64_t n, int64_t kv_head) const {
    const T* const head = base + kv_head * head_stride;
    for (int64_t e = 0; e < n; ++e) rows[e] = head + tokens[e] * row_stride;
  }
  /// Whether rows are read so often that copies of each head's rows side by side are worth it: few pages,
  /// which fit into caches one head at a time.
  bool packs() const { return kv_heads > 1 && tq * most_tokens() > 2 * tk; }
  int64_t packed_size() const { return packs() ? tk * kv_heads * depth : 0; }
  void pack(T* keys, T* values) {
    parallel_for(tk, 64, [&](int64_t begin, int64_t end) {
      for (int64_t head = 0; head < kv_heads; ++head)
        for (int64_t s = begin; s < end; ++s) {
          const int64_t from = (s * kv_heads + head) * depth, to = (head * tk + s) * depth;
          std::copy_n(k + from, depth, keys + to);
          std::copy_n(v + from, depth, values + to);
        }
    });
    k = keys, v = values, head_stride = tk * depth, row_stride = depth;
  }
  /// Indices of the selection are memory indices.
  void check(const char* op) const {
    for (int64_t row = 0; row < sets * tq; ++row) {
      const int64_t t = row % tq, last = t + tk - tq;
      SLUICE_CHECK(count[row] >= 1 && count[row] <= room, "{}: query {} selects {} blocks of at most {}", op,
                   t, count[row], room);
      for (int64_t i = 0, low = first_key[t]; i < count[row]; ++i) {
        const int64_t s = first[row * room + i];
        SLUICE_CHECK(s >= low && s <= last, "{}: query {} selects key {}, which is not in [{}, {}]", op, t, s,
                     low, last);
        low = s + block;
      }
    }
  }
};

// ---- forward ----

template <class T>
void forward_query(const Sparse<T>& p, int64_t t, int64_t kv_head, accumulate_t<T>* work, const T** rows,
                   int32_t* tokens, T* o, accumulate_t<T>* lse, accumulate_t<T>* z0) {
  using A = accumulate_t<T>;
  const int64_t group = p.group(), size = p.row_size(), depth = p.depth, head = kv_head * group;
  A *const q = work, *const y = q + group * depth, *const inverse = y + group * depth,
           *const s = inverse + group;
  const int64_t n = p.tokens_of(tokens, p.set_of(kv_head), t);
  convert_row(q, p.q + (t * p.heads + head) * depth, group * depth, p.scale);
  p.rows_of(rows, p.k, tokens, n, kv_head);
  dot_rows(s, size, q, depth, group, rows, n, depth);
  for (int64_t h = 0; h < group; ++h) {
    A* const row = s + h * size;
    const A m = *std::max_element(row, row + n);
    const int64_t at = (head + h) * p.tq + t;
    if (z0) z0[at] = tokens[0] == p.first_key[t] ? row[0] : static_cast<A>(kNotSelected);
    const A l = exp_row(row, n, m);
    lse[at] = m + std::log(l);
    inverse[h] = A(1) / l;
  }
  p.rows_of(rows, p.v, tokens, n, kv_head);
  mix_rows(y, depth, s, size, group, rows, n, depth);
  for (int64_t h = 0; h < group; ++h)
    for (int64_t d = 0; d < depth; ++d)
      store(o + (t * p.heads + head + h) * depth + d, y[h * depth + d] * inverse[h]);
}

template <class T>
void forward_t(Context& ctx, const AttentionState& out, const AttentionInputs& in, const Selection& keys) {
  using A = accumulate_t<T>;
  Sparse<T> p(in, keys);
  const int64_t threads = num_threads(), most = p.most_tokens(),
                work_size = padded(p.group() * (2 * p.depth + 1 + p.row_size()), 16);
  ScratchScope scratch(ctx.scratch);
  A* const work = scratch.alloc("sparse work", dtype_of<A>::value, {threads, work_size}).template as<A>();
  double* const rows = scratch.alloc("sparse rows", DType::f64, {threads, most}).template as<double>();
  int32_t* const tokens = scratch.alloc("sparse tokens", DType::i32, {threads, most}).template as<int32_t>();
  T* const k = scratch.alloc("sparse k", in.k.dtype, {p.packed_size()}).template as<T>();
  T* const v = scratch.alloc("sparse v", in.k.dtype, {p.packed_size()}).template as<T>();
  if (ctx.dry_run) return;
  static_assert(sizeof(double) == sizeof(const T*));
  p.check("sparse_attention_forward");
  if (p.packs()) p.pack(k, v);
  A* const z0 = out.z0 ? out.z0.as<A>() : nullptr;
  const int64_t team = std::clamp<int64_t>(p.tq * p.heads * most * p.depth / 500000, 1, threads),
                blocks = (p.tq + kForwardQueries - 1) / kForwardQueries;
  // One key/value head after the other, whose rows then stay in caches.
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast <int>(team))
  for (int64_t task = 0; task < blocks * p.kv_heads; ++task) {
    const int64_t me = omp_get_thread_num(), begin = task % blocks * kForwardQueries;
    for (int64_t t = begin; t < std::min(begin + kForwardQueries, p.tq); ++t)
      forward_query(p, t, task / blocks, work + me * work_size, reinterpret_cast<const T**>(rows + me * most),
                    tokens + me * most, out.o.as<T>(), out.lse.as<A>(), z0);
  }
}

// ---- backward ----

/// Memory of a block of queries: their rows, probabilities and score gradients, their tokens, and, by key,
/// which of them selected it.
template <class T>
struct QueryBlock {
  using A = accumulate_t<T>;
  A *q, *d_o, *p,
      *ds;  // of one key/value head: (queries, H/Hkv, D), the same, (queries, H/Hkv, row_size), the same
  int32_t *tokens, *n;  // (queries, G, most), (queries, G)
  int32_t* begin;       // (G, Tk + 1): where the entries of a key begin
  int32_t *query,
      *at;  // (G, queries x most): an entry's query in the block, and its place in the query's list
};

template <class T>
struct Backward {
  using A = accumulate_t<T>;
  const Sparse<T>& p;
  QueryBlock<T> b;
  int64_t queries;  // room of a block
  const T *d_o, *o;
  const A *lse, *dlse, *coef0;
  T* dq;
  A *dk_sum, *dv_sum;  // (Tk, Hkv, D)

  /// Query t, the i-th of the block, of one key/value head: its row of dq, and what its keys need.
  void query_pass(int64_t t, int64_t i, int64_t kv_head, A* work, const T** rows) const {
    const int64_t group = p.group(), size = p.row_size(), depth = p.depth, head = kv_head * group;
    const int64_t set = p.set_of(kv_head), most = p.most_tokens(), at = (t * p.heads + head) * depth;
    const int32_t* const tokens = b.tokens + (i * p.sets + set) * most;
    const int64_t n = b.n[i * p.sets + set];
    A *const q = b.q + i * group * depth, *const g = b.d_o + i * group * depth;
    A *const pr = b.p + i * group * size, *const ds = b.ds + i * group * size;
    A *const scaled = work, *const y = work + group * depth;
    convert_row(q, p.q + at, group * depth, A(1));
    convert_row(scaled, p.q + at, group * depth, p.scale);
    convert_row(g, d_o + at, group * depth, A(1));
    p.rows_of(rows, p.v, tokens, n, kv_head);
    dot_rows(ds, size, g, depth, group, rows, n, depth);
    p.rows_of(rows, p.k, tokens, n, kv_head);
    dot_rows(pr, size, scaled, depth, group, rows, n, depth);
    for (int64_t h = 0; h < group; ++h) {
      const int64_t of = (head + h) * p.tq + t;
      exp_row(pr + h * size, n, lse[of]);
      const A delta =
          dot_row<T, A>(d_o + at + h * depth, o + at + h * depth, depth) - (dlse ? dlse[of] : A(0));
      A *const x = ds + h * size, *const w = pr + h * size;
#pragma GCC ivdep
      for (int64_t e = 0; e < n; ++e) x[e] = w[e] * (x[e] - delta) * p.scale;
      if (coef0 && tokens[0] == p.first_key[t]) x[0] += coef0[of] * p.scale;
    }
    mix_rows(y, depth, ds, size, group, rows, n, depth);
    for (int64_t c = 0; c < group * depth; ++c) store(dq + at + c, y[c]);
  }

  /// By key, the entries of `here` queries of one set, in ascending order of queries.
  void invert(int64_t here, int64_t set) const {
    const int64_t most = p.most_tokens();
    int32_t* const begin = b.begin + set * (p.tk + 2);
    std::fill_n(begin, p.tk + 2, 0);
    const auto each = [&](auto&& f) {
      for (int64_t i = 0; i < here; ++i) {
        const int32_t* const tokens = b.tokens + (i * p.sets + set) * most;
        for (int64_t e = 0; e < b.n[i * p.sets + set]; ++e) f(i, e, tokens[e]);
      }
    };
    each([&](int64_t, int64_t, int32_t s) { ++begin[s + 2]; });
    for (int64_t s = 2; s < p.tk + 2; ++s) begin[s] += begin[s - 1];
    int32_t *const query = b.query + set * queries * most, *const at = b.at + set * queries * most;
    each([&](int64_t i, int64_t e, int32_t s) {
      query[begin[s + 1]] = static_cast<int32_t>(i);
      at[begin[s + 1]++] = static_cast<int32_t>(e);
    });
  }

  /// Keys [begin, end) of one key/value head collect from the block's queries.
  void key_pass(int64_t kv_head, int64_t begin, int64_t end) const {
    const int64_t group = p.group(), size = p.row_size(), depth = p.depth;
    const int64_t set = p.set_of(kv_head), list = set * queries * p.most_tokens();
    Part<A> of_v[kBackwardQueries], of_k[kBackwardQueries];
    for (int64_t s = begin; s < end; ++s) {
      const int64_t from = list + b.begin[set * (p.tk + 2) + s];
      const int64_t count = list + b.begin[set * (p.tk + 2) + s + 1] - from;
      if (count == 0) continue;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t first_head = b.query[from + i] * group, e = b.at[from + i];
        of_v[i] = {b.p + first_head * size + e, b.d_o + first_head * depth};
        of_k[i] = {b.ds + first_head * size + e, b.q + first_head * depth};
      }
      const int64_t at = (s * p.kv_heads + kv_head) * depth;
      add_parts(dv_sum + at, of_v, count, size, depth, group, depth);
      add_parts(dk_sum + at, of_k, count, size, depth, group, depth);
    }
  }
};

template <class T>
void backward_t(Context& ctx, const AttentionGrads& grads, const Tensor& d_o, const AttentionInputs& in,
                const AttentionState& state, const Selection& keys, const ScoreGrads& of_scores) {
  using A = accumulate_t<T>;
  Sparse<T> p(in, keys);
  constexpr DType kSum = dtype_of<A>::value;
  constexpr bool kInPlace = std::is_same_v<T, A>;
  const int64_t threads = num_threads(), most = p.most_tokens(), size = p.row_size(),
                queries = std::min(kBackwardQueries, p.tq), per_head = queries * p.group(),
                elements = p.tk * p.kv_heads * p.depth;
  ScratchScope scratch(ctx.scratch);
  const auto sum = [&](const char* name, int64_t rows, int64_t columns) {
    return scratch.alloc(name, kSum, {rows, columns}).template as<A>();
  };
  const auto integers = [&](const char* name, int64_t rows, int64_t columns) {
    return scratch.alloc(name, DType::i32, {rows, columns}).template as<int32_t>();
  };
  QueryBlock<T> b{};
  b.q = sum("sparse q", per_head, p.depth);
  b.d_o = sum("sparse d_o", per_head, p.depth);
  b.p = sum("sparse p", per_head, size);
  b.ds = sum("sparse ds", per_head, size);
  b.tokens = integers("sparse tokens", queries * p.sets, most);
  b.n = integers("sparse counts", queries, p.sets);
  b.begin = integers("sparse keys", p.sets, p.tk + 2);
  b.query = integers("sparse queries", p.sets * queries, most);
  b.at = integers("sparse places", p.sets * queries, most);
  const int64_t work_size = padded(2 * p.group() * p.depth, 16);
  A* const work = sum("sparse work", threads, work_size);
  double* const rows = scratch.alloc("sparse rows", DType::f64, {threads, most}).template as<double>();
  A *dk_sum = sum("sparse dk", 1, kInPlace ? 0 : elements),
    *dv_sum = sum("sparse dv", 1, kInPlace ? 0 : elements);
  T* const k = scratch.alloc("sparse k", in.k.dtype, {p.packed_size()}).template as<T>();
  T* const v = scratch.alloc("sparse v", in.k.dtype, {p.packed_size()}).template as<T>();
  if (ctx.dry_run) return;
  p.check("sparse_attention_backward");
  if (p.packs()) p.pack(k, v);
  if constexpr (kInPlace) dk_sum = grads.dk.as<A>(), dv_sum = grads.dv.as<A>();
  std::fill_n(dk_sum, elements, A(0));
  std::fill_n(dv_sum, elements, A(0));
  const Backward<T> pass{p,
                         b,
                         queries,
                         d_o.as<T>(),
                         state.o.as<T>(),
                         state.lse.as<A>(),
                         of_scores.dlse ? of_scores.dlse.as<A>() : nullptr,
                         of_scores.coef0 ? of_scores.coef0.as<A>() : nullptr,
                         grads.dq.as<T>(),
                         dk_sum,
                         dv_sum};
  const int64_t parts = key_parts(1);
  const int64_t team = std::clamp<int64_t>(2 * p.tq * p.heads * most * p.depth / 500000, 1, threads);
#pragma omp parallel num_threads(static_cast <int>(team))
  {
    const int64_t me = omp_get_thread_num();
    for (int64_t t0 = 0; t0 < p.tq; t0 += queries) {
      const int64_t here = std::min(queries, p.tq - t0), t1 = t0 + here;
#pragma omp for schedule(static)
      for (int64_t i = 0; i < here * p.sets; ++i)
        b.n[i] = static_cast<int32_t>(p.tokens_of(b.tokens + i * most, i % p.sets, t0 + i / p.sets));
#pragma omp for schedule(dynamic, 1) nowait
      for (int64_t set = 0; set < p.sets; ++set) pass.invert(here, set);
      // One key/value head after the other, so that what the queries leave stays in caches.
      for (int64_t kv_head = 0; kv_head < p.kv_heads; ++kv_head) {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < here; ++i)
          pass.query_pass(t0 + i, i, kv_head, work + me * work_size,
                          reinterpret_cast<const T**>(rows + me * most));
#pragma omp for schedule(dynamic, 1)
        for (int64_t part = 0; part < parts; ++part)
          pass.key_pass(kv_head, t1 * part / parts, t1 * (part + 1) / parts);
      }
    }
  }
  if constexpr (!kInPlace)
    parallel_for(elements, 4096, [&](int64_t begin, int64_t end) {
      store_row(grads.dk.as<T>() + begin, dk_sum + begin, end - begin);
      store_row(grads.dv.as<T>() + begin, dv_sum + begin, end - begin);
    });
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
