// Bound by exp: one per token and head (and channel, for an elementwise gate), compared with attention's one
// per pair of tokens. Tokens are divided into chunks that depend only on the shape, whose sums are added in
// order.
#include "ops/head_importance.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/parallel_for.h"
#include "core/targets.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"

namespace {

constexpr int64_t kTokens = 256;  // per chunk

struct Padding {
  const int32_t* target;

  explicit Padding(const HeadGate& g) : target(g.targets ? g.targets.as<int32_t>() : nullptr) {}
  bool operator[](int64_t t) const { return target && target[t] == kPadding; }
};

/// Sums of G over tokens [begin, end) of (H, T) statistics. Returns how many tokens count.
template <class A>
int64_t softmax_chunk(double* sums, const HeadGate& g, int64_t begin, int64_t end) {
  const int64_t heads = g.lse.dim(0), tokens = g.lse.dim(1);
  const int32_t* first = g.first_key.as<int32_t>();
  const Padding padding(g);
  int64_t counted = 0;
  for (int64_t t = begin; t < end; ++t) counted += !padding[t] && !(g.skip_first && first[t] == t);
  for (int64_t h = 0; h < heads; ++h) {
    const A *lse = g.lse.as<A>() + h * tokens, *z0 = g.z0.as<A>() + h * tokens;
    double sum = 0;
    // With a single visible key lse equals z0 up to rounding, so G is 0 whether the token counts or not.
    for (int64_t t = begin; t < end; ++t)
      if (first[t] != t && !padding[t])
        sum += static_cast<double>(-std::expm1(std::min(z0[t] - lse[t], A(0))));
    sums[h] = sum;
  }
  return counted;
}

/// Returns how many tokens count, as gate_chunk does.
template <class T>
int64_t sink_chunk(double* sums, const HeadGate& g, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  const int64_t heads = g.lse.dim(0), tokens = g.lse.dim(1);
  const Padding padding(g);
  for (int64_t h = 0; h < heads; ++h) {
    const A* lse = g.lse.as<A>() + h * tokens;
    double sum = 0;
    if (g.sink.rank == 2) {
      const A* sink = g.sink.as<A>() + h * tokens;
#pragma omp simd reduction(+ : sum)
      for (int64_t t = begin; t < end; ++t)
        sum += padding[t] ? 0 : static_cast<double>(sigmoid(lse[t] - sink[t]));
    } else {
      const A sink = load(g.sink.as<T>() + h);
#pragma omp simd reduction(+ : sum)
      for (int64_t t = begin; t < end; ++t)
        sum += padding[t] ? 0 : static_cast<double>(sigmoid(lse[t] - sink));
    }
    sums[h] = sum;
  }
  int64_t counted = 0;
  for (int64_t t = begin; t < end; ++t) counted += !padding[t];
  return counted;
}

template <class T>
int64_t gate_chunk(double* sums, const HeadGate& g, int64_t begin, int64_t end) {
  using A = accumulate_t<T>;
  const int64_t heads = g.logits.dim(1), width = g.logits.rank == 3 ? g.logits.dim(2) : 1;
  const ScoreRange scores = *score_range(g.kind.activation);
  const A low = static_cast<A>(scores.low), range = static_cast<A>(scores.high - scores.low);
  const Padding padding(g);
  const bool one = g.logits.dim(0) == 1;  // for all tokens
  int64_t counted = 0;
  std::fill_n(sums, heads, 0.0);
  for (int64_t t = begin; t < end; ++t) {
    if (!one && padding[t]) continue;
    ++counted;
    const T* z = g.logits.as<T>() + t * heads * width;
    if (width == 1) {
#pragma omp simd
      for (int64_t h = 0; h < heads; ++h) sums[h] += static_cast<double>(low + range * sigmoid(load(z + h)));
      continue;
    }
    for (int64_t h = 0; h < heads; ++h, z += width) {
      A sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t c = 0; c < width; ++c) sum += sigmoid(load(z + c));
      sums[h] += static_cast<double>(low + range * sum / static_cast<A>(width));
    }
  }
  return counted;
}

}  // namespace

void head_importance(Context& ctx, Tensor batch, Tensor totals, const HeadGate& g, int64_t tokens) {
  const int64_t heads = g.logits ? g.logits.dim(1) : g.lse.dim(0), rows = g.logits ? g.logits.dim(0) : tokens;
  const int64_t chunks = std::max<int64_t>((rows + kTokens - 1) / kTokens, 1);
  ScratchScope scratch(ctx.scratch);
  const Tensor partials = scratch.alloc("head importance", DType::f64, {chunks + 1, heads + 1});
  if (ctx.dry_run) return;
  double* const all = partials.as<double>();
  parallel_for(chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      const int64_t begin = c * kTokens, end = std::min(begin + kTokens, rows);
      double* const sums = all + (c + 1) * (heads + 1);
      int64_t counted = 0;
      if (g.logits)
        with_storage_type(g.logits.dtype,
                          [&](auto tag) { counted = gate_chunk<decltype(tag)>(sums, g, begin, end); });
      else if (g.sink)
        with_storage_type(g.sink.dtype,
                          [&](auto tag) { counted = sink_chunk<decltype(tag)>(sums, g, begin, end); });
      else
        counted = g.lse.dtype == DType::f64 ? softmax_chunk<double>(sums, g, begin, end)
                                            : softmax_chunk<float>(sums, g, begin, end);
      sums[heads] = static_cast<double>(counted);
    }
  });
  double* const sum = all;  // (H + 1)
  const double repeat =
      g.logits && rows == 1 ? static_cast<double>(tokens) : 1;  // a learned constant: every token's
  for (int64_t i = 0; i <= heads; ++i) {
    sum[i] = 0;
    for (int64_t c = 1; c <= chunks; ++c) sum[i] += all[c * (heads + 1) + i];
    sum[i] *= repeat;
    if (batch) batch.as<double>()[i] = sum[i];
    if (totals) totals.as<double>()[i] += sum[i];
  }
  if (batch) batch.as<double>()[heads + 1] = 1, batch.as<double>()[heads + 2] = 0;
  if (totals) totals.as<double>()[heads + 1] += 1;
}

void head_importance_backward(Context& ctx, Tensor dlse, Tensor coef0, Tensor dsink, const Tensor& u,
                              const HeadGate& g) {
  if (ctx.dry_run) return;
  const int64_t heads = g.lse.dim(0), tokens = g.lse.dim(1);
  const Padding padding(g);
  const auto of_type = [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    parallel_for(heads, std::max<int64_t>(2048 / std::max<int64_t>(tokens, 1), 1),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t h = begin; h < end; ++h) {
                     const A uh = static_cast<A>(u.as<double>()[h]);
                     const A* lse = g.lse.as<A>() + h * tokens;
                     A* d = dlse.as<A>() + h * tokens;
                     if (g.sink && g.sink.rank == 2) {
                       const A* sink = g.sink.as<A>() + h * tokens;
                       for (int64_t t = 0; t < tokens; ++t)
                         d[t] =
                             padding[t] ? A(0) : uh * sigmoid(lse[t] - sink[t]) * sigmoid(sink[t] - lse[t]);
                       continue;
                     }
                     if (g.sink) {
                       const A sink = load(g.sink.as<T>() + h);
                       double sum = 0;
                       for (int64_t t = 0; t < tokens; ++t) {
                         d[t] = padding[t] ? A(0) : uh * sigmoid(lse[t] - sink) * sigmoid(sink - lse[t]);
                         sum += static_cast<double>(d[t]);
                       }
                       dsink.as<A>()[h] -= static_cast<A>(sum);
                       continue;
                     }
                     const A* z0 = g.z0.as<A>() + h * tokens;
                     A* c = coef0.as<A>() + h * tokens;
                     const int32_t* first = g.first_key.as<int32_t>();
#pragma omp simd
                     for (int64_t t = 0; t < tokens; ++t) {
                       const A a =
                           first[t] == t || padding[t] ? A(0) : exp_fast(std::min(z0[t] - lse[t], A(0)));
                       d[t] = uh * a;
                       c[t] = -d[t];
                     }
                   }
                 });
  };
  if (g.sink)
    with_storage_type(g.sink.dtype, of_type);
  else
    with_storage_type(g.lse.dtype, of_type);
}

void head_balance(Context& ctx, Tensor u, Tensor batch, Tensor totals, const Tensor& seen,
                  const Tensor& shared, const HeadBalance& b) {
  if (ctx.dry_run) return;
  const int64_t layers = u.dim(0), heads = u.dim(1), size = head_row_size(heads);
  for (int64_t l = 0; l < layers; ++l) {
    const double *row = seen.as<double>() + l * size, tokens = row[heads];
    double* const out = u.as<double>() + l * heads;
    // out: importance, then the gradient; below 0 for a head that is left out.
    for (int64_t h = 0; h < heads; ++h)
      out[h] = tokens > 0 && !(shared && shared.as<double>()[l * heads + h] != 0) ? row[h] / tokens : -1;
    for (int64_t m = 0; m < (shared ? 0 : b.shared_heads); ++m) *std::max_element(out, out + heads) = -1;
    double n = 0, mean = 0, squares = 0;
    for (int64_t h = 0; h < heads; ++h)
      if (out[h] >= 0) n += 1, mean += out[h];
    mean /= std::max(n, 1.0);
    for (int64_t h = 0; h < heads; ++h)
      if (out[h] >= 0) squares += (out[h] - mean) * (out[h] - mean);
    const bool counts = n >= 2 && mean >= kLeastImportance;
    const double c = counts ? n / (n - static_cast<double>(b.ddof)) : 0;
    const double scale =
        counts ? b.coefficient * b.token_fraction * row[heads + 1] / tokens * c * 2 / (mean * mean) : 0;
    for (int64_t h = 0; h < heads; ++h)
      out[h] = counts && out[h] >= 0 ? scale * (out[h] - mean - squares / (n * mean)) : 0;
    const double loss = counts ? c * squares / (mean * mean) : 0;
    batch.as<double>()[l * size + heads + 2] = loss;
    if (totals) totals.as<double>()[l * size + heads + 2] += loss;
  }
}

#include "ops/cpu/isa_end.h"
