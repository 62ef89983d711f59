// Bound by memory: 28 bytes per f32 parameter. The division by the bias corrections is folded into two
// factors, computed in double once per segment.
#include "ops/adamw.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/parallel_for.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"

void judge_update(Context& ctx, Tensor control, const AdamwSettings& settings) {
  if (ctx.dry_run) return;
  UpdateControl& c = *reinterpret_cast<UpdateControl*>(control.as<double>());
  c.loss *= c.gradient_scale;
  c.grad_norm = std::sqrt(c.squares);
  const bool finite = std::isfinite(c.loss) && std::isfinite(c.grad_norm);
  c.apply = finite && c.loss <= c.loss_limit && c.grad_norm <= c.grad_norm_limit ? 1 : 0;
  c.clip = c.max_grad_norm > 0 && c.grad_norm > c.max_grad_norm ? c.max_grad_norm / c.grad_norm : 1;
  c.correction1 = 1 - std::pow(settings.beta1, c.step);
  c.correction2 = 1 - std::pow(settings.beta2, c.step);
}

void adamw_update(Context& ctx, Tensor value, Tensor master, Tensor m, Tensor v, const Tensor& gradient,
                  const Tensor& segments, const Tensor& control, const AdamwSettings& settings) {
  if (ctx.dry_run) return;
  const UpdateControl& c = *reinterpret_cast<const UpdateControl*>(control.as<double>());
  if (c.apply == 0) return;
  with_storage_type(value.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const A b1 = static_cast<A>(settings.beta1), c1 = static_cast<A>(1 - settings.beta1);
    const A b2 = static_cast<A>(settings.beta2), c2 = static_cast<A>(1 - settings.beta2);
    const A root = static_cast<A>(1 / std::sqrt(c.correction2));
    const A eps = static_cast<A>(settings.eps), factor = static_cast<A>(c.clip);
    for (int64_t s = 0; s < segments.dim(0); ++s) {
      const double* segment = segments.as<double>() + 4 * s;
      const int64_t first = static_cast<int64_t>(segment[0]),
                    count = static_cast<int64_t>(segment[1]) - first;
      const double lr = c.lr * segment[2];
      const A rate = static_cast<A>(lr / c.correction1), keep = static_cast<A>(1 - lr * segment[3]);
      T* out = value.as<T>() + first;
      A *mp = m.as<A>() + first, *vp = v.as<A>() + first;
      const A* gp = gradient.as<A>() + first;
      const auto moments = [=](int64_t i) {
        const A g = gp[i] * factor, mi = b1 * mp[i] + c1 * g, vi = b2 * vp[i] + c2 * g * g;
        mp[i] = mi;
        vp[i] = vi;
        return rate * mi / (std::sqrt(vi) * root + eps);
      };
      if (master) {
        A* wp = master.as<A>() + first;
        parallel_for(count, 8192, [&](int64_t begin, int64_t end) {
#pragma omp simd
          for (int64_t i = begin; i < end; ++i) {
            const A w = wp[i] * keep - moments(i);
            wp[i] = w;
            store(out + i, w);
          }
        });
      } else {
        parallel_for(count, 8192, [&](int64_t begin, int64_t end) {
#pragma omp simd
          for (int64_t i = begin; i < end; ++i) store(out + i, load(out + i) * keep - moments(i));
        });
      }
    }
  });
}

#include "ops/cpu/isa_end.h"
