#include "ops/router.h"

#include <algorithm>

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(router_logits_forward)
SLUICE_DECLARE_BACKENDS(router_logits_backward)
SLUICE_DECLARE_BACKENDS(route_forward)
SLUICE_DECLARE_BACKENDS(route_backward)
SLUICE_DECLARE_BACKENDS(router_load)

namespace sluice {
namespace {

void check_logits(const char* op, const Tensor& logits, const Tensor& x, const LinearWeight& w) {
  const Tensor& weight = w.value;
  check_floating(op, "x", x);
  SLUICE_CHECK(x.rank == 2, "{}: x must be (T, C), got {}", op, x.describe());
  SLUICE_CHECK(weight.rank == 2, "{}: weight must be (E, C), got {}", op, weight.describe());
  check_tensor(op, "weight", weight, x.dtype, {weight.dim(0), x.dim(1)});
  check_tensor(op, "logits", logits, accumulate_dtype(x.dtype), {x.dim(0), weight.dim(0)});
}

/// probabilities (T, E), weights and experts (T, K), lse (T).
void check_route(const char* op, const Tensor& probabilities, const Tensor& lse, const Tensor& weights,
                 const Tensor& experts) {
  check_floating(op, "probabilities", probabilities);
  SLUICE_CHECK(probabilities.rank == 2 && probabilities.dtype != DType::bf16,
               "{}: probabilities must be (T, E) f32 or f64, got {}", op, probabilities.describe());
  SLUICE_CHECK(experts.rank == 2, "{}: experts must be (T, K), got {}", op, experts.describe());
  const int64_t T = probabilities.dim(0), E = probabilities.dim(1), K = experts.dim(1);
  SLUICE_CHECK(E >= 1 && E <= kMaxExperts && K >= 1 && K <= std::min(E, kMaxExpertsPerToken),
               "{}: {} of {} experts; at most {} of {}", op, K, E, kMaxExpertsPerToken, kMaxExperts);
  check_tensor(op, "experts", experts, DType::i32, {T, K});
  check_tensor(op, "weights", weights, probabilities.dtype, {T, K});
  check_tensor(op, "lse", lse, probabilities.dtype, {T});
}

}  // namespace

void router_logits_forward(Context& ctx, Tensor logits, const Tensor& x, const LinearWeight& weight) {
  check_logits("router_logits_forward", logits, x, weight);
  SLUICE_DISPATCH(router_logits_forward, ctx, logits, x, weight);
}

void router_logits_backward(Context& ctx, Tensor dx, Tensor dweight, const Tensor& dlogits, const Tensor& x,
                            const LinearWeight& weight, Into into) {
  check_logits("router_logits_backward", dlogits, x, weight);
  check_like("router_logits_backward", "dx", dx, x);
  check_tensor("router_logits_backward", "dweight", dweight, accumulate_dtype(x.dtype),
               {weight.value.dim(0), weight.value.dim(1)});
  SLUICE_DISPATCH(router_logits_backward, ctx, dx, dweight, dlogits, x, weight, into);
}

void route_forward(Context& ctx, Tensor probabilities, Tensor lse, Tensor weights, Tensor experts,
                   const Tensor& logits, bool norm_topk_prob) {
  check_route("route_forward", probabilities, lse, weights, experts);
  check_like("route_forward", "logits", logits, probabilities);
  SLUICE_DISPATCH(route_forward, ctx, probabilities, lse, weights, experts, logits, norm_topk_prob);
}

void route_backward(Context& ctx, Tensor dlogits, const Tensor& dweights, const Tensor& probabilities,
                    const Tensor& lse, const Tensor& weights, const Tensor& experts, const Tensor& counts,
                    bool norm_topk_prob, const RouterLossScale& scale) {
  check_route("route_backward", probabilities, lse, weights, experts);
  check_like("route_backward", "dlogits", dlogits, probabilities);
  check_like("route_backward", "dweights", dweights, weights);
  check_tensor("route_backward", "counts", counts, DType::f64, {probabilities.dim(1)});
  if (scale.token_weight) check_tensor("route_backward", "token_weight", scale.token_weight, DType::f64, {1});
  SLUICE_DISPATCH(route_backward, ctx, dlogits, dweights, probabilities, lse, weights, experts, counts,
                  norm_topk_prob, scale);
}

void router_load(Context& ctx, Tensor counts, Tensor totals, const Tensor& offsets,
                 const Tensor& probabilities, const Tensor& lse, const Tensor& experts,
                 const Tensor& targets) {
  const char* op = "router_load";
  check_floating(op, "probabilities", probabilities);
  SLUICE_CHECK(probabilities.rank == 2, "{}: probabilities must be (T, E), got {}", op,
               probabilities.describe());
  const int64_t num_experts = probabilities.dim(1);
  check_tensor(op, "lse", lse, probabilities.dtype, {probabilities.dim(0)});
  check_tensor(op, "counts", counts, DType::f64, {num_experts});
  check_tensor(op, "offsets", offsets, DType::i32, {num_experts + 1});
  if (totals) check_tensor(op, "totals", totals, DType::f64, {router_totals_size(num_experts)});
  if (targets) {
    check_tensor(op, "targets", targets, DType::i32, {probabilities.dim(0)});
    SLUICE_CHECK(experts.rank == 2, "{}: experts must be (T, K), got {}", op, experts.describe());
    check_tensor(op, "experts", experts, DType::i32, {probabilities.dim(0), experts.dim(1)});
  }
  SLUICE_DISPATCH(router_load, ctx, counts, totals, offsets, probabilities, lse, experts, targets);
}

}  // namespace sluice
