#include "ops/indexer.h"

#include <algorithm>

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(select_keys)
SLUICE_DECLARE_BACKENDS(block_means)
SLUICE_DECLARE_BACKENDS(block_means_backward)
SLUICE_DECLARE_BACKENDS(index_loss)

namespace sluice {
namespace {

void check_inputs(const char* op, const IndexInputs& in) {
  check_floating(op, "q", in.q);
  SLUICE_CHECK(in.q.rank == 3, "{}: q must be (Tq, J, d), got {}", op, in.q.describe());
  const int64_t tq = in.q.dim(0), heads = in.q.dim(1);
  SLUICE_CHECK(in.k.rank == 2 && in.k.dim(0) >= tq, "{}: k must be (Tk, d) with Tk >= {}, got {}", op, tq,
               in.k.describe());
  check_tensor(op, "k", in.k, in.q.dtype, {in.k.dim(0), in.q.dim(2)});
  SLUICE_CHECK(bool(in.w) == (in.head_weights != IndexHeadWeights::none),
               "{}: w must be given if, and only if, there are head weights", op);
  if (in.w) check_tensor(op, "w", in.w, in.q.dtype, {tq, heads});
  if (in.bias) check_tensor(op, "bias", in.bias, in.q.dtype, {heads});
  if (in.w_bias) check_tensor(op, "w_bias", in.w_bias, in.q.dtype, {heads});
  check_tensor(op, "first_key", in.first_key, DType::i32, {tq});
  if (in.own_key) check_tensor(op, "own_key", in.own_key, DType::i32, {tq});
  SLUICE_CHECK(in.block >= 1, "{}: block must be at least 1, got {}", op, in.block);
  SLUICE_CHECK(in.sets >= 1 && heads % in.sets == 0, "{}: {} index heads do not divide into {} sets", op,
               heads, in.sets);
}

void check_selection(const char* op, const Selection& s, const IndexInputs& in) {
  const int64_t tq = in.q.dim(0);
  SLUICE_CHECK(s.first.rank == 3, "{}: selection must be (G, Tq, room), got {}", op, s.first.describe());
  check_tensor(op, "selection", s.first, DType::i32, {in.sets, tq, s.first.dim(2)});
  check_tensor(op, "selection's count", s.count, DType::i32, {in.sets, tq});
  SLUICE_CHECK(s.block == in.block, "{}: selection is of blocks of {}, scores of {}", op, s.block, in.block);
}

void check_sums(const char* op, const Tensor& sums) {
  if (sums) check_tensor(op, "sums", sums, DType::f64, {kIndexSums});
}

}  // namespace

bool Selection::contains(int64_t set, int64_t t, int64_t s) const {
  const int64_t row = set * first.dim(1) + t;
  const int32_t* const begin = first.as<int32_t>() + row * first.dim(2);
  const int32_t* const after =
      std::upper_bound(begin, begin + count.as<int32_t>()[row], static_cast<int32_t>(s));
  return after != begin && s < after[-1] + block;
}

void select_keys(Context& ctx, const Selection& out, const IndexInputs& in, const Budget& budget,
                 const Tensor& mean_variance, Tensor sums, const char* where, const Tensor& targets) {
  const char* op = "select_keys";
  check_inputs(op, in);
  check_selection(op, out, in);
  check_sums(op, sums);
  const int64_t room = selection_room(budget.most(), in.k.dim(0), in.block);
  SLUICE_CHECK(out.first.dim(2) >= room, "{}: selection has room for {}, but needs {}", op, out.first.dim(2),
               room);
  SLUICE_CHECK(budget.base >= 1 && budget.most() >= 1, "{}: a query selects at least 1 key", op);
  if (mean_variance) check_tensor(op, "mean_variance", mean_variance, mean_variance.dtype, {1});
  if (targets) check_tensor(op, "targets", targets, DType::i32, {in.q.dim(0)});
  SLUICE_DISPATCH(select_keys, ctx, out, in, budget, mean_variance, sums, where, targets);
}

void block_means(Context& ctx, Tensor y, const Tensor& x, const Tensor& first_key, int64_t block) {
  check_floating("block_means", "x", x);
  check_like("block_means", "y", y, x);
  check_tensor("block_means", "first_key", first_key, DType::i32, {x.dim(0)});
  SLUICE_DISPATCH(block_means, ctx, y, x, first_key, block);
}

void block_means_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& first_key, int64_t block) {
  check_floating("block_means_backward", "dy", dy);
  check_like("block_means_backward", "dx", dx, dy);
  check_tensor("block_means_backward", "first_key", first_key, DType::i32, {dy.dim(0)});
  SLUICE_DISPATCH(block_means_backward, ctx, dx, dy, first_key, block);
}

void index_loss(Context& ctx, const IndexGrads& grads, Tensor sums, const IndexInputs& in,
                const IndexTarget& target, const Selection* selection, const IndexLoss& loss) {
  const char* op = "index_loss";
  check_inputs(op, in);
  check_sums(op, sums);
  const int64_t tokens = in.q.dim(0), heads = in.q.dim(1);
  const DType wide = accumulate_dtype(in.q.dtype);
  SLUICE_CHECK(in.k.dim(0) == tokens || in.own_key, "{}: {} queries and {} keys must be equally many", op,
               tokens, in.k.dim(0));
  if (selection) check_selection(op, *selection, in);
  check_like(op, "dq", grads.dq, in.q);
  check_like(op, "dk", grads.dk, in.k);
  if (in.w) check_like(op, "dw", grads.dw, in.w);
  if (in.bias) check_tensor(op, "dbias", grads.dbias, wide, {heads});
  if (in.w_bias) check_tensor(op, "dw_bias", grads.dw_bias, wide, {heads});
  if (loss.log_temperature) {
    check_tensor(op, "log_temperature", loss.log_temperature, in.q.dtype, {1});
    check_tensor(op, "dlog_temperature", grads.dlog_temperature, wide, {1});
  }
  check_tensor(op, "gradient_scale", loss.gradient_scale, DType::f64, {1});
  const Tensor &q = target.q, &k = target.k;
  SLUICE_CHECK(q.rank == 3 && q.dim(0) == tokens, "{}: attention's q must be ({}, H, D), got {}", op, tokens,
               q.describe());
  SLUICE_CHECK(k.rank == 3 && q.dim(1) % k.dim(1) == 0 && k.dim(1) % in.sets == 0,
               "{}: attention's k {} does not go with {} heads and {} index sets", op, k.describe(), q.dim(1),
               in.sets);
  check_tensor(op, "attention's q", q, in.q.dtype, {tokens, q.dim(1), q.dim(2)});
  check_tensor(op, "attention's k", k, in.q.dtype, {in.k.dim(0), k.dim(1), q.dim(2)});
  check_tensor(op, "lse", target.lse, wide, {q.dim(1), tokens});
  check_tensor(op, "targets", target.targets, DType::i32, {tokens});
  SLUICE_DISPATCH(index_loss, ctx, grads, sums, in, target, selection, loss);
}

}  // namespace sluice
