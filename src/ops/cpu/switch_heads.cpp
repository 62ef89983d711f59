// Memory-bound: one head of a token at a time, reading its experts' channels once. The loops over channels
// are those of a headwise gate (cpu/gate.cpp), so that a single expert gives the bits of a gate.
#include "ops/switch_heads.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "core/kinds.h"
#include "core/parallel_for.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"

namespace {

constexpr int64_t kTile = 64;  // channels summed at once

struct SwitchShape {
  int64_t rows, experts, chosen, channels, width, slots;  // rows: (token, head); slots = channels / width

  SwitchShape(const Tensor& v, const Tensor& picked, const Tensor& projected)
      : rows(v.dim(0) * v.dim(1)),
        experts(projected.dim(2)),
        chosen(picked.dim(2)),
        channels(v.dim(2)),
        width(projected.dim(3)),
        slots(channels / width) {}
  int64_t grain() const { return std::max<int64_t>(8192 / std::max<int64_t>(experts * width, 1), 1); }
};

/// NaN ranks above all numbers, so that it is chosen and becomes visible.
template <class T>
auto key_of(const T* z) {
  using A = accumulate_t<T>;
  const A v = load(z);
  return std::isnan(v) ? std::numeric_limits<A>::infinity() : v;
}

/// The k largest logits, largest first, ties to the lower id.
template <class T>
void choose(int32_t* chosen, const T* z, int64_t experts, int64_t k) {
  int64_t held = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const auto key = key_of(z + e);
    if (held == k && !(key > key_of(z + chosen[k - 1]))) continue;
    int64_t place = held < k ? held++ : k - 1;
    for (; place > 0 && key > key_of(z + chosen[place - 1]); --place) chosen[place] = chosen[place - 1];
    chosen[place] = static_cast<int32_t>(e);
  }
}

/// y = r x over n channels.
template <class T, class A>
void scale_row(T* y, const T* x, A r, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) store(y + i, load(x + i) * r);
}

template <class T>
void forward_row(const SwitchShape& s, T* v, int32_t* chosen, const T* z, const T* p) {
  using A = accumulate_t<T>;
  choose(chosen, z, s.experts, s.chosen);
  std::array<A, kMaxExpertsPerToken> r;
  for (int64_t k = 0; k < s.chosen; ++k) r[static_cast<size_t>(k)] = sigmoid(load(z + chosen[k]));
  for (int64_t slot = 0; slot < s.slots; ++slot) {
    std::array<int64_t, kMaxExpertsPerToken> here;  // places among the chosen of those that write this slot
    int64_t count = 0;
    for (int64_t k = 0; k < s.chosen; ++k)
      if (chosen[k] % s.slots == slot) here[static_cast<size_t>(count++)] = k;
    T* const out = v + slot * s.width;
    const auto row = [&](int64_t i) { return p + chosen[here[static_cast<size_t>(i)]] * s.width; };
    const auto score = [&](int64_t i) { return r[static_cast<size_t>(here[static_cast<size_t>(i)])]; };
    if (count == 0) {
      for (int64_t i = 0; i < s.width; ++i) store(out + i, A(0));
    } else if (count == 1) {
      scale_row(out, row(0), score(0), s.width);
    } else {
      for (int64_t first = 0; first < s.width; first += kTile) {
        std::array<A, kTile> sum{};
        const int64_t n = std::min(kTile, s.width - first);
        for (int64_t k = 0; k < count; ++k) {
          const T* const x = row(k) + first;
          const A one = score(k);
#pragma omp simd
          for (int64_t i = 0; i < n; ++i) sum[static_cast<size_t>(i)] += load(x + i) * one;
        }
        for (int64_t i = 0; i < n; ++i) store(out + first + i, sum[static_cast<size_t>(i)]);
      }
    }
  }
}

template <class T>
void backward_row(const SwitchShape& s, T* dz, T* dp, const T* dv, const T* z, const T* p,
                  const int32_t* chosen) {
  using A = accumulate_t<T>;
  std::fill_n(dz, s.experts, T{});
  if (s.chosen < s.experts) std::fill_n(dp, s.experts * s.width, T{});
  for (int64_t k = 0; k < s.chosen; ++k) {
    const int64_t e = chosen[k], channels = s.width;
    const A one = sigmoid(load(z + e)), slope = one * (A(1) - one);
    const T *const dy = dv + e % s.slots * s.width, *const x = p + e * s.width;
    T* const dx = dp + e * s.width;
    A total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < channels; ++i) {
      const A d = load(dy + i);
      total += d * load(x + i);
      store(dx + i, d * one);
    }
    store(dz + e, slope * total);
  }
}

}  // namespace

void switch_heads_forward(Context& ctx, Tensor v, Tensor chosen, const Tensor& logits,
                          const Tensor& projected) {
  if (ctx.dry_run) return;
  const SwitchShape s(v, chosen, projected);
  with_storage_type(v.dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(s.rows, s.grain(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        forward_row(s, v.as<T>() + i * s.channels, chosen.as<int32_t>() + i * s.chosen,
                    logits.as<T>() + i * s.experts, projected.as<T>() + i * s.experts * s.width);
    });
  });
}

void switch_heads_backward(Context& ctx, Tensor dlogits, Tensor dprojected, const Tensor& dv,
                           const Tensor& logits, const Tensor& projected, const Tensor& chosen) {
  if (ctx.dry_run) return;
  const SwitchShape s(dv, chosen, projected);
  with_storage_type(dv.dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(s.rows, s.grain(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        backward_row(s, dlogits.as<T>() + i * s.experts, dprojected.as<T>() + i * s.experts * s.width,
                     dv.as<T>() + i * s.channels, logits.as<T>() + i * s.experts,
                     projected.as<T>() + i * s.experts * s.width, chosen.as<int32_t>() + i * s.chosen);
    });
  });
}

#include "ops/cpu/isa_end.h"
