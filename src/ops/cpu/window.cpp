// Negligible beside attention: plain loops.
#include "ops/window.h"

#include <algorithm>
#include <limits>

#include "ops/cpu/isa_begin.h"

namespace {

template <class A>
void hide(const Tensor& z0, const int32_t* first, const int32_t* seen) {
  const int64_t heads = z0.dim(0), tokens = z0.dim(1);
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t t = 0; t < tokens; ++t)
      if (seen[t] > first[t]) z0.as<A>()[h * tokens + t] = -std::numeric_limits<A>::infinity();
}

}  // namespace

void window_first_key(Context& ctx, Tensor out, const Tensor& first_key, int64_t keys, int64_t window) {
  if (ctx.dry_run) return;
  const int64_t tokens = first_key.numel();
  for (int64_t t = 0; t < tokens; ++t)
    out.as<int32_t>()[t] =
        static_cast<int32_t>(std::max<int64_t>(first_key.as<int32_t>()[t], t + keys - tokens - window + 1));
}

void hide_first_logits(Context& ctx, Tensor z0, const Tensor& first_key, const Tensor& window_first) {
  if (ctx.dry_run) return;
  const int32_t *first = first_key.as<int32_t>(), *seen = window_first.as<int32_t>();
  if (z0.dtype == DType::f64)
    hide<double>(z0, first, seen);
  else
    hide<float>(z0, first, seen);
}

void absolute_first_key(Context& ctx, Tensor out, const Tensor& first_key, const Tensor& own_key) {
  if (ctx.dry_run) return;
  for (int64_t t = 0; t < first_key.numel(); ++t)
    out.as<int32_t>()[t] = first_key.as<int32_t>()[t] + own_key.as<int32_t>()[t] - static_cast<int32_t>(t);
}

#include "ops/cpu/isa_end.h"
