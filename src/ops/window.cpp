#include "ops/window.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(window_first_key)
SLUICE_DECLARE_BACKENDS(hide_first_logits)
SLUICE_DECLARE_BACKENDS(absolute_first_key)

namespace sluice {

void window_first_key(Context& ctx, Tensor out, const Tensor& first_key, int64_t keys, int64_t window) {
  const char* op = "window_first_key";
  check_tensor(op, "first_key", first_key, DType::i32, {first_key.numel()});
  check_like(op, "out", out, first_key);
  SLUICE_CHECK(keys >= first_key.numel() && window >= 1, "{}: window of {} over {} keys and {} queries", op,
               window, keys, first_key.numel());
  SLUICE_DISPATCH(window_first_key, ctx, out, first_key, keys, window);
}

void hide_first_logits(Context& ctx, Tensor z0, const Tensor& first_key, const Tensor& window_first) {
  const char* op = "hide_first_logits";
  check_floating(op, "z0", z0);
  SLUICE_CHECK(z0.rank == 2 && z0.dtype != DType::bf16, "{}: z0 must be (H, T) of f32 or f64, got {}", op,
               z0.describe());
  check_tensor(op, "first_key", first_key, DType::i32, {z0.dim(1)});
  check_like(op, "window_first", window_first, first_key);
  SLUICE_DISPATCH(hide_first_logits, ctx, z0, first_key, window_first);
}

void absolute_first_key(Context& ctx, Tensor out, const Tensor& first_key, const Tensor& own_key) {
  const char* op = "absolute_first_key";
  check_tensor(op, "first_key", first_key, DType::i32, {first_key.numel()});
  check_like(op, "own_key", own_key, first_key);
  check_like(op, "out", out, first_key);
  SLUICE_DISPATCH(absolute_first_key, ctx, out, first_key, own_key);
}

}  // namespace sluice
