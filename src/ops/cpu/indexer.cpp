// The indexer on a CPU: scores of 32 queries at a time with all of their candidates, selection, block means.
// The loss: index_loss.cpp.
#include "ops/indexer.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/parallel_for.h"
#include "core/targets.h"

// In this order.
// clang-format off
#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"
#include "ops/cpu/vectors.h"
#include "ops/cpu/attention_blocks.h"
#include "ops/cpu/gathered_rows.h"
#include "ops/cpu/index_scores.h"
#include "ops/cpu/largest.h"
// clang-format on

namespace {

double value_of(const Tensor& t) {
  double x = 0;
  if (t)
    with_storage_type(t.dtype, [&](auto kind) { x = static_cast<double>(load(t.as<decltype(kind)>())); });
  return x;
}

/// Population variance, in double and in order.
template <class A>
double variance_of(const A* x, int64_t n) {
  double mean = 0, squares = 0;
  for (int64_t i = 0; i < n; ++i) mean += static_cast<double>(x[i]);
  mean /= static_cast<double>(n);
  for (int64_t i = 0; i < n; ++i)
    squares += (static_cast<double>(x[i]) - mean) * (static_cast<double>(x[i]) - mean);
  return std::isfinite(squares) ? squares / static_cast<double>(n) : std::numeric_limits<double>::infinity();
}

/// Of softmax(x), in nats.
template <class A>
double entropy_of(const A* x, int64_t n) {
  const double top = static_cast<double>(*std::max_element(x, x + n));
  if (std::isinf(top)) return 0;
  double sum = 0, weighted = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double z = static_cast<double>(x[i]) - top, e = std::exp(z);
    sum += e, weighted += e > 0 ? e * z : 0;
  }
  return std::log(sum) - weighted / sum;
}

/// How many of n > 0 candidates (ops/indexer.h, Budget).
template <class A>
int64_t budget_of(const Budget& b, double mean_variance, double variance, const A* scores, int64_t n) {
  const double base = static_cast<double>(b.base);
  const bool known = mean_variance > 0;
  double k = base;
  switch (b.policy) {
    case BudgetPolicy::fixed:
      return std::min(b.base, n);
    case BudgetPolicy::eq8:
      if (known) k = base * variance / mean_variance;
      break;
    case BudgetPolicy::inverse:
      if (known) k = base * mean_variance / std::max(variance, 1e-30);
      break;
    case BudgetPolicy::code:
      if (known) k = base * (0.5 + 1 / (1 + b.temperature * variance / mean_variance));
      break;
    case BudgetPolicy::entropy:
      k = base * (0.5 + b.temperature * entropy_of(scores, n) / std::log(static_cast<double>(n) + 1));
      break;
  }
  const double low = static_cast<double>(b.min), high = static_cast<double>(b.max);
  return std::min(static_cast<int64_t>(std::clamp(std::floor(k), low, high)), n);
}

template <class T>
void select_t(Context& ctx, const Selection& out, const IndexInputs& in, const Budget& budget,
              const Tensor& mean_variance, Tensor sums, const char* where, const Tensor& targets) {
  using A = accumulate_t<T>;
  const Index<T> p(in);
  const int64_t threads = num_threads(), work_size = padded(ScoreWork<T>::size(p), 16),
                most = padded(p.most_candidates(), 16) + 16, room = out.first.dim(2);
  ScratchScope scratch(ctx.scratch);
  A* const work = scratch.alloc("index work", dtype_of<A>::value, {threads, work_size}).template as<A>();
  A* const order = scratch.alloc("index order", dtype_of<A>::value, {threads, 2, most}).template as<A>();
  int32_t* const places =
      scratch.alloc("index places", DType::i32, {threads, 2, most}).template as<int32_t>();
  double* const variances = scratch.alloc("index variance", DType::f64, {p.sets, p.tq}).template as<double>();
  if (ctx.dry_run) return;
  p.check_first_keys("select_keys");
  const double mean = value_of(mean_variance);
  int32_t *const first = out.first.as<int32_t>(), *const count = out.count.as<int32_t>();
  std::atomic<bool> not_a_number = false;

  const auto select_query = [&](int64_t set, int64_t t, const A* scores, const ChoiceWork<A>& choice) {
    const int64_t n = p.candidates(t), row = set * p.tq + t;
    int32_t* const chosen = first + row * room;
    const auto first_of_t = static_cast<int32_t>(p.first(t));
    variances[row] = 0;
    int64_t k = 0;
    if (n > 0) {
      if (has_nan(scores, n)) {
        not_a_number = true;
        return;
      }
      if (budget.needs_variance()) variances[row] = variance_of(scores, n);
      k = budget_of(budget, mean, variances[row], scores, n);
    }
    if (k < n) {
      const bool self = budget.force_self && p.block == 1;
      if (k > self) largest(chosen, scores, n - self, k - self, choice);
      if (self) chosen[k - 1] = static_cast<int32_t>(n - 1);
      for (int64_t i = 0; i < k; ++i) chosen[i] = first_of_t + chosen[i] * static_cast<int32_t>(p.block);
    } else {
      for (int64_t i = 0; i < n; ++i) chosen[i] = static_cast<int32_t>(first_of_t + i * p.block);
    }
    if (p.block > 1) chosen[k++] = static_cast<int32_t>(first_of_t + n * p.block);
    count[row] = static_cast<int32_t>(k);
  };

  const int64_t blocks = (p.tq + kScoreQueries - 1) / kScoreQueries;
  const int64_t team = std::clamp<int64_t>(p.tq * p.tk / p.block * p.heads * p.depth / 500000, 1, threads);
  const auto choice_of = [&](int64_t me) {
    return ChoiceWork<A>{order + 2 * me * most, places + 2 * me * most, order + (2 * me + 1) * most,
                         places + (2 * me + 1) * most};
  };
  /// Calls f(set, t0, count) for the queries of a task, together where they have one first key.
  const auto for_queries = [&](int64_t task, const auto& f) {
    const int64_t set = task % p.sets, begin = (blocks - 1 - task / p.sets) * kScoreQueries,
                  end = std::min(begin + kScoreQueries, p.tq);
    for (int64_t t0 = begin, t1 = begin; t0 < end; t0 = t1) {
      while (t1 < end && p.first(t1) == p.first(t0)) ++t1;
      f(set, t0, t1 - t0);
    }
  };
  const int64_t tasks = blocks * p.sets;
  if (tasks >= team) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast <int>(team))
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t me = omp_get_thread_num();
      const ScoreWork<T> w(work + me * work_size, p);
      for_queries(task, [&](int64_t set, int64_t t0, int64_t queries) {
        QueryScores<T>(p, w, set, t0, queries).write(w.scores, 0, p.candidates(t0 + queries - 1));
        for (int64_t t = t0; t < t0 + queries; ++t)
          select_query(set, t, w.scores + (t - t0) * w.row, choice_of(me));
      });
    }
  } else {  // few queries: threads share their candidates
    for (int64_t task = 0; task < tasks; ++task)
      for_queries(task, [&](int64_t set, int64_t t0, int64_t queries) {
        const ScoreWork<T> all(work, p);
        const int64_t n = p.candidates(t0 + queries - 1), part = padded((n + team - 1) / team, kKeys);
#pragma omp parallel for schedule(static, 1) num_threads(static_cast <int>(team))
        for (int64_t me = 0; me < team; ++me) {
          const ScoreWork<T> w(work + me * work_size, p);
          if (me * part < n)
            QueryScores<T>(p, w, set, t0, queries).write(all.scores, me * part, std::min(n, (me + 1) * part));
        }
#pragma omp parallel for schedule(static, 1) num_threads(static_cast <int>(std::min(team, queries)))
        for (int64_t t = t0; t < t0 + queries; ++t)
          select_query(set, t, all.scores + (t - t0) * all.row, choice_of(omp_get_thread_num()));
      });
  }
  if (not_a_number) fail(ExitCode::numeric, "{}: a score of the indexer is not a number", where);
  if (!sums) return;
  double* const total = sums.as<double>();
  for (int64_t row = 0; row < p.sets * p.tq; ++row) {
    if (p.candidates(row % p.tq) == 0) continue;
    if (targets && targets.as<int32_t>()[row % p.tq] == kPadding) continue;
    const double k = count[row] - (p.block > 1);
    if (std::isfinite(variances[row])) total[kIndexVariance] += variances[row];
    total[kIndexQueries] += 1;
    total[kIndexSelected] += k;
    total[kIndexSquares] += k * k;
  }
}

/// Calls f(s, complete) for every token; complete: s begins a block that is complete.
template <class F>
void for_each_token(const int32_t* first_key, int64_t tokens, int64_t block, F&& f) {
  parallel_for(tokens, 64, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s)
      f(s,
        (s - first_key[s]) % block == 0 && s + block <= tokens && first_key[s + block - 1] == first_key[s]);
  });
}

template <class T>
void block_means_t(Tensor y, const Tensor& x, const Tensor& first_key, int64_t block) {
  using A = accumulate_t<T>;
  const int64_t depth = x.dim(1);
  for_each_token(first_key.as<int32_t>(), x.dim(0), block, [&](int64_t s, bool complete) {
    for (int64_t d = 0; d < depth; ++d) {
      A sum = 0;
      for (int64_t i = 0; complete && i < block; ++i) sum += load(x.as<T>() + (s + i) * depth + d);
      store(y.as<T>() + s * depth + d, sum / static_cast<A>(block));
    }
  });
}

template <class T>
void block_means_backward_t(Tensor dx, const Tensor& dy, const Tensor& first_key, int64_t block) {
  using A = accumulate_t<T>;
  const int64_t depth = dx.dim(1), tokens = dx.dim(0);
  const int32_t* const first = first_key.as<int32_t>();
  for_each_token(first, tokens, 1, [&](int64_t s, bool) {
    const int64_t start = s - (s - first[s]) % block;
    const bool complete = start + block <= tokens && first[start + block - 1] == first[s];
    for (int64_t d = 0; d < depth; ++d)
      store(dx.as<T>() + s * depth + d,
            complete ? load(dy.as<T>() + start * depth + d) / static_cast<A>(block) : A(0));
  });
}

}  // namespace

void select_keys(Context& ctx, const Selection& out, const IndexInputs& in, const Budget& budget,
                 const Tensor& mean_variance, Tensor sums, const char* where, const Tensor& targets) {
  with_storage_type(in.q.dtype, [&](auto t) {
    select_t<decltype(t)>(ctx, out, in, budget, mean_variance, sums, where, targets);
  });
}

void block_means(Context& ctx, Tensor y, const Tensor& x, const Tensor& first_key, int64_t block) {
  if (ctx.dry_run) return;
  with_storage_type(x.dtype, [&](auto t) { block_means_t<decltype(t)>(y, x, first_key, block); });
}

void block_means_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& first_key, int64_t block) {
  if (ctx.dry_run) return;
  with_storage_type(dy.dtype, [&](auto t) { block_means_backward_t<decltype(t)>(dx, dy, first_key, block); });
}

#include "ops/cpu/isa_end.h"
