// Bound by memory: 28 bytes per f32 parameter. The division by the bias corrections is folded into two
// factors, computed in double once per call.
#include "ops/adamw.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/parallel_for.h"
#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"

void adamw_update(Context& ctx, Tensor value, Tensor master, Tensor m, Tensor v, const Tensor& gradient,
                  const AdamwStep& step) {
  if (ctx.dry_run) return;
  with_storage_type(value.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const double t = static_cast<double>(step.step);
    const A b1 = static_cast<A>(step.beta1), c1 = static_cast<A>(1 - step.beta1);
    const A b2 = static_cast<A>(step.beta2), c2 = static_cast<A>(1 - step.beta2);
    const A rate = static_cast<A>(step.lr / (1 - std::pow(step.beta1, t)));
    const A root = static_cast<A>(1 / std::sqrt(1 - std::pow(step.beta2, t)));
    const A eps = static_cast<A>(step.eps), keep = static_cast<A>(1 - step.lr * step.weight_decay);
    const A factor = static_cast<A>(step.gradient_scale);
    T* out = value.as<T>();
    A *mp = m.as<A>(), *vp = v.as<A>();
    const A* gp = gradient.as<A>();
    const auto moments = [=](int64_t i) {
      const A g = gp[i] * factor, mi = b1 * mp[i] + c1 * g, vi = b2 * vp[i] + c2 * g * g;
      mp[i] = mi;
      vp[i] = vi;
      return rate * mi / (std::sqrt(vi) * root + eps);
    };
    if (master) {
      A* wp = master.as<A>();
      parallel_for(value.numel(), 8192, [&](int64_t begin, int64_t end) {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) {
          const A w = wp[i] * keep - moments(i);
          wp[i] = w;
          store(out + i, w);
        }
      });
    } else {
      parallel_for(value.numel(), 8192, [&](int64_t begin, int64_t end) {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) store(out + i, load(out + i) * keep - moments(i));
      });
    }
  });
}

#include "ops/cpu/isa_end.h"
