#include "ops/bias.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(bias_forward)
SLUICE_DECLARE_BACKENDS(bias_backward)
SLUICE_DECLARE_BACKENDS(bias_backward_weights)

namespace sluice {
namespace {

/// y (any, N) and, with an index, the number of rows that it has.
void check_rows(const char* op, const char* name, const Tensor& y, const Tensor& index,
                const BiasRows& rows) {
  check_floating(op, name, y);
  SLUICE_CHECK(y.rank == 2, "{}: {} must be (R, N), got {}", op, name, y.describe());
  const int64_t R = index ? index.dim(0) : y.dim(0);
  if (index) check_tensor(op, "index", index, DType::i32, {R});
  if (rows.offsets)
    SLUICE_CHECK(rows.offsets.rank == 1 && rows.offsets.dim(0) >= 2 && rows.offsets.dtype == DType::i32,
                 "{}: offsets must be (G + 1) i32, got {}", op, rows.offsets.describe());
  SLUICE_CHECK(rows.weights.empty() == rows.slots.empty(), "{}: weights and slots belong together", op);
  if (rows.slots) check_tensor(op, "slots", rows.slots, DType::i32, {R});
}

int64_t biases(const BiasRows& rows) { return rows.offsets ? rows.offsets.dim(0) - 1 : 1; }

}  // namespace

void bias_forward(Context& ctx, Tensor y, const Tensor& bias, const BiasRows& rows) {
  const char* op = "bias_forward";
  check_rows(op, "y", y, Tensor(), rows);
  check_floating(op, "bias", bias);
  SLUICE_CHECK(y.dtype == bias.dtype || y.dtype == accumulate_dtype(bias.dtype), "{}: y is {}, the bias {}",
               op, dtype_name(y.dtype), dtype_name(bias.dtype));
  check_count(op, "bias", bias, bias.dtype, biases(rows) * y.dim(1));
  if (rows.weights)
    check_count(op, "weights", rows.weights, accumulate_dtype(bias.dtype), rows.weights.numel());
  SLUICE_DISPATCH(bias_forward, ctx, y, bias, rows);
}

void bias_backward(Context& ctx, Tensor dbias, const Tensor& dy, const Tensor& index, const BiasRows& rows) {
  const char* op = "bias_backward";
  check_rows(op, "dy", dy, index, rows);
  check_count(op, "dbias", dbias, accumulate_dtype(dy.dtype), biases(rows) * dy.dim(1));
  if (rows.weights) check_count(op, "weights", rows.weights, dbias.dtype, rows.weights.numel());
  SLUICE_DISPATCH(bias_backward, ctx, dbias, dy, index, rows);
}

void bias_backward_weights(Context& ctx, Tensor dweights, const Tensor& dy, const Tensor& index,
                           const Tensor& bias, const BiasRows& rows) {
  const char* op = "bias_backward_weights";
  check_rows(op, "dy", dy, index, rows);
  SLUICE_CHECK(!rows.weights.empty(), "{}: without weights", op);
  check_count(op, "weights", rows.weights, accumulate_dtype(dy.dtype), rows.weights.numel());
  check_like(op, "dweights", dweights, rows.weights);
  check_count(op, "bias", bias, dy.dtype, biases(rows) * dy.dim(1));
  SLUICE_DISPATCH(bias_backward_weights, ctx, dweights, dy, index, bias, rows);
}

}  // namespace sluice
