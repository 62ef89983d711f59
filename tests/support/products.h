#pragma once
// Whether the matrix library computes the same bits with any number of threads. oneDNN does on processors
// with AVX-512; with AVX2 alone it may divide the sum of a product between the threads, and results agree to
// rounding (measured on an AMD EPYC).
#include <cmath>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "core/context.h"
#include "core/parallel_for.h"
#include "ops/linear.h"

namespace sluice::test {

/// Products in f32, forward and backward, of shapes that tests have.
inline std::vector<float> products_with(int threads) {
  set_num_threads(threads);
  Context ctx(64 << 20);
  std::vector<float> all;
  const std::pair<int64_t, int64_t> shapes[] = {{96, 96},  {48, 96},  {160, 96},
                                                {96, 160}, {300, 96}, {64, 24}};
  for (const int64_t T : {301, 601})
    for (const auto& [out, in] : shapes) {
      Arena arena("products", 8 << 20);
      LinearWeight w;
      w.value = arena.alloc("w", DType::f32, {out, in});
      const Tensor x = arena.alloc("x", DType::f32, {T, in}), y = arena.alloc("y", DType::f32, {T, out});
      const Tensor dx = arena.alloc("dx", DType::f32, {T, in}), dw = arena.alloc("dw", DType::f32, {out, in});
      for (int64_t i = 0; i < x.numel(); ++i) x.as<float>()[i] = std::sin(static_cast<float>(i));
      for (int64_t i = 0; i < dw.numel(); ++i) {
        w.value.as<float>()[i] = std::cos(static_cast<float>(i));
        dw.as<float>()[i] = 0;
      }
      linear_forward(ctx, y, x, w);
      linear_backward_input(ctx, dx, y, w, Into::overwrite);
      linear_backward_weight(ctx, dw, y, x);
      for (const Tensor& t : {y, dx, dw}) all.insert(all.end(), t.as<float>(), t.as<float>() + t.numel());
    }
  return all;
}

inline bool products_keep_bits_over_threads() {
  static const bool keep = [] {
    const int threads = num_threads();
    const std::vector<float> one = products_with(1);
    const bool same = one == products_with(2) && one == products_with(3);
    set_num_threads(threads);
    return same;
  }();
  return keep;
}

}  // namespace sluice::test
