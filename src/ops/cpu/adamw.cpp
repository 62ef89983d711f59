// Bound by memory: 28 bytes per f32 parameter. The division by the bias corrections is folded into two
// factors, computed in double once per segment.
#include "ops/adamw.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>

#include "core/parallel_for.h"
#include "ops/bit_sum.h"

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

namespace {

/// What one update needs of a segment, with values derived from control.
template <class T>
struct Segment {
  using A = accumulate_t<T>;
  A b1, c1, b2, c2, root, eps, factor, rate, keep;
  T* out;
  A *master, *m, *v;
  const A* gradient;
};

/// Elements [begin, end). kSummed: adds the bits of what is read and written to the sums, which are in
/// registers anyway; otherwise the sums stay 0.
template <bool kSummed, bool kMaster, class T>
void update_elements(const Segment<T>& s, int64_t begin, int64_t end, uint32_t& read_sum,
                     uint32_t& written_sum) {
  using A = accumulate_t<T>;
  const Segment<T> c = s;
  uint32_t read = 0, written = 0;
#pragma omp simd reduction(+ : read, written)
  for (int64_t i = begin; i < end; ++i) {
    A w;
    if constexpr (kMaster)
      w = c.master[i];
    else
      w = load(c.out + i);
    if constexpr (kSummed) {
      read += word_bits(c.m[i]) + word_bits(c.v[i]) + word_bits(c.out[i]);
      if constexpr (kMaster) read += word_bits(w);
    }
    const A g = c.gradient[i] * c.factor, mi = c.b1 * c.m[i] + c.c1 * g, vi = c.b2 * c.v[i] + c.c2 * g * g;
    c.m[i] = mi;
    c.v[i] = vi;
    w = w * c.keep - c.rate * mi / (std::sqrt(vi) * c.root + c.eps);
    if constexpr (kMaster) c.master[i] = w;
    store(c.out + i, w);
    if constexpr (kSummed) {
      written += word_bits(mi) + word_bits(vi) + word_bits(c.out[i]);
      if constexpr (kMaster) written += word_bits(w);
    }
  }
  read_sum = read;
  written_sum = written;
}

/// Tensors as adamw_update_summed's; sums may be null.
template <bool kSummed, class T>
void update(int32_t* sums, const Tensor& value, const Tensor& master, const Tensor& m, const Tensor& v,
            const Tensor& gradient, const Tensor& segments, const UpdateControl& c,
            const AdamwSettings& settings) {
  using A = accumulate_t<T>;
  for (int64_t i = 0; i < segments.dim(0); ++i) {
    const double* row = segments.as<double>() + 4 * i;
    const int64_t first = static_cast<int64_t>(row[0]), count = static_cast<int64_t>(row[1]) - first;
    const double lr = c.lr * row[2];
    const Segment<T> s = {.b1 = static_cast<A>(settings.beta1),
                          .c1 = static_cast<A>(1 - settings.beta1),
                          .b2 = static_cast<A>(settings.beta2),
                          .c2 = static_cast<A>(1 - settings.beta2),
                          .root = static_cast<A>(1 / std::sqrt(c.correction2)),
                          .eps = static_cast<A>(settings.eps),
                          .factor = static_cast<A>(c.clip),
                          .rate = static_cast<A>(lr / c.correction1),
                          .keep = static_cast<A>(1 - lr * row[3]),
                          .out = value.as<T>() + first,
                          .master = master ? master.as<A>() + first : nullptr,
                          .m = m.as<A>() + first,
                          .v = v.as<A>() + first,
                          .gradient = gradient.as<A>() + first};
    std::atomic<uint32_t> read{0}, written{0};
    parallel_for(count, 8192, [&](int64_t begin, int64_t end) {
      uint32_t my_read = 0, my_written = 0;
      if (s.master)
        update_elements<kSummed, true>(s, begin, end, my_read, my_written);
      else
        update_elements<kSummed, false>(s, begin, end, my_read, my_written);
      if constexpr (kSummed) read += my_read, written += my_written;
    });
    if constexpr (kSummed) {
      sums[2 * i] = static_cast<int32_t>(read.load());
      sums[2 * i + 1] = static_cast<int32_t>(written.load());
    }
  }
}

}  // namespace

void adamw_update(Context& ctx, Tensor value, Tensor master, Tensor m, Tensor v, const Tensor& gradient,
                  const Tensor& segments, const Tensor& control, const AdamwSettings& settings) {
  if (ctx.dry_run) return;
  const UpdateControl& c = *reinterpret_cast<const UpdateControl*>(control.as<double>());
  if (c.apply == 0) return;
  with_storage_type(value.dtype, [&](auto tag) {
    update<false, decltype(tag)>(nullptr, value, master, m, v, gradient, segments, c, settings);
  });
}

void adamw_update_summed(Context& ctx, Tensor sums, Tensor value, Tensor master, Tensor m, Tensor v,
                         const Tensor& gradient, const Tensor& segments, const Tensor& control,
                         const AdamwSettings& settings) {
  if (ctx.dry_run) return;
  const UpdateControl& c = *reinterpret_cast<const UpdateControl*>(control.as<double>());
  if (c.apply == 0) return;
  with_storage_type(value.dtype, [&](auto tag) {
    update<true, decltype(tag)>(sums.as<int32_t>(), value, master, m, v, gradient, segments, c, settings);
  });
}

#include "ops/cpu/isa_end.h"
