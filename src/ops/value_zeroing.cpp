#include "ops/value_zeroing.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(zero_first_values)
SLUICE_DECLARE_BACKENDS(take_sink_heads)

namespace sluice {

void zero_first_values(Context& ctx, Tensor out, const Tensor& v, const Tensor& first_key) {
  const char* op = "zero_first_values";
  check_floating(op, "v", v);
  SLUICE_CHECK(v.rank == 3, "{}: v must be (T, Hkv, D), got {}", op, v.describe());
  check_like(op, "out", out, v);
  check_tensor(op, "first_key", first_key, DType::i32, {v.dim(0)});
  SLUICE_DISPATCH(zero_first_values, ctx, out, v, first_key);
}

void take_sink_heads(Context& ctx, Tensor o, const Tensor& other, const Tensor& lse, const Tensor& z0,
                     const Tensor& sink, const Tensor& first_key, const Tensor& targets, double threshold) {
  const char* op = "take_sink_heads";
  check_floating(op, "o", o);
  SLUICE_CHECK(o.rank == 3, "{}: o must be (T, H, D), got {}", op, o.describe());
  check_like(op, "other", other, o);
  check_tensor(op, "lse", lse, accumulate_dtype(o.dtype), {o.dim(1), o.dim(0)});
  check_like(op, "z0", z0, lse);
  if (sink && sink.rank == 2)
    check_like(op, "sink", sink, lse);
  else if (sink)
    check_tensor(op, "sink", sink, o.dtype, {o.dim(1)});
  check_tensor(op, "first_key", first_key, DType::i32, {o.dim(0)});
  check_tensor(op, "targets", targets, DType::i32, {o.dim(0)});
  SLUICE_DISPATCH(take_sink_heads, ctx, o, other, lse, z0, sink, first_key, targets, threshold);
}

}  // namespace sluice
