#pragma once
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "nn/layer.h"
#include "ops/norm_rope.h"
#include "params/param_store.h"

namespace sluice {

/// The residual stream where a norm reads it: `sum` is there already, or, with a and b, a + b, which the norm
/// that reads it first writes there in the same pass over memory.
struct Residual {
  Tensor sum, a{}, b{};
};

/// RMSNorm over the last axis (ops/rmsnorm.h). The weight is initialised to 1 and has no weight decay; with
/// model.norm_weights: false there is none.
class RmsNorm {
 public:
  struct Saved {
    Tensor y;     // shape of x
    Tensor rstd;  // (rows)
  };

  /// shape: {D}, or {G, D} for a weight per head.
  RmsNorm(const ModelConfig& config, ParamStore& store, const std::string& name, std::vector<int64_t> shape);
  /// dims: the shape of x; the last axis is normalised.
  Saved make_saved(Arena& arena, const std::string& name, DType dtype,
                   std::initializer_list<int64_t> dims) const;

  void forward(Context& ctx, const Tensor& x, Saved& s) const;
  void forward(Context& ctx, const Residual& x, Saved& s) const;
  /// dx may alias dy; x is the input of forward.
  void backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Saved& s,
                Into into = Into::overwrite) const;

  /// s.y = rope(norm(x)), for queries and keys (T, H, D).
  void forward_rope(Context& ctx, const Tensor& x, const Tensor& positions, const Tensor& cos,
                    const Tensor& sin, Saved& s) const;
  void backward_rope(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Tensor& positions,
                     const Tensor& cos, const Tensor& sin, const Saved& s) const;
  /// backward_rope's arguments for an op that does it; empty where the weight's gradient is not the sum over
  /// the op's tokens (params/token_rows.h).
  std::optional<PositionBackward> rope_arguments(const Tensor& dx, const Tensor& x, const Tensor& positions,
                                                 const Tensor& cos, const Tensor& sin, const Saved& s) const;

 private:
  /// Empty without weights.
  Tensor weight() const { return weight_ ? store_.value(*weight_) : Tensor(); }
  Tensor dweight() const { return weight_ ? store_.grad(*weight_) : Tensor(); }

  ParamStore& store_;
  std::optional<ParamStore::Id> weight_;
  double eps_;
};
static_assert(Layer<RmsNorm>);

}  // namespace sluice
