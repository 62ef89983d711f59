#include "ops/switch_heads.h"

#include <algorithm>

#include "core/kinds.h"
#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(switch_heads_forward)
SLUICE_DECLARE_BACKENDS(switch_heads_backward)

namespace sluice {
namespace {

/// Inputs of forward and backward, of one storage type.
void check_experts(const char* op, const Tensor& v, const Tensor& chosen, const Tensor& logits,
                   const Tensor& projected) {
  check_floating(op, "logits", logits);
  SLUICE_CHECK(logits.rank == 3, "{}: logits must be (T, H, E), got {}", op, logits.describe());
  const int64_t T = logits.dim(0), H = logits.dim(1), E = logits.dim(2);
  SLUICE_CHECK(v.rank == 3 && v.dtype == logits.dtype && v.dim(0) == T && v.dim(1) == H,
               "{}: a head's channels must be ({}, {}, D) {}, got {}", op, T, H, dtype_name(logits.dtype),
               v.describe());
  SLUICE_CHECK(projected.rank == 4, "{}: projected must be (T, H, E, w), got {}", op, projected.describe());
  const int64_t w = projected.dim(3);
  check_tensor(op, "projected", projected, logits.dtype, {T, H, E, w});
  SLUICE_CHECK(w > 0 && v.dim(2) % w == 0, "{}: an expert's {} channels do not divide the head's {}", op, w,
               v.dim(2));
  SLUICE_CHECK(chosen.rank == 3, "{}: chosen must be (T, H, K), got {}", op, chosen.describe());
  const int64_t K = chosen.dim(2);
  check_tensor(op, "chosen", chosen, DType::i32, {T, H, K});
  SLUICE_CHECK(E >= 1 && E <= kMaxExperts && K >= 1 && K <= std::min(E, kMaxExpertsPerToken),
               "{}: {} of {} experts; at most {} of {}", op, K, E, kMaxExpertsPerToken, kMaxExperts);
}

}  // namespace

void switch_heads_forward(Context& ctx, Tensor v, Tensor chosen, const Tensor& logits,
                          const Tensor& projected) {
  check_experts("switch_heads_forward", v, chosen, logits, projected);
  SLUICE_DISPATCH(switch_heads_forward, ctx, v, chosen, logits, projected);
}

void switch_heads_backward(Context& ctx, Tensor dlogits, Tensor dprojected, const Tensor& dv,
                           const Tensor& logits, const Tensor& projected, const Tensor& chosen) {
  check_experts("switch_heads_backward", dv, chosen, logits, projected);
  check_like("switch_heads_backward", "dlogits", dlogits, logits);
  check_like("switch_heads_backward", "dprojected", dprojected, projected);
  SLUICE_DISPATCH(switch_heads_backward, ctx, dlogits, dprojected, dv, logits, projected, chosen);
}

}  // namespace sluice
