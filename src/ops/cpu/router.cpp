// The logits are products with a narrow weight; the rest is a few passes over (T, E) numbers, one token at a
// time.
#include "ops/router.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/parallel_for.h"
#include "core/targets.h"
#include "ops/matmul.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"
#include "ops/cpu/convert.h"

namespace {

using Layout = Product::Layout;

constexpr int64_t kChunk = 1024;  // rows of bf16 activations widened at once
constexpr int64_t kTokens = 64;   // of a thread, at least

Tensor widened(Context& ctx, ScratchScope& t, const Tensor& weight) {
  const Tensor wide = t.alloc("router weight in f32", DType::f32, {weight.dim(0), weight.dim(1)});
  if (!ctx.dry_run) widen(wide.as<float>(), weight.as<bf16>(), weight.numel());
  return wide;
}

template <class F>
void with_wide_type(DType dtype, F&& f) {
  if (dtype == DType::f64)
    f(double{});
  else
    f(float{});
}

/// The K largest of p, largest first, ties to the lower id.
template <class A>
void choose(int32_t* chosen, const A* p, int64_t experts, int64_t k) {
  int64_t held = 0;
  for (int64_t e = 0; e < experts; ++e) {
    if (held == k && !(p[e] > p[chosen[k - 1]])) continue;
    int64_t place = held < k ? held++ : k - 1;
    for (; place > 0 && p[e] > p[chosen[place - 1]]; --place) chosen[place] = chosen[place - 1];
    chosen[place] = static_cast<int32_t>(e);
  }
}

}  // namespace

void router_logits_forward(Context& ctx, Tensor logits, const Tensor& x, const LinearWeight& weight) {
  const int64_t rows = x.dim(0), width = x.dim(1), experts = weight.value.dim(0);
  if (rows == 0) return;
  // On processors with bf16 tiles a packed copy is useless here, because logits need f32 products.
  const bool bf16_storage = x.dtype == DType::bf16;
  const bool packed = weight.packed && (!bf16_storage || product_dtype(x.dtype) == DType::f32);
  Product p{
      logits.dtype, logits.dtype, rows, experts, width, false, packed ? Layout::packed : Layout::transposed};
  if (!bf16_storage)
    return multiply(ctx, p, x.data, packed ? weight.packed.data : weight.value.data, logits.data);

  ScratchScope t(ctx.scratch);
  const int64_t chunk = std::min(rows, kChunk);
  const Tensor wide_x = t.alloc("x in f32", DType::f32, {chunk, width});
  const Tensor wide_weight = packed ? weight.packed : widened(ctx, t, weight.value);
  for (int64_t row = 0; row < rows; row += chunk) {
    p.m = std::min(chunk, rows - row);
    if (!ctx.dry_run) widen(wide_x.as<float>(), x.as<bf16>() + row * width, p.m * width);
    multiply(ctx, p, wide_x.data, wide_weight.data, logits.data ? logits.rows(row, p.m).data : nullptr);
  }
}

void router_logits_backward(Context& ctx, Tensor dx, Tensor dweight, const Tensor& dlogits, const Tensor& x,
                            const LinearWeight& weight, Into into) {
  const int64_t rows = x.dim(0), width = x.dim(1), experts = weight.value.dim(0);
  if (rows == 0) return;
  const DType wide = dlogits.dtype;
  Product input{wide, wide, rows, width, experts, false, Layout::plain, into == Into::add};
  Product gradient{wide, wide, experts, width, rows, true, Layout::plain, true};
  if (x.dtype != DType::bf16) {
    multiply(ctx, input, dlogits.data, weight.value.data, dx.data);
    multiply(ctx, gradient, dlogits.data, x.data, dweight.data);
    return;
  }
  ScratchScope t(ctx.scratch);
  const int64_t chunk = std::min(rows, kChunk);
  const Tensor wide_x = t.alloc("x in f32", DType::f32, {chunk, width});
  const Tensor wide_weight = widened(ctx, t, weight.value);
  input.accumulate = false;
  for (int64_t row = 0; row < rows; row += chunk) {
    const int64_t count = input.m = gradient.k = std::min(chunk, rows - row);
    const void* d = dlogits.data ? dlogits.rows(row, count).data : nullptr;
    if (!ctx.dry_run) widen(wide_x.as<float>(), x.as<bf16>() + row * width, count * width);
    multiply(ctx, gradient, d, wide_x.data, dweight.data);
    multiply(ctx, input, d, wide_weight.data, wide_x.data);
    if (!ctx.dry_run) narrow(dx.as<bf16>() + row * width, wide_x.as<float>(), count * width, into);
  }
}

void route_forward(Context& ctx, Tensor probabilities, Tensor lse, Tensor weights, Tensor experts,
                   const Tensor& logits, bool norm_topk_prob) {
  if (ctx.dry_run) return;
  const int64_t E = logits.dim(1), K = experts.dim(1);
  with_wide_type(logits.dtype, [&](auto tag) {
    using A = decltype(tag);
    parallel_for(logits.dim(0), kTokens, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const A* z = logits.as<A>() + t * E;
        A* p = probabilities.as<A>() + t * E;
        A largest = z[0];
        for (int64_t e = 1; e < E; ++e) largest = std::max(largest, z[e]);
        A sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t e = 0; e < E; ++e) {
          p[e] = exp_fast(z[e] - largest);
          sum += p[e];
        }
        for (int64_t e = 0; e < E; ++e) p[e] /= sum;
        lse.as<A>()[t] = largest + std::log(sum);

        int32_t* chosen = experts.as<int32_t>() + t * K;
        choose(chosen, p, E, K);
        A* w = weights.as<A>() + t * K;
        A chosen_sum = 0;
        for (int64_t k = 0; k < K; ++k) chosen_sum += w[k] = p[chosen[k]];
        if (norm_topk_prob)
          for (int64_t k = 0; k < K; ++k) w[k] /= chosen_sum;
      }
    });
  });
}

void route_backward(Context& ctx, Tensor dlogits, const Tensor& dweights, const Tensor& probabilities,
                    const Tensor& lse, const Tensor& weights, const Tensor& experts, const Tensor& counts,
                    bool norm_topk_prob, const RouterLossScale& scale) {
  if (ctx.dry_run) return;
  const int64_t E = probabilities.dim(1), K = experts.dim(1);
  with_wide_type(probabilities.dtype, [&](auto tag) {
    using A = decltype(tag);
    const double weight = scale.token_weight ? *scale.token_weight.as<double>() : 1;
    const A z = static_cast<A>(2 * scale.z * weight);
    std::array<A, kMaxExperts> share;  // balance E f_e
    double total = 0;
    for (int64_t e = 0; e < E; ++e) total += counts.as<double>()[e];
    for (int64_t e = 0; e < E; ++e)
      share[static_cast<size_t>(e)] = static_cast<A>(
          total > 0 ? weight * scale.balance * static_cast<double>(E) * counts.as<double>()[e] / total : 0);
    const A* f = share.data();
    parallel_for(probabilities.dim(0), kTokens, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const A* p = probabilities.as<A>() + t * E;
        A* d = dlogits.as<A>() + t * E;
        const A *dw = dweights.as<A>() + t * K, *w = weights.as<A>() + t * K;
        const int32_t* chosen = experts.as<int32_t>() + t * K;

        A common = 0, chosen_sum = 1;  // through the division by the sum of the chosen
        if (norm_topk_prob) {
          chosen_sum = 0;
          for (int64_t k = 0; k < K; ++k) {
            chosen_sum += p[chosen[k]];
            common += dw[k] * w[k];
          }
        }
        std::array<A, kMaxExpertsPerToken> chosen_part;  // p dp of the chosen
        A inner = 0, balanced = 0;
        for (int64_t k = 0; k < K; ++k)
          inner += chosen_part[static_cast<size_t>(k)] = p[chosen[k]] * ((dw[k] - common) / chosen_sum);
#pragma omp simd reduction(+ : balanced)
        for (int64_t e = 0; e < E; ++e) balanced += f[e] * p[e];
        const A shift = z * lse.as<A>()[t] - balanced - inner;
#pragma omp simd
        for (int64_t e = 0; e < E; ++e) d[e] = p[e] * (f[e] + shift);
        for (int64_t k = 0; k < K; ++k) d[chosen[k]] += chosen_part[static_cast<size_t>(k)];
      }
    });
  });
}

void router_load(Context& ctx, Tensor counts, Tensor totals, const Tensor& offsets,
                 const Tensor& probabilities, const Tensor& lse, const Tensor& experts,
                 const Tensor& targets) {
  const int64_t T = probabilities.dim(0), E = probabilities.dim(1), K = targets ? experts.dim(1) : 0;
  ScratchScope scratch(ctx.scratch);
  const Tensor sums = scratch.alloc("router probability sums", DType::f64, {E});
  if (ctx.dry_run) return;
  const int32_t* const target = targets ? targets.as<int32_t>() : nullptr;
  const auto is_padding = [&](int64_t t) { return target && target[t] == kPadding; };
  double* count = counts.as<double>();
  for (int64_t e = 0; e < E; ++e) count[e] = offsets.as<int32_t>()[e + 1] - offsets.as<int32_t>()[e];
  int64_t tokens = 0;
  for (int64_t t = 0; t < T; ++t) {
    tokens += !is_padding(t);
    for (int64_t k = 0; is_padding(t) && k < K; ++k) count[experts.as<int32_t>()[t * K + k]] -= 1;
  }
  if (!totals) return;
  const double pairs = std::accumulate(count, count + E, 0.0);
  with_wide_type(probabilities.dtype, [&](auto tag) {
    using A = decltype(tag);
    const A* p = probabilities.as<A>();
    double* sum = sums.as<double>();
    parallel_for(
        E, 8, [&](int64_t begin, int64_t end) {  // columns, so that every sum runs over the tokens in order
          std::fill(sum + begin, sum + end, 0.0);
          for (int64_t t = 0; t < T; ++t) {
            if (is_padding(t)) continue;
            for (int64_t e = begin; e < end; ++e) sum[e] += static_cast<double>(p[t * E + e]);
          }
        });
    double* total = totals.as<double>();
    double balance = 0, squares = 0;
    for (int64_t e = 0; e < E; ++e) {
      total[e] += count[e];
      total[E + e] += sum[e];
      if (pairs > 0) balance += count[e] / pairs * sum[e];
    }
    for (int64_t t = 0; t < T; ++t)
      if (!is_padding(t))
        squares += static_cast<double>(lse.as<A>()[t]) * static_cast<double>(lse.as<A>()[t]);
    total[2 * E] += static_cast<double>(E) * balance;
    total[2 * E + 1] += squares;
    total[2 * E + 2] += static_cast<double>(tokens);
  });
}

#include "ops/cpu/isa_end.h"
