#pragma once
// Parts of a model by themselves: their parameters, memory and a sequence, for tests of one layer.
#include <random>
#include <string>

#include "nn/sequence.h"
#include "ops/rope.h"
#include "params/param_store.h"
#include "support/gradcheck.h"

namespace sluice::test {

/// The parameters of what was registered in `store`, and memory for activations.
class LayerParts {
 public:
  /// Call once everything is registered. Values are drawn from N(0, 1/4), those that start at 1 around 1.
  void allocate(int64_t tokens, DType dtype = DType::f64) {
    if (store.specs().empty()) return;
    store.allocate(ctx, dtype, tokens, values, &gradients);
    std::mt19937 random(7);
    std::normal_distribution<double> normal(0, 0.5);
    for (size_t i = 0; i < store.specs().size(); ++i) {
      const Tensor value = store.value(static_cast<ParamStore::Id>(i));
      const Init& init = store.specs()[i].init;
      const double mean = init.kind == Init::Kind::constant ? init.value : 0;
      for (int64_t j = 0; j < value.numel(); ++j) Pool::set(value, j, mean + normal(random));
    }
    store.pack(ctx);
    store.zero_grads(ctx);
  }

  /// Of all parameters the largest gradient_error; `loss` computes the forward pass from their values.
  double worst_parameter(const std::function<double()>& loss) {
    double worst = 0;
    for (size_t i = 0; i < store.specs().size(); ++i) {
      const auto id = static_cast<ParamStore::Id>(i);
      const double error = gradient_error(store.value(id), store.grad(id), [&] {
        store.pack(ctx);
        return loss();
      });
      if (!(error <= worst)) worst = error;
    }
    return worst;
  }

  ParamStore store;
  Context ctx{int64_t{1} << 22};
  Arena values{"values", int64_t{1} << 20}, gradients{"gradients", int64_t{1} << 20},
      memory{"memory", int64_t{1} << 22};
};

/// Two documents of 4 and T - 4 tokens, with positions of their own and a rotary table for heads of D.
class TestSequence {
 public:
  TestSequence(Pool& pool, int64_t T, int64_t D, DType dtype = DType::f64) {
    view.positions = pool.zeros(DType::i32, {T});
    view.first_key = pool.zeros(DType::i32, {T});
    for (int64_t t = 0; t < T; ++t) {
      const int64_t first = t < 4 ? 0 : 4;
      Pool::set(view.positions, t, static_cast<double>(t - first));
      Pool::set(view.first_key, t, static_cast<double>(first));
    }
    view.rope_cos = pool.zeros(accumulate_dtype(dtype), {T, D / 2});
    view.rope_sin = pool.zeros(accumulate_dtype(dtype), {T, D / 2});
    rope_table(view.rope_cos, view.rope_sin, 100, {});
  }

  Sequence view;
};

inline bool equal_bits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0;
}

}  // namespace sluice::test
