// The products of Newton-Schulz dominate the time. They run on OpenBLAS in chunks of rows of fixed size, each
// by one thread, so that bits do not depend on the number of threads; of symmetric results one triangle is
// computed and mirrored.
#include "ops/muon.h"

#include <cblas.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/parallel_for.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"
#include "ops/cpu/convert.h"

namespace {

constexpr int64_t kRows = 96, kGrain = 8192;
constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;

/// A row-major matrix, or its transpose.
template <class T>
struct Operand {
  const T* data;
  int64_t stride;
  bool transposed = false;
  const T* row(int64_t r) const { return data + (transposed ? r : r * stride); }
};

void gemm(const Operand<float>& a, const Operand<float>& b, float* c, int64_t c_stride, int64_t m, int64_t n,
          int64_t k) {
  cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
              b.transposed ? CblasTrans : CblasNoTrans, static_cast<int>(m), static_cast<int>(n),
              static_cast<int>(k), 1.0f, a.data, static_cast<int>(a.stride), b.data,
              static_cast<int>(b.stride), 0.0f, c, static_cast<int>(c_stride));
}
void gemm(const Operand<double>& a, const Operand<double>& b, double* c, int64_t c_stride, int64_t m,
          int64_t n, int64_t k) {
  cblas_dgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
              b.transposed ? CblasTrans : CblasNoTrans, static_cast<int>(m), static_cast<int>(n),
              static_cast<int>(k), 1.0, a.data, static_cast<int>(a.stride), b.data,
              static_cast<int>(b.stride), 0.0, c, static_cast<int>(c_stride));
}

/// c (m, n) = a b. symmetric: m = n and only the columns up to a chunk's last row.
template <class T>
void product(const Operand<T>& a, const Operand<T>& b, T* c, int64_t m, int64_t n, int64_t k,
             bool symmetric) {
  const int64_t chunks = (m + kRows - 1) / kRows;
  openblas_set_num_threads(1);
  // Pair the first chunk with the last, and so on, so that all pairs of a triangle have equal work.
  parallel_for((chunks + 1) / 2, 1, [&](int64_t begin, int64_t end) {
    const auto chunk = [&](int64_t i) {
      const int64_t row = i * kRows, rows = std::min(kRows, m - row);
      gemm({a.row(row), a.stride, a.transposed}, b, c + row * n, n, rows, symmetric ? row + rows : n, k);
    };
    for (int64_t i = begin; i < end; ++i) {
      chunk(i);
      if (chunks - 1 - i != i) chunk(chunks - 1 - i);
    }
  });
}

/// The upper triangle of a (s, s) from the lower one.
template <class T>
void mirror(T* a, int64_t s) {
  parallel_for(s, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t j = i + 1; j < s; ++j) a[i * s + j] = a[j * s + i];
  });
}

/// from (rows, columns), of norm 1, and to of the same size take turns, the first to be written being `to`; a
/// and p (s, s).
template <class T>
void iterate(T* from, T* to, T* a, T* p, int64_t rows, int64_t columns, int64_t steps) {
  const bool tall = rows > columns;
  const int64_t s = tall ? columns : rows, length = tall ? rows : columns;
  for (int64_t step = 0; step < steps; ++step) {
    const Operand<T> plain{from, columns, false}, transposed{from, columns, true};
    if (tall)
      product(transposed, plain, a, s, s, length, true);
    else
      product(plain, transposed, a, s, s, length, true);
    mirror(a, s);
    product(Operand<T>{a, s}, Operand<T>{a, s}, p, s, s, s, true);
    mirror(p, s);
    parallel_for(s, std::max<int64_t>(kGrain / s, 1), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        T* row = p + i * s;
        const T* in = a + i * s;
#pragma omp simd
        for (int64_t j = 0; j < s; ++j) row[j] = static_cast<T>(kB) * in[j] + static_cast<T>(kC) * row[j];
        row[i] += static_cast<T>(kA);
      }
    });
    if (tall)
      product(plain, Operand<T>{p, s}, to, rows, columns, s, false);
    else
      product(Operand<T>{p, s}, plain, to, rows, columns, s, false);
    std::swap(from, to);
  }
}

template <class T>
void run(Context& ctx, const Tensor& x, const Tensor& squares, int64_t steps) {
  using A = accumulate_t<T>;
  constexpr DType kAccumulate = dtype_of<A>::value;
  constexpr bool kWidens = !std::is_same_v<T, A>;
  const int64_t rows = x.dim(0), columns = x.dim(1), s = std::min(rows, columns);
  ScratchScope t(ctx.scratch);
  const Tensor spare = t.alloc("newton_schulz x", kAccumulate, {rows, columns});
  const Tensor a = t.alloc("newton_schulz a", kAccumulate, {s, s}),
               p = t.alloc("newton_schulz p", kAccumulate, {s, s});
  Tensor wide = x;
  if constexpr (kWidens) wide = t.alloc("newton_schulz wide", kAccumulate, {rows, columns});
  if (ctx.dry_run || x.numel() == 0) return;
  const A factor = static_cast<A>(1 / (std::sqrt(*squares.as<double>()) + 1e-7));
  // So that the last iteration writes to wide.
  A *first = wide.as<A>(), *second = spare.as<A>();
  if (steps % 2 != 0) std::swap(first, second);
  const T* in = x.as<T>();
  parallel_for(x.numel(), kGrain, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) first[i] = load(in + i) * factor;
  });
  iterate(first, second, a.as<A>(), p.as<A>(), rows, columns, steps);
  if constexpr (kWidens) narrow(x.as<T>(), wide.as<A>(), x.numel(), Into::overwrite);
}

}  // namespace

void newton_schulz(Context& ctx, Tensor x, const Tensor& squares, int64_t steps) {
  with_storage_type(x.dtype, [&](auto tag) { run<decltype(tag)>(ctx, x, squares, steps); });
}

void muon_momentum(Context& ctx, Tensor update, Tensor m, const Tensor& gradient, const Tensor& control,
                   const MuonSettings& settings) {
  if (ctx.dry_run) return;
  const UpdateControl& c = *reinterpret_cast<const UpdateControl*>(control.as<double>());
  with_storage_type(update.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    T* out = update.as<T>();
    A* mp = m.as<A>();
    const A* gp = gradient.as<A>();
    const double momentum = settings.momentum_at(c.step);
    const A mu = static_cast<A>(momentum), fresh = static_cast<A>(1 - momentum),
            clip = static_cast<A>(c.clip);
    // u = ahead m + share g, of the new m.
    const A ahead = settings.nesterov ? mu : A(1), share = settings.nesterov ? fresh : A(0);
    if (c.apply == 0) {
      std::fill_n(out, update.numel(), T(0));
      return;
    }
    parallel_for(m.numel(), kGrain, [&](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        const A g = gp[i] * clip, mi = mu * mp[i] + fresh * g;
        mp[i] = mi;
        store(out + i, ahead * mi + share * g);
      }
    });
  });
}

void muon_apply(Context& ctx, Tensor value, Tensor master, const Tensor& update, const Tensor& control,
                double lr_multiplier, double weight_decay) {
  if (ctx.dry_run) return;
  const UpdateControl& c = *reinterpret_cast<const UpdateControl*>(control.as<double>());
  if (c.apply == 0) return;
  const double lr = c.lr * lr_multiplier;
  const double shape =
      std::sqrt(std::max(1.0, static_cast<double>(value.dim(0)) / static_cast<double>(value.dim(1))));
  with_storage_type(value.dtype, [&](auto tag) {
    with_storage_type(update.dtype, [&](auto update_tag) {
      using T = decltype(tag);
      using U = decltype(update_tag);
      using A = accumulate_t<T>;
      if constexpr (std::is_same_v<accumulate_t<U>, A>) {
        const A keep = static_cast<A>(1 - lr * weight_decay), rate = static_cast<A>(lr * shape);
        T* out = value.as<T>();
        const U* up = update.as<U>();
        A* wp = master ? master.as<A>() : nullptr;
        parallel_for(value.numel(), kGrain, [&](int64_t begin, int64_t end) {
          if (wp) {
#pragma omp simd
            for (int64_t i = begin; i < end; ++i) {
              const A w = wp[i] * keep - rate * load(up + i);
              wp[i] = w;
              store(out + i, w);
            }
          } else {
#pragma omp simd
            for (int64_t i = begin; i < end; ++i) store(out + i, load(out + i) * keep - rate * load(up + i));
          }
        });
      }
    });
  });
}

#include "ops/cpu/isa_end.h"
