#include "ops/extra_key.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(extra_key_logits)
SLUICE_DECLARE_BACKENDS(extra_key_forward)
SLUICE_DECLARE_BACKENDS(extra_key_backward)
SLUICE_DECLARE_BACKENDS(extra_key_logits_backward)

namespace sluice {
namespace {

/// x: (T, H, D); row: (Hx, D), a key or a value.
void check_row(const char* op, const char* name, const Tensor& x, const Tensor& row) {
  SLUICE_CHECK(row.rank == 2 && row.dtype == x.dtype && row.dim(0) >= 1 && x.dim(1) % row.dim(0) == 0 &&
                   row.dim(1) == x.dim(2),
               "{}: {} must be (Hx, D) for heads {}, got {}", op, name, x.describe(), row.describe());
}

void check_statistics(const char* op, const char* name, const Tensor& x, const Tensor& statistics) {
  check_floating(op, "heads", x);
  SLUICE_CHECK(x.rank == 3, "{}: heads must be (T, H, D), got {}", op, x.describe());
  check_tensor(op, name, statistics, accumulate_dtype(x.dtype), {x.dim(1), x.dim(0)});
}

void check_extra(const char* op, const Tensor& o, const Tensor& lse, const ExtraKey& extra) {
  check_statistics(op, "lse", o, lse);
  check_like(op, "logits", extra.logits, lse);
  if (extra.value) check_row(op, "value", o, extra.value);
}

}  // namespace

void extra_key_logits(Context& ctx, Tensor logits, const Tensor& q, const Tensor& key, double scale) {
  check_statistics("extra_key_logits", "logits", q, logits);
  check_row("extra_key_logits", "key", q, key);
  SLUICE_DISPATCH(extra_key_logits, ctx, logits, q, key, scale);
}

void extra_key_forward(Context& ctx, Tensor y, const Tensor& o, const Tensor& lse, const ExtraKey& extra) {
  check_extra("extra_key_forward", o, lse, extra);
  check_like("extra_key_forward", "y", y, o);
  SLUICE_DISPATCH(extra_key_forward, ctx, y, o, lse, extra);
}

void extra_key_backward(Context& ctx, Tensor d_o, Tensor dlse, Tensor dvalue, const Tensor& dy,
                        const Tensor& o, const Tensor& lse, const ExtraKey& extra) {
  const char* op = "extra_key_backward";
  check_extra(op, o, lse, extra);
  check_like(op, "d_o", d_o, o);
  check_like(op, "dy", dy, o);
  check_like(op, "dlse", dlse, lse);
  if (extra.value) check_count(op, "dvalue", dvalue, lse.dtype, extra.value.numel());
  SLUICE_DISPATCH(extra_key_backward, ctx, d_o, dlse, dvalue, dy, o, lse, extra);
}

void extra_key_logits_backward(Context& ctx, Tensor dq, Tensor dkey, const Tensor& dlse, const Tensor& q,
                               const Tensor& key, double scale) {
  const char* op = "extra_key_logits_backward";
  check_statistics(op, "dlse", q, dlse);
  check_row(op, "key", q, key);
  check_like(op, "dq", dq, q);
  check_count(op, "dkey", dkey, dlse.dtype, key.numel());
  SLUICE_DISPATCH(extra_key_logits_backward, ctx, dq, dkey, dlse, q, key, scale);
}

}  // namespace sluice
