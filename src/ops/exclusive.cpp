#include "ops/exclusive.h"

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/reduce.h"

SLUICE_DECLARE_BACKENDS(exclusive_forward)
SLUICE_DECLARE_BACKENDS(exclusive_backward_rows)

namespace sluice {
namespace {

void check_exclusive(const char* op, const Tensor& y, const Tensor& v, const Tensor& s) {
  check_floating(op, "y", y);
  SLUICE_CHECK(y.rank == 3, "{}: y must be (T, H, D), got {}", op, y.describe());
  SLUICE_CHECK(v.rank == 3 && v.dtype == y.dtype && v.dim(0) == y.dim(0) && v.dim(2) == y.dim(2) &&
                   v.dim(1) > 0 && y.dim(1) % v.dim(1) == 0,
               "{}: v must be ({}, Hkv, {}) {} with Hkv a divisor of {}, got {}", op, y.dim(0), y.dim(2),
               dtype_name(y.dtype), y.dim(1), v.describe());
  if (s) check_tensor(op, "s", s, y.dtype, {y.dim(1)});
}

}  // namespace

void exclusive_forward(Context& ctx, Tensor z, const Tensor& y, const Tensor& v, const Tensor& s,
                       bool normed) {
  check_exclusive("exclusive_forward", y, v, s);
  check_like("exclusive_forward", "z", z, y);
  SLUICE_DISPATCH(exclusive_forward, ctx, z, y, v, s, normed);
}

void exclusive_backward(Context& ctx, Tensor dy, Tensor dv, Tensor ds, const Tensor& dz, const Tensor& y,
                        const Tensor& v, const Tensor& s, bool normed) {
  const char* op = "exclusive_backward";
  check_exclusive(op, y, v, s);
  check_like(op, "dy", dy, y);
  check_like(op, "dz", dz, y);
  check_like(op, "dv", dv, v);
  SLUICE_CHECK(bool(s) == bool(ds), "{}: ds must be given with s, and only then", op);
  if (!s) return exclusive_backward_rows(ctx, dy, dv, {}, dz, y, v, s, normed);
  const DType wide = accumulate_dtype(y.dtype);
  check_tensor(op, "ds", ds, wide, {y.dim(1)});
  ScratchScope t(ctx.scratch);
  const Tensor rows = t.alloc("exclusive.ds", wide, {y.dim(0), y.dim(1)});
  exclusive_backward_rows(ctx, dy, dv, rows, dz, y, v, s, normed);
  sum_rows(ctx, ds, rows, Into::add);
}

void exclusive_backward_rows(Context& ctx, Tensor dy, Tensor dv, Tensor ds_rows, const Tensor& dz,
                             const Tensor& y, const Tensor& v, const Tensor& s, bool normed) {
  SLUICE_DISPATCH(exclusive_backward_rows, ctx, dy, dv, ds_rows, dz, y, v, s, normed);
}

}  // namespace sluice
