#pragma once
#include <optional>
#include <string>

#include "nn/rmsnorm.h"

namespace sluice {

/// Transformation of attention's output before its gates: RMSNorm of every head
/// (model.attention.output_norm), then SiLU (model.attention.output_activation); the identity without both.
class OutputTransform {
 public:
  struct Saved {
    RmsNorm::Saved norm;  // y (T, H, D); x itself without a norm
    Tensor y;             // (T, H, D); norm.y itself without an activation
  };

  /// `name`: name of the norm's weight, (D) shared by the heads or (H, D).
  OutputTransform(const ModelConfig& config, ParamStore& store, const std::string& name);
  bool identity() const { return !norm_ && !silu_; }
  /// x: the input of forward, (T, H, D); may be empty if this is the identity.
  Saved make_saved(Arena& arena, const std::string& name, const Tensor& x) const;

  /// s.y from x.
  void forward(Context& ctx, const Tensor& x, Saved& s) const;
  /// dx is overwritten and may alias dy; the identity does not touch it.
  void backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Saved& s) const;

 private:
  std::optional<RmsNorm> norm_;
  bool silu_;
};
static_assert(Layer<OutputTransform>);

}  // namespace sluice
