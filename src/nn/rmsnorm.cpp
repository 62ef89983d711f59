#include "nn/rmsnorm.h"

#include "nn/weight_gradient.h"
#include "ops/rmsnorm.h"

namespace sluice {
namespace {

/// rstd of the rows that operand() makes of x's tokens, which may have several rows each.
template <class Operand>
Tensor by_row(const Operand& operand, const Tensor& x, const RmsNorm::Saved& s) {
  const Tensor rstd = operand(s.rstd.view({x.dim(0), s.rstd.numel() / x.dim(0)}));
  return rstd.view({rstd.numel()});
}

}  // namespace

RmsNorm::RmsNorm(const ModelConfig& config, ParamStore& store, const std::string& name,
                 std::vector<int64_t> shape)
    : store_(store), eps_(config.rms_norm_eps) {
  if (config.norm_weights)
    weight_ = store.add(
        {.name = name, .shape = std::move(shape), .init = Init::constant(1), .weight_decay = false});
}

RmsNorm::Saved RmsNorm::make_saved(Arena& arena, const std::string& name, DType dtype,
                                   std::initializer_list<int64_t> dims) const {
  const Tensor y = arena.alloc(name, dtype, dims);
  return {.y = y, .rstd = arena.alloc(name + ".rstd", accumulate_dtype(dtype), {y.numel() / y.dim(-1)})};
}

void RmsNorm::forward(Context& ctx, const Tensor& x, Saved& s) const {
  rmsnorm_forward(ctx, s.y, s.rstd, x, weight(), eps_);
}

void RmsNorm::forward(Context& ctx, const Residual& x, Saved& s) const {
  if (x.a)
    add_rmsnorm_forward(ctx, x.sum, s.y, s.rstd, x.a, x.b, weight(), eps_);
  else
    forward(ctx, x.sum, s);
}

void RmsNorm::backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Saved& s,
                       Into into) const {
  backward_with_parameter(ctx, store_, dx, dweight(),
                          [&](const Tensor& to, const Tensor& dw, const auto& operand) {
                            const Tensor of_dy = operand(dy), of_x = operand(x);
                            rmsnorm_backward(ctx, to, dw, of_dy, of_x, weight(), by_row(operand, x, s), into);
                          });
}

void RmsNorm::forward_rope(Context& ctx, const Tensor& x, const Tensor& positions, const Tensor& cos,
                           const Tensor& sin, Saved& s) const {
  norm_rope_forward(ctx, s.y, s.rstd, x, weight(), eps_, positions, cos, sin);
}

void RmsNorm::backward_rope(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x,
                            const Tensor& positions, const Tensor& cos, const Tensor& sin,
                            const Saved& s) const {
  backward_with_parameter(
      ctx, store_, dx, dweight(), [&](const Tensor& to, const Tensor& dw, const auto& operand) {
        const Tensor of_dy = operand(dy), of_x = operand(x), of_positions = operand(positions);
        norm_rope_backward(ctx, to, dw, of_dy, of_x, weight(), by_row(operand, x, s), of_positions, cos, sin);
      });
}

std::optional<PositionBackward> RmsNorm::rope_arguments(const Tensor& dx, const Tensor& x,
                                                        const Tensor& positions, const Tensor& cos,
                                                        const Tensor& sin, const Saved& s) const {
  if (store_.token_rows() && weight_) return {};
  return PositionBackward{dx, dweight(), x, weight(), s.rstd, positions, cos, sin};
}

}  // namespace sluice
