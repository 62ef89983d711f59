#pragma once
#include <string>
#include <variant>

#include "nn/mlp.h"
#include "nn/moe.h"

namespace sluice {

/// The feed-forward network of a block: dense, or a mixture of experts in the layers that model.moe selects.
class FeedForward {
 public:
  struct Saved {
    std::variant<Mlp::Saved, Moe::Saved> of;  // as the layer is
    Tensor y;                                 // (T, C)
  };

  FeedForward(const ModelConfig& config, ParamStore& store, const std::string& prefix, int64_t layer,
              const ExpertRanks& experts = {});
  Saved make_saved(Arena& arena, const std::string& name, int64_t num_tokens, DType dtype,
                   bool keep_inner) const;

  /// s.y from x (T, C).
  void forward(Context& ctx, const Tensor& x, const RouterLoad& load, Saved& s) const;
  /// dx (T, C) overwritten.
  void backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const RouterLoad& load,
                const Saved& s) const;

  Flops flops() const;
  bool has_experts() const { return std::holds_alternative<Moe>(layer_); }

 private:
  std::variant<Mlp, Moe> layer_;
};
static_assert(Layer<FeedForward, RouterLoad>);

}  // namespace sluice
