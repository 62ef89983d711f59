#include "ops/fixed_sum.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "core/parallel_for.h"

#include "ops/cpu/isa_begin.h"

constexpr int64_t kGrain = 16384;

inline int64_t* fixed_data(const Tensor& t) { return static_cast<int64_t*>(t.data); }

template <class T>
void add_elements(int64_t* sums, int64_t* bad, const T* x, int64_t n, double limit, int64_t first, bool add) {
  std::atomic_ref<int64_t> lowest(*bad);
  parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
    int64_t mine = kNoneBad;
    for (int64_t i = begin; i < end; ++i) {
      const double v = static_cast<double>(x[i]);
      const bool good = std::abs(v) < limit;
      const int64_t fixed = good ? static_cast<int64_t>(std::llrint(v * kFixedOne)) : 0;
      if (!good) mine = std::min(mine, first + i);
      sums[i] = add ? sums[i] + fixed : fixed;
    }
    for (int64_t now = lowest; mine < now && !lowest.compare_exchange_weak(now, mine);) {
    }
  });
}

void add_fixed(Context& ctx, Tensor sums, Tensor bad, const Tensor& x, double limit, int64_t first,
               Into into) {
  if (ctx.dry_run) return;
  const auto run = [&](const auto* p) {
    add_elements(fixed_data(sums), fixed_data(bad), p, x.numel(), limit, first, into == Into::add);
  };
  x.dtype == DType::f64 ? run(x.as<double>()) : run(x.as<float>());
}

void sum_fixed_rows(Context& ctx, Tensor sum, const Tensor& rows) {
  if (ctx.dry_run) return;
  const int64_t count = rows.dim(0), n = sum.dim(0);
  int64_t* const out = fixed_data(sum);
  const int64_t* const all = fixed_data(rows);
  parallel_for(n, kGrain, [=](int64_t begin, int64_t end) {
    std::fill(out + begin, out + end, 0);
    for (int64_t r = 0; r < count; ++r)
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) out[i] += all[r * n + i];
  });
}

void from_fixed(Context& ctx, Tensor x, const Tensor& sums) {
  if (ctx.dry_run) return;
  const auto run = [&](auto* out) {
    const int64_t* const in = fixed_data(sums);
    parallel_for(x.numel(), kGrain, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        out[i] = static_cast<std::remove_pointer_t<decltype(out)>>(static_cast<double>(in[i]) / kFixedOne);
    });
  };
  x.dtype == DType::f64 ? run(x.as<double>()) : run(x.as<float>());
}

#include "ops/cpu/isa_end.h"
