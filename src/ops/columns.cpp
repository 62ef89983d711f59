#include "ops/columns.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(add_columns)
SLUICE_DECLARE_BACKENDS(put_columns)
SLUICE_DECLARE_BACKENDS(take_columns)

namespace sluice {
namespace {

void check_columns(const char* op, const Tensor& whole, const Tensor& part, int64_t begin) {
  check_floating(op, "part", part);
  SLUICE_CHECK(whole.contiguous() && whole.rank == 2 && part.rank == 2 && whole.dtype == part.dtype &&
                   whole.dim(0) == part.dim(0) && begin >= 0 && begin + part.dim(1) <= whole.dim(1),
               "{}: {} from column {} on is no part of {}", op, part.describe(), begin, whole.describe());
}

}  // namespace

void add_columns(Context& ctx, Tensor y, const Tensor& part, int64_t begin) {
  check_columns("add_columns", y, part, begin);
  SLUICE_DISPATCH(add_columns, ctx, y, part, begin);
}

void put_columns(Context& ctx, Tensor y, const Tensor& part, int64_t begin) {
  check_columns("put_columns", y, part, begin);
  SLUICE_DISPATCH(put_columns, ctx, y, part, begin);
}

void take_columns(Context& ctx, Tensor part, const Tensor& x, int64_t begin) {
  check_columns("take_columns", x, part, begin);
  SLUICE_DISPATCH(take_columns, ctx, part, x, begin);
}

}  // namespace sluice
