#pragma once
#include "params/param_store.h"

namespace sluice {

/// Floating-point operations of one token's forward pass through a layer, two for each multiply-add of a
/// matrix product. What lies between the products (norms, gates, softmax, rotation) is not counted, as is
/// custom (Kaplan et al. 2020, section 2.1; Chowdhery et al. 2022, appendix B).
struct Flops {
  double trained = 0;      // with weights that are trained: backward takes as many again for the input's
                           // gradient, and for the weight's
  double frozen = 0;       // with frozen weights: backward takes as many for the input's gradient alone
  double activations = 0;  // of activations with each other, scores and weighted values: backward twice
  double forward_only = 0;  // of activations with each other, of which backward needs nothing

  double forward() const { return trained + frozen + activations + forward_only; }
  double backward() const { return 2 * trained + frozen + 2 * activations; }
  Flops& operator+=(const Flops& other) {
    trained += other.trained;
    frozen += other.frozen;
    activations += other.activations;
    forward_only += other.forward_only;
    return *this;
  }
};
inline Flops operator+(Flops a, const Flops& b) { return a += b; }
/// Of several products alike.
inline Flops operator*(double times, const Flops& f) {
  return {times * f.trained, times * f.frozen, times * f.activations, times * f.forward_only};
}

/// One token's product with a matrix of the store, and with its adapters where it has some. For a joined
/// group: `matrix` is the first, and the others are asked for by themselves.
inline Flops product_flops(const ParamStore& store, ParamStore::Id matrix) {
  const double flops = 2.0 * static_cast<double>(store.numel(matrix));
  Flops out = store.trains(matrix) ? Flops{.trained = flops} : Flops{.frozen = flops};
  for (const ParamStore::Adapter& adapter : store.adapters(matrix))
    out.trained += 2.0 * static_cast<double>(store.numel(adapter.a) + store.numel(adapter.b));
  return out;
}

}  // namespace sluice
