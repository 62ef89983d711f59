#pragma once
#include "ops/low_rank.h"
#include "params/param_store.h"

namespace sluice {

/// Accumulates the gradient of y = x W^T with respect to the trainable part of W: W itself, its adapters, or
/// nothing. W is a matrix or a joined group, given by its first matrix. dy (T, N), x (T, K).
inline void weight_backward(Context& ctx, const ParamStore& store, ParamStore::Id first, const Tensor& dy,
                            const Tensor& x) {
  if (store.trains(first)) return linear_backward_weight(ctx, store.joined_grad(first), dy, x);
  const std::vector<LowRank>& low_rank = store.joined(first).low_rank;
  for (size_t i = 0; i < low_rank.size(); ++i) {
    const ParamStore::Adapter& adapter = store.adapters(first)[i];
    if (!store.trains(adapter.a) && !store.trains(adapter.b)) continue;
    low_rank_backward_weight(ctx, store.grad(adapter.a), store.grad(adapter.b), dy, x, low_rank[i]);
  }
}

}  // namespace sluice
