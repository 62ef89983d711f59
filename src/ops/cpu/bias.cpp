// Bound by memory. Forward and the gradients of the factors go over rows; the gradient of the biases over
// blocks of columns of each bias, whose rows a thread sums in order: the number of threads changes nothing.
#include "ops/bias.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "core/parallel_for.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"

namespace {

constexpr int64_t kColumns = 64;  // of a bias that a thread sums at a time

/// BiasRows in terms of pointers; A is the type of the factors.
template <class A>
struct RowsOf {
  const int32_t *offsets, *slots, *index;
  const A* weights;
  int64_t groups, all;  // rows, where there are no offsets

  RowsOf(const BiasRows& rows, const Tensor& row_index, int64_t num_rows)
      : offsets(rows.offsets ? rows.offsets.as<int32_t>() : nullptr),
        slots(rows.slots ? rows.slots.as<int32_t>() : nullptr),
        index(row_index ? row_index.as<int32_t>() : nullptr),
        weights(rows.weights ? rows.weights.as<A>() : nullptr),
        groups(rows.offsets ? rows.offsets.dim(0) - 1 : 1),
        all(row_index ? row_index.dim(0) : num_rows) {}

  int64_t begin(int64_t g) const { return offsets ? offsets[g] : 0; }
  int64_t end(int64_t g) const { return offsets ? offsets[g + 1] : all; }
  A weight(int64_t r) const { return weights ? weights[slots[r]] : A(1); }
  int64_t at(int64_t r) const { return index ? index[r] : r; }

  /// Calls body(row, its bias) for all rows that have one, over threads.
  template <class Body>
  void for_each(int64_t width, Body&& body) const {
    const int64_t first = begin(0), last = end(groups - 1);
    parallel_for(last - first, 16384 / std::max<int64_t>(width, 1) + 1, [&](int64_t from, int64_t to) {
      int64_t g = 0;
      for (int64_t r = first + from; r < first + to; ++r) {
        while (r >= end(g)) ++g;
        body(r, g);
      }
    });
  }
};

template <class Y, class B>
void add_biases(const Tensor& y, const Tensor& bias, const BiasRows& rows) {
  using A = accumulate_t<B>;
  const int64_t width = y.dim(1);
  const RowsOf<A> of(rows, Tensor(), y.dim(0));
  of.for_each(width, [&](int64_t r, int64_t g) {
    Y* to = y.as<Y>() + r * width;
    const B* from = bias.as<B>() + g * width;
    const A weight = of.weight(r);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) store(to + i, load(to + i) + weight * load(from + i));
  });
}

}  // namespace

void bias_forward(Context& ctx, Tensor y, const Tensor& bias, const BiasRows& rows) {
  if (ctx.dry_run) return;
  with_storage_type(bias.dtype, [&](auto tag) {
    using B = decltype(tag);
    if (y.dtype == bias.dtype) return add_biases<B, B>(y, bias, rows);
    add_biases<accumulate_t<B>, B>(y, bias, rows);
  });
}

void bias_backward(Context& ctx, Tensor dbias, const Tensor& dy, const Tensor& index, const BiasRows& rows) {
  if (ctx.dry_run) return;
  with_storage_type(dy.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const int64_t width = dy.dim(1), blocks = (width + kColumns - 1) / kColumns;
    const RowsOf<A> of(rows, index, dy.dim(0));
    parallel_for(of.groups * blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t g = unit / blocks, first = unit % blocks * kColumns,
                      n = std::min(kColumns, width - first);
        std::array<A, kColumns> sums = {};
        for (int64_t r = of.begin(g); r < of.end(g); ++r) {
          const T* from = dy.as<T>() + of.at(r) * width + first;
          const A weight = of.weight(r);
#pragma omp simd
          for (int64_t i = 0; i < n; ++i) sums[static_cast<size_t>(i)] += weight * load(from + i);
        }
        A* to = dbias.as<A>() + g * width + first;
        for (int64_t i = 0; i < n; ++i) to[i] += sums[static_cast<size_t>(i)];
      }
    });
  });
}

void bias_backward_weights(Context& ctx, Tensor dweights, const Tensor& dy, const Tensor& index,
                           const Tensor& bias, const BiasRows& rows) {
  if (ctx.dry_run) return;
  with_storage_type(dy.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const int64_t width = dy.dim(1);
    const RowsOf<A> of(rows, index, dy.dim(0));
    of.for_each(width, [&](int64_t r, int64_t g) {
      const T *from = dy.as<T>() + of.at(r) * width, *b = bias.as<T>() + g * width;
      A sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < width; ++i) sum += load(from + i) * load(b + i);
      dweights.as<A>()[of.slots[r]] += sum;
    });
  });
}

#include "ops/cpu/isa_end.h"
