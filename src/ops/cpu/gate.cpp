// Bound by memory and exp. Tokens are divided into at most 64 chunks, depending only on the shape. A chunk
// converts the logits of a few tokens to scores in a buffer that stays in cache, then processes x. The second
// pass costs little compared with exp and lets the same code serve every activation, sharing and granularity.
// Internally z, scores and their gradients are (tokens, H, W) with W = D (elementwise) or 1 (headwise).
#include "ops/gate.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/parallel_for.h"
#include "ops/gate_activation.h"

// In this order.
// clang-format off
#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"
#include "ops/cpu/vectors.h"
// clang-format on

/// s = a(z) and, unless null, slope = factor a'(z), element by element; s may be the memory of z.
template <GateActivation kActivation, class T, class A>
void activate_all(A* s, A* slope, const T* z, int64_t n, A factor) {
  if (slope) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const A v = load(z + i), sig = sigmoid(v);
      slope[i] = factor * slope_of(kActivation, v, sig);
      s[i] = activate(kActivation, v, sig);
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const A v = load(z + i);
      s[i] = activate(kActivation, v, sigmoid(v));
    }
  }
}

template <class T, class A>
void activate_all(GateActivation activation, A* s, A* slope, const T* z, int64_t n, A factor) {
  with_activation(activation, [&](auto a) { activate_all<a.value>(s, slope, z, n, factor); });
}

/// Every head's row of one token becomes factor times the sum over heads.
template <class A>
void share(A* row, int64_t heads, int64_t width, A factor) {
  for (int64_t h = 1; h < heads; ++h) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) row[i] += row[h * width + i];
  }
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) row[i] *= factor;
  for (int64_t h = 1; h < heads; ++h) std::copy_n(row, width, row + h * width);
}

/// Scores of `tokens` tokens, repeated over heads where they share them; slope (may be null) is the
/// derivative of a token's shared score in each head's logit.
template <class T, class A>
void score_tokens(const GateKind& kind, A* s, A* slope, const T* z, int64_t tokens, int64_t heads,
                  int64_t width) {
  const int64_t n = heads * width;
  const A mean = A(1) / static_cast<A>(heads);
  switch (kind.sharing) {
    case GateSharing::specific:
      return activate_all(kind.activation, s, slope, z, tokens * n, A(1));
    case GateSharing::shared:
      activate_all(kind.activation, s, slope, z, tokens * n, mean);
      for (int64_t t = 0; t < tokens; ++t) share(s + t * n, heads, width, mean);
      return;
    case GateSharing::shared_before_activation:
      for (int64_t i = 0; i < tokens * n; ++i) s[i] = load(z + i);
      for (int64_t t = 0; t < tokens; ++t) share(s + t * n, heads, width, mean);
      return activate_all(kind.activation, s, slope, s, tokens * n, mean);
  }
}

/// y = x * s or x + s over `rows` rows (token, head) of D channels.
template <class T, class A>
void apply(GateCombine combine, T* y, const T* x, const A* s, int64_t rows, int64_t channels, int64_t width) {
  // One score per channel makes the rows one long row.
  const int64_t n = width == channels ? rows * channels : channels, count = width == channels ? 1 : rows;
  const bool multiply = combine == GateCombine::multiply;
  for (int64_t r = 0; r < count; ++r, x += n, y += n) {
    const A* score = width == channels ? s : nullptr;
    const A one = s[r];
    for_vectors<A>(n, [&](int64_t i, int64_t part) {
      const Vec<A> v = take(x + i, part), by = score ? take(score + i, part) : splat(one);
      put(y + i, multiply ? v * by : v + by, part);
    });
  }
}

/// dx, and ds (rows, W). dy is read before dx, which may be the same memory, is written.
template <class T, class A>
void apply_backward(GateCombine combine, T* dx, A* ds, const T* dy, const T* x, const A* s, int64_t rows,
                    int64_t channels, int64_t width) {
  const bool multiply = combine == GateCombine::multiply;
  if (width == channels) {
    const int64_t n = rows * channels;
    if (multiply) {
      for_vectors<A>(n, [&](int64_t i, int64_t part) {
        const Vec<A> d = take(dy + i, part);
        put(ds + i, d * take(x + i, part), part);
        put(dx + i, d * take(s + i, part), part);
      });
    } else {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) ds[i] = load(dy + i);
      if (dx != dy) std::copy_n(dy, n, dx);
    }
    return;
  }
  for (int64_t r = 0; r < rows; ++r, dx += channels, dy += channels, x += channels) {
    A total = 0;
    if (multiply) {
      const A one = s[r];
#pragma omp simd reduction(+ : total)
      for (int64_t i = 0; i < channels; ++i) {
        const A d = load(dy + i);
        total += d * load(x + i);
        store(dx + i, d * one);
      }
    } else {
#pragma omp simd reduction(+ : total)
      for (int64_t i = 0; i < channels; ++i) total += load(dy + i);
      if (dx != dy) std::copy_n(dy, channels, dx);
    }
    ds[r] = total;
  }
}

/// The partition of the work. It depends only on the shape, so that sums over tokens do not depend on the
/// number of threads.
struct GateShape {
  int64_t tokens, heads, channels, width, n;  // n = heads * width: scores of one token
  bool per_token;                             // Z = T
  int64_t chunk, chunks, block;               // tokens of a chunk, number of chunks, tokens scored at once

  GateShape(const Tensor& x, const Tensor& z)
      : tokens(x.dim(0)),
        heads(x.dim(1)),
        channels(x.dim(2)),
        width(z.rank == 3 ? channels : 1),
        n(heads * width),
        per_token(z.dim(0) == tokens) {
    const int64_t row = std::max<int64_t>(heads * channels, 1);
    chunk = std::max({(tokens + 63) / 64, (8192 + row - 1) / row, int64_t{1}});
    chunks = (tokens + chunk - 1) / chunk;
    block = std::clamp<int64_t>(2048 / std::max<int64_t>(n, 1), 1, chunk);
  }
};

/// body(chunk index, first token, count) for each block of tokens, a chunk's blocks in order and in one
/// thread.
template <class Body>
void for_each_block(const GateShape& g, Body&& body) {
  parallel_for(g.chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const int64_t last = std::min((c + 1) * g.chunk, g.tokens);
      for (int64_t t = c * g.chunk; t < last; t += g.block) body(c, t, std::min(g.block, last - t));
    }
  });
}

void gate_forward(Context& ctx, Tensor y, const Tensor& x, const Tensor& z, const GateKind& kind) {
  const GateShape g(x, z);
  ScratchScope scratch(ctx.scratch);
  const Tensor scores = scratch.alloc("gate_scores", accumulate_dtype(x.dtype),
                                      {g.per_token ? std::max<int64_t>(g.chunks, 1) : 1, g.block, g.n});
  if (ctx.dry_run) return;
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T *xp = x.as<T>(), *zp = z.as<T>();
    T* yp = y.as<T>();
    const int64_t row = g.heads * g.channels;
    A* all = scores.as<A>();
    if (!g.per_token)
      for (int64_t b = 0; b < g.block; ++b)
        score_tokens<T, A>(kind, all + b * g.n, nullptr, zp, 1, g.heads, g.width);
    for_each_block(g, [&](int64_t c, int64_t t, int64_t count) {
      A* s = g.per_token ? all + c * g.block * g.n : all;
      if (g.per_token) score_tokens<T, A>(kind, s, nullptr, zp + t * g.n, count, g.heads, g.width);
      apply(kind.combine, yp + t * row, xp + t * row, s, count * g.heads, g.channels, g.width);
    });
  });
}

/// ds (tokens, H, W) += factor dhead_h / W.
template <class A>
void add_head_gradient(A* ds, const Tensor& dhead, int64_t tokens, int64_t heads, int64_t width, A factor) {
  if (!dhead) return;
  for (int64_t r = 0; r < tokens * heads; ++r) {
    const A d = factor * static_cast<A>(dhead.as<double>()[r % heads]) / static_cast<A>(width);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) ds[r * width + i] += d;
  }
}

void gate_backward(Context& ctx, Tensor dx, Tensor dz, const Tensor& dy, const Tensor& x, const Tensor& z,
                   const GateKind& kind, const Tensor& dhead) {
  const GateShape g(x, z);
  const DType accumulate = accumulate_dtype(x.dtype);
  const int64_t chunks = std::max<int64_t>(g.chunks, 1), score_chunks = g.per_token ? chunks : 1;
  ScratchScope scratch(ctx.scratch);
  const Tensor scores = scratch.alloc("gate_scores", accumulate, {score_chunks, g.block, g.n});
  const Tensor slopes = scratch.alloc("gate_slopes", accumulate, {score_chunks, g.block, g.n});
  const Tensor dscores = scratch.alloc("gate_dscores", accumulate, {chunks, g.block, g.n});
  const Tensor partials = scratch.alloc("gate_dz", accumulate, {g.per_token ? 1 : chunks, g.n});
  if (ctx.dry_run) return;
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T *xp = x.as<T>(), *dyp = dy.as<T>(), *zp = z.as<T>();
    T* dxp = dx.as<T>();
    const int64_t row = g.heads * g.channels, buffer = g.block * g.n;
    A *s = scores.as<A>(), *slope = slopes.as<A>(), *sums = partials.as<A>();
    if (g.per_token) {
      T* dzp = dz.as_rows<T>();
      const int64_t stride = dz.stride();
      for_each_block(g, [&](int64_t c, int64_t t, int64_t count) {
        A *sc = s + c * buffer, *kc = slope + c * buffer, *ds = dscores.as<A>() + c * buffer;
        score_tokens<T, A>(kind, sc, kc, zp + t * g.n, count, g.heads, g.width);
        apply_backward(kind.combine, dxp + t * row, ds, dyp + t * row, xp + t * row, sc, count * g.heads,
                       g.channels, g.width);
        if (kind.sharing != GateSharing::specific)
          for (int64_t i = 0; i < count; ++i) share(ds + i * g.n, g.heads, g.width, A(1));
        add_head_gradient(ds, dhead, count, g.heads, g.width, A(1));
        const int64_t n = dz.contiguous() ? count * g.n : g.n;
        for (int64_t i = 0; i < count * g.n; i += n) {
          T* const to = dzp + (t + i / g.n) * stride;
          for_vectors<A>(n, [&](int64_t j, int64_t part) {
            put(to + j, take(kc + i + j, part) * take(ds + i + j, part), part);
          });
        }
      });
      return;
    }
    // A parameter: ds summed over tokens, chunk by chunk; the slope is the same for all of them.
    for (int64_t b = 0; b < g.block; ++b)
      score_tokens<T, A>(kind, s + b * g.n, slope + b * g.n, zp, 1, g.heads, g.width);
    std::fill_n(sums, chunks * g.n, A(0));
    for_each_block(g, [&](int64_t c, int64_t t, int64_t count) {
      A *ds = dscores.as<A>() + c * buffer, *total = sums + c * g.n;
      apply_backward(kind.combine, dxp + t * row, ds, dyp + t * row, xp + t * row, s, count * g.heads,
                     g.channels, g.width);
      for (int64_t b = 0; b < count; ++b) {
#pragma omp simd
        for (int64_t i = 0; i < g.n; ++i) total[i] += ds[b * g.n + i];
      }
    });
    for (int64_t c = 1; c < g.chunks; ++c) {
#pragma omp simd
      for (int64_t i = 0; i < g.n; ++i) sums[i] += sums[c * g.n + i];
    }
    if (kind.sharing != GateSharing::specific) share(sums, g.heads, g.width, A(1));
    add_head_gradient(sums, dhead, 1, g.heads, g.width, static_cast<A>(g.tokens));
    A* dzp = dz.as<A>();
#pragma omp simd
    for (int64_t i = 0; i < g.n; ++i) dzp[i] += slope[i] * sums[i];
  });
}

void gate_scores(Context& ctx, Tensor scores, const Tensor& z, const GateKind& kind) {
  if (ctx.dry_run) return;
  const int64_t heads = z.dim(1), width = z.rank == 3 ? z.dim(2) : 1, n = heads * width;
  with_storage_type(z.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    parallel_for(z.dim(0), 8192 / std::max<int64_t>(n, 1), [&](int64_t begin, int64_t end) {
      score_tokens<T, A>(kind, scores.as<A>() + begin * n, nullptr, z.as<T>() + begin * n, end - begin, heads,
                         width);
    });
  });
}

#include "ops/cpu/isa_end.h"
