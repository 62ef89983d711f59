// The indexer's loss on a CPU, for a block of queries at a time: in parallel over queries the target, the
// indexer's distribution and the gradients of their own tensors; then, in parallel over ranges of keys, the
// keys collect from the block's queries in ascending order.
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
#include "ops/indexer.h"

// In this order.
// clang-format off
#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"
#include "ops/cpu/vectors.h"
#include "ops/cpu/attention_blocks.h"
#include "ops/cpu/gathered_rows.h"
#include "ops/cpu/index_scores.h"
// clang-format on

namespace {

template <class T>
struct LossProblem {
  using A = accumulate_t<T>;
  static constexpr int64_t W = Simd<A>::kWidth;
  Index<T> index;
  const T *q, *k;  // of attention
  const A* lse;
  const int32_t *targets, *first, *count;  // first, count: nullptr for all candidates
  int64_t heads, kv_heads, depth, room;
  A scale, temperature, weight;

  LossProblem(const IndexInputs& in, const IndexTarget& target, const Selection* selection)
      : index(in),
        q(target.q.as<T>()),
        k(target.k.as<T>()),
        lse(target.lse.as<A>()),
        targets(target.targets.as<int32_t>()),
        first(selection ? selection->first.as<int32_t>() : nullptr),
        count(selection ? selection->count.as<int32_t>() : nullptr),
        heads(target.q.dim(1)),
        kv_heads(target.k.dim(1)),
        depth(target.q.dim(2)),
        room(selection ? selection->first.dim(2) : index.most_candidates()),
        scale(static_cast<A>(target.scale)),
        temperature(1),
        weight(0) {}
  int64_t group() const { return heads / kv_heads; }
  int64_t row_size() const { return padded(room, W); }
  int64_t token_size() const { return padded(std::min(room * index.block, index.tk), W); }

  /// The scored blocks of a query, by their first tokens; returns their number.
  int64_t blocks_of(int32_t* starts, int64_t set, int64_t t) const {
    if (!first) {
      const int64_t n = index.candidates(t);
      for (int64_t i = 0; i < n; ++i) starts[i] = static_cast<int32_t>(index.first(t) + i * index.block);
      return n;
    }
    const int64_t row = set * index.tq + t, n = count[row] - (index.block > 1);
    std::copy_n(first + row * room, n, starts);
    return n;
  }
};

/// Memory of a thread.
template <class T>
struct LossWork {
  using A = accumulate_t<T>;
  A *q, *index_q, *dq, *attention, *target, *score;
  int32_t* tokens;
  static int64_t size(const LossProblem<T>& p) {
    return padded(p.group() * p.depth, 16) + 2 * padded(p.index.per_set() * p.index.depth, 16) +
           p.group() * p.token_size() + 2 * p.row_size() + 64;
  }
  LossWork(A* work, int32_t* list, const LossProblem<T>& p) : tokens(list) {
    q = work;
    index_q = q + padded(p.group() * p.depth, 16);
    dq = index_q + padded(p.index.per_set() * p.index.depth, 16);
    attention = dq + padded(p.index.per_set() * p.index.depth, 16);
    target = attention + p.group() * p.token_size();
    score = target + p.row_size();
  }
};

/// What a block of queries leaves for its keys, and sums by query.
template <class T>
struct LossBlock {
  using A = accumulate_t<T>;
  A* du;                // (queries, J, row_size): gradients of the products u, 0 entries: none
  int32_t *starts, *n;  // (queries, G, row_size), (queries, G)
  double *kl, *dlog;    // (G, Tq); kl < 0: not counted
  A *dbias, *dw;        // (Tq, J)
};

/// target[e]: the mean over the set's heads of attention on the e-th block, and their sum over blocks.
template <class T>
accumulate_t<T> attention_on(const LossProblem<T>& p, const LossWork<T>& w, int64_t set, int64_t t,
                             const int32_t* starts, int64_t n) {
  using A = accumulate_t<T>;
  const int64_t per_set = p.kv_heads / p.index.sets, group = p.group(), size = p.token_size(),
                b = p.index.block;
  const int64_t tokens = expand_blocks(w.tokens, starts, n, b, p.index.last(t));
  std::fill_n(w.target, n, A(0));
  for (int64_t kv_head = set * per_set; kv_head < (set + 1) * per_set; ++kv_head) {
    convert_row(w.q, p.q + (t * p.heads + kv_head * group) * p.depth, group * p.depth, p.scale);
    const Rows<const T> rows{p.k + kv_head * p.depth, w.tokens, p.kv_heads * p.depth};
    dot_rows(w.attention, size, w.q, p.depth, group, rows, tokens, p.depth);
    for (int64_t h = 0; h < group; ++h) {
      A* const row = w.attention + h * size;
      exp_row(row, tokens, p.lse[(kv_head * group + h) * p.index.tq + t]);
      if (b == 1)
        for (int64_t e = 0; e < n; ++e) w.target[e] += row[e];
      else
        for (int64_t e = 0; e < tokens; ++e) w.target[e / b] += row[e];
    }
  }
  A sum = 0;
  const A share = A(1) / static_cast<A>(per_set * group);
  for (int64_t e = 0; e < n; ++e) w.target[e] *= share, sum += w.target[e];
  return sum;
}

/// What an index head makes of its products, and its slope.
template <class A>
struct Activated {
  Vec<A> value, slope;
};
template <class A>
inline Activated<A> activate(IndexActivation activation, Vec<A> u) {
  if (activation == IndexActivation::sigmoid) {
    const Vec<A> value = sigmoid_vec<A>(u);
    return {value, value * (A(1) - value)};
  }
  return {u > A(0) ? u : Vec<A>{}, u > A(0) ? splat(A(1)) : Vec<A>{}};
}

/// score[e] = I of the e-th block; u (J/G, row_size) becomes the products, 0 from n on.
template <class T>
void index_scores_of(const LossProblem<T>& p, const LossWork<T>& w, accumulate_t<T>* u, int64_t set,
                     int64_t t, const int32_t* starts, int64_t n) {
  using A = accumulate_t<T>;
  constexpr int64_t W = LossProblem<T>::W;
  const Index<T>& x = p.index;
  const int64_t per_set = x.per_set(), head0 = set * per_set, size = p.row_size();
  convert_row(w.index_q, x.q + (t * x.heads + head0) * x.depth, per_set * x.depth, x.scale);
  dot_rows(u, size, w.index_q, x.depth, per_set, Rows<const T>{x.k, starts, x.depth}, n, x.depth);
  std::fill_n(w.score, padded(n, W), A(0));
  for (int64_t j = 0; j < per_set; ++j) {
    const A bias = x.bias_of(head0 + j), weight = x.head_weight(t, head0 + j);
    A* const row = u + j * size;
    std::fill(row + n, row + padded(n, W), A(0));
    for (int64_t e = 0; e < n; e += W) {
      const Vec<A> y = load_vec(row + e) + bias;
      store_vec(row + e, y);
      store_vec(w.score + e, load_vec(w.score + e) + weight * activate<A>(x.activation, y).value);
    }
  }
}

/// score becomes dI from the scores and the target, whose sum is `mass`, 0 from n on; KL and dlog_temperature
/// by reference.
template <class A>
void divergence(A* score, A* target, int64_t n, A mass, A temperature, double& kl, double& dlog) {
  constexpr int64_t W = Simd<A>::kWidth;
  const A top = largest_of(score, n) * temperature, inverse = A(1) / mass;
  std::fill(score + n, score + padded(n, W), A(-1e30) / temperature);
  std::fill(target + n, target + padded(n, W), A(0));
  Vec<A> sum{}, divergences{}, slopes{};
  for (int64_t e = 0; e < n; e += W) sum += exp_vec(load_vec(score + e) * temperature - top);
  const A lse = top + std::log(sum_lanes<A>(sum));
  for (int64_t e = 0; e < n; e += W) {
    const Vec<A> scaled = load_vec(score + e) * temperature, log_pi = scaled - lse,
                 p = load_vec(target + e) * inverse, difference = exp_vec(log_pi) - p;
    divergences += p * (log_vec(clamp_low(p, A(1e-37))) - log_pi);
    slopes += difference * scaled;
    store_vec(score + e, difference * temperature);
  }
  kl += static_cast<double>(sum_lanes<A>(divergences));
  dlog += static_cast<double>(sum_lanes<A>(slopes));
}

/// Gradients of index head `head` from dI in w.score: u becomes those of its products; db and dw (1) are
/// written.
template <class T>
void head_gradients(const LossProblem<T>& p, const LossWork<T>& w, accumulate_t<T>* u, int64_t t,
                    int64_t head, int64_t n, accumulate_t<T>& db, accumulate_t<T>& dw) {
  using A = accumulate_t<T>;
  const A weight = p.index.head_weight(t, head);
  Vec<A> dweight{}, dbias{};
  for (int64_t e = 0; e < n; e += LossProblem<T>::W) {
    const Activated<A> y = activate<A>(p.index.activation, load_vec(u + e));
    const Vec<A> d = load_vec(w.score + e) * p.weight, du = d * weight * y.slope;
    dweight += d * y.value;
    dbias += du;
    store_vec(u + e, du);
  }
  const A sum = sum_lanes<A>(dweight);
  db = sum_lanes<A>(dbias);
  dw = p.index.head_weights == IndexHeadWeights::sigmoid ? sum * weight * (1 - weight) : sum;
}

/// All of query t, the i-th of the block, and one set.
template <class T>
void loss_query(const LossProblem<T>& p, const LossWork<T>& w, const LossBlock<T>& b, int64_t set, int64_t t,
                int64_t i, T* dq) {
  using A = accumulate_t<T>;
  const Index<T>& x = p.index;
  const int64_t per_set = x.per_set(), head0 = set * per_set, size = p.row_size(), at = t * x.heads + head0;
  int32_t* const starts = b.starts + (i * x.sets + set) * size;
  int64_t n = p.targets[t] < 0 ? 0 : p.blocks_of(starts, set, t);
  A* const u = b.du + (i * x.heads + head0) * size;
  const A mass = n > 0 ? attention_on(p, w, set, t, starts, n) : A(0);
  if (!(mass > A(1e-20))) n = 0;
  b.n[i * x.sets + set] = static_cast<int32_t>(n);
  double kl = 0, dlog = 0;
  if (n > 0) {
    index_scores_of(p, w, u, set, t, starts, n);
    divergence(w.score, w.target, n, mass, p.temperature, kl, dlog);
  }
  b.kl[set * x.tq + t] = p.targets[t] < 0 ? -1 : std::max(kl, 0.0);
  b.dlog[set * x.tq + t] = dlog * static_cast<double>(p.weight);
  for (int64_t j = 0; j < per_set; ++j)
    head_gradients(p, w, u + j * size, t, head0 + j, n, b.dbias[at + j], b.dw[at + j]);
  std::fill_n(w.dq, per_set * x.depth, A(0));
  mix_rows(w.dq, x.depth, u, size, per_set, Rows<const T>{x.k, starts, x.depth}, n, x.depth);
  for (int64_t c = 0; c < per_set * x.depth; ++c) store(dq + at * x.depth + c, w.dq[c] * x.scale);
}

/// Keys [begin, end) collect from the block's queries; q: (queries, J, d) scaled.
template <class T>
void loss_keys(const LossProblem<T>& p, const LossBlock<T>& b, int64_t queries, const accumulate_t<T>* q,
               int64_t begin, int64_t end, accumulate_t<T>* dk) {
  const Index<T>& x = p.index;
  const int64_t per_set = x.per_set(), size = p.row_size();
  for (int64_t i = 0; i < queries; ++i)
    for (int64_t set = 0; set < x.sets; ++set) {
      const int32_t* const starts = b.starts + (i * x.sets + set) * size;
      const int32_t* const stop = starts + b.n[i * x.sets + set];
      const int64_t head = i * x.heads + set * per_set;
      const int32_t *const from = std::lower_bound(starts, stop, begin), *const to = std::lower_bound(
                                                                             from, stop, end);
      scatter_rows(Rows<accumulate_t<T>>{dk, from, x.depth}, b.du + head * size + (from - starts), size,
                   q + head * x.depth, x.depth, per_set, to - from, x.depth);
    }
}

/// Column sums of rows (T, n) in double and in order, added to y (n).
template <class A>
void add_columns(Tensor y, const A* rows, int64_t tokens) {
  if (!y) return;
  const int64_t n = y.numel();
  for (int64_t j = 0; j < n; ++j) {
    double sum = 0;
    for (int64_t t = 0; t < tokens; ++t) sum += static_cast<double>(rows[t * n + j]);
    y.as<A>()[j] += static_cast<A>(sum);
  }
}

template <class T>
void index_loss_t(Context& ctx, const IndexGrads& grads, Tensor sums, const IndexInputs& in,
                  const IndexTarget& target, const Selection* selection, const IndexLoss& loss) {
  using A = accumulate_t<T>;
  constexpr DType kSum = dtype_of<A>::value;
  LossProblem<T> p(in, target, selection);
  const Index<T>& x = p.index;
  const int64_t threads = num_threads(), size = p.row_size(), most = p.token_size();
  // Fewer queries at a time where their scores are many.
  const int64_t queries =
      std::clamp<int64_t>((int64_t{1} << 22) / (x.heads * size), 4, std::min<int64_t>(32, x.tq + 3));
  ScratchScope scratch(ctx.scratch);
  const auto sum = [&](const char* name, int64_t rows, int64_t columns) {
    return scratch.alloc(name, kSum, {rows, columns}).template as<A>();
  };
  LossBlock<T> b{};
  b.du = sum("index du", queries * x.heads, size);
  b.dbias = sum("index dbias", x.tq, x.heads);
  b.dw = sum("index dw", x.tq, x.heads);
  A* const q = sum("index q", queries * x.heads, x.depth);
  A* dk = sum("index dk", x.tk, x.depth);
  const int64_t work_size = padded(LossWork<T>::size(p), 16);
  A* const work = sum("index work", threads, work_size);
  b.starts = scratch.alloc("index starts", DType::i32, {queries * x.sets, size}).template as<int32_t>();
  b.n = scratch.alloc("index counts", DType::i32, {queries, x.sets}).template as<int32_t>();
  b.kl = scratch.alloc("index kl", DType::f64, {x.sets, x.tq}).template as<double>();
  b.dlog = scratch.alloc("index dlog", DType::f64, {x.sets, x.tq}).template as<double>();
  int32_t* const tokens = scratch.alloc("index tokens", DType::i32, {threads, most}).template as<int32_t>();
  if (ctx.dry_run) return;
  x.check_first_keys("index_loss");
  p.temperature = loss.log_temperature ? std::exp(static_cast<A>(load(loss.log_temperature.as<T>())))
                                       : static_cast<A>(loss.temperature);
  p.weight = static_cast<A>(loss.coefficient * *loss.gradient_scale.as<double>());

  std::fill_n(dk, x.tk * x.depth, A(0));
  // How many parts the keys are cut into keeps every thread busy; bits do not depend on it.
  const int64_t parts = std::clamp<int64_t>(4 * threads, 1, 64);
  const int64_t team = std::clamp<int64_t>(x.tq * p.heads * most * p.depth / 500000, 1, threads);
#pragma omp parallel num_threads(static_cast <int>(team))
  {
    const int64_t me = omp_get_thread_num();
    const LossWork<T> w(work + me * work_size, tokens + me * most, p);
    for (int64_t t0 = 0; t0 < x.tq; t0 += queries) {
      const int64_t here = std::min(queries, x.tq - t0);
#pragma omp for schedule(dynamic, 1)
      for (int64_t task = 0; task < here * x.sets; ++task) {
        const int64_t i = here - 1 - task / x.sets, set = task % x.sets;
        if (set == 0)
          convert_row(q + i * x.heads * x.depth, x.q + (t0 + i) * x.heads * x.depth, x.heads * x.depth,
                      x.scale);
        loss_query(p, w, b, set, t0 + i, i, grads.dq.as<T>());
      }
      // Early keys have as many queries as late ones within a block, but for its own tokens.
      const int64_t keys = x.last(t0 + here - 1) + 1;
#pragma omp for schedule(dynamic, 1)
      for (int64_t part = 0; part < parts; ++part)
        loss_keys(p, b, here, q, keys * part / parts, keys * (part + 1) / parts, dk);
    }
  }
  store_row(grads.dk.as<T>(), dk, x.tk * x.depth);
  if (grads.dw) store_row(grads.dw.as<T>(), b.dw, x.tq * x.heads);
  add_columns(grads.dbias, b.dbias, x.tq);
  add_columns(grads.dw_bias, b.dw, x.tq);
  double kl = 0, dlog = 0, counted = 0;
  for (int64_t row = 0; row < x.sets * x.tq; ++row) {
    dlog += b.dlog[row];
    if (b.kl[row] >= 0) kl += b.kl[row], counted += 1;
  }
  if (loss.log_temperature) grads.dlog_temperature.as<A>()[0] += static_cast<A>(dlog);
  if (!sums) return;
  sums.as<double>()[kIndexLoss] += kl;
  sums.as<double>()[kIndexCounted] += counted;
}

}  // namespace

void index_loss(Context& ctx, const IndexGrads& grads, Tensor sums, const IndexInputs& in,
                const IndexTarget& target, const Selection* selection, const IndexLoss& loss) {
  with_storage_type(
      in.q.dtype, [&](auto t) { index_loss_t<decltype(t)>(ctx, grads, sums, in, target, selection, loss); });
}

#include "ops/cpu/isa_end.h"
