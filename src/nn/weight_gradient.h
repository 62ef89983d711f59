#pragma once
// Gradients of parameters, which are sums over tokens: those that this rank has, or, where ranks share
// sequences and the bits may not depend on how many do, those of all of them (params/token_rows.h).
#include "ops/elementwise.h"
#include "ops/low_rank.h"
#include "params/param_store.h"

namespace sluice {

/// An operand of a parameter's gradient, from this rank's rows (T, ...): they, or in t those of all tokens
/// that the gradient is a sum over. Collective where these are on other ranks.
inline Tensor summed_rows(Context& ctx, ScratchScope& t, const ParamStore& store, const Tensor& rows) {
  const TokenRows* tokens = store.token_rows();
  return tokens ? tokens->whole(ctx, t, rows) : rows;
}

/// Accumulates the gradient of y = x W^T with respect to the trainable part of W: W itself, its adapters, or
/// nothing. W is a matrix or a joined group, given by its first matrix. dy (T, N), x (T, K).
inline void weight_backward(Context& ctx, ParamStore& store, ParamStore::Id first, const Tensor& dy,
                            const Tensor& x) {
  const auto trains = [&](const ParamStore::Adapter& a) { return store.trains(a.a) || store.trains(a.b); };
  const std::vector<LowRank>& low_rank = store.joined(first).low_rank;
  bool any = store.trains(first);
  for (size_t i = 0; i < low_rank.size(); ++i) any = any || trains(store.adapters(first)[i]);
  if (!any) return;
  ScratchScope t(ctx.scratch);
  const Tensor all_dy = summed_rows(ctx, t, store, dy), all_x = summed_rows(ctx, t, store, x);
  if (store.trains(first)) {
    const ParamStore::Sum sum = store.next_sum(first);
    return linear_backward_weight(ctx, sum.to, all_dy, all_x, sum.into);
  }
  for (size_t i = 0; i < low_rank.size(); ++i) {
    const ParamStore::Adapter& adapter = store.adapters(first)[i];
    if (trains(adapter))
      low_rank_backward_weight(ctx, store.grad(adapter.a), store.grad(adapter.b), all_dy, all_x, low_rank[i]);
  }
}

/// For an op that computes dx (T, ...) and, with it, the gradient of a parameter: backward(dx, dparameter,
/// operand), where operand(rows) is what it reads instead of rows (T, ...), which may be dx. dparameter
/// empty: there is none. Where the sum is over more tokens than this rank's, the op runs once for each of the
/// two.
template <class Backward>
void backward_with_parameter(Context& ctx, const ParamStore& store, const Tensor& dx,
                             const Tensor& dparameter, Backward&& backward) {
  const auto own = [](const Tensor& rows) { return rows; };
  if (!store.token_rows() || !dparameter) return backward(dx, dparameter, own);
  ScratchScope t(ctx.scratch);
  {
    ScratchScope whole(ctx.scratch);
    const Tensor unused = store.token_rows()->room(whole, dx);
    fill(ctx, unused, 0);
    backward(unused, dparameter,
             [&](const Tensor& rows) { return store.token_rows()->whole(ctx, whole, rows); });
  }
  const Tensor unused = t.like("gradient of own tokens", dparameter);
  fill(ctx, unused, 0);
  backward(dx, unused, own);
}

}  // namespace sluice
