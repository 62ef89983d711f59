#include "nn/feed_forward.h"

namespace sluice {

FeedForward::FeedForward(const ModelConfig& config, ParamStore& store, const std::string& prefix,
                         int64_t layer, const ExpertRanks& experts)
    : layer_(config.moe.in_layer(layer)
                 ? std::variant<Mlp, Moe>(std::in_place_type<Moe>, config, store, prefix, layer, experts)
                 : std::variant<Mlp, Moe>(std::in_place_type<Mlp>, config, store, prefix,
                                          config.intermediate_size)) {}

FeedForward::Saved FeedForward::make_saved(Arena& arena, const std::string& name, int64_t num_tokens,
                                           DType dtype, bool keep_inner) const {
  return std::visit(
      [&](const auto& layer) {
        const auto saved = layer.make_saved(arena, name, num_tokens, dtype, keep_inner);
        return Saved{saved, saved.y};
      },
      layer_);
}

Flops FeedForward::flops() const {
  return std::visit([](const auto& layer) { return layer.flops(); }, layer_);
}

void FeedForward::forward(Context& ctx, const Tensor& x, const RouterLoad& load, Saved& s) const {
  if (const Moe* moe = std::get_if<Moe>(&layer_))
    return moe->forward(ctx, x, load, std::get<Moe::Saved>(s.of));
  std::get<Mlp>(layer_).forward(ctx, x, std::get<Mlp::Saved>(s.of));
}

void FeedForward::backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const RouterLoad& load,
                           const Saved& s) const {
  if (const Moe* moe = std::get_if<Moe>(&layer_))
    return moe->backward(ctx, dx, dy, x, load, std::get<Moe::Saved>(s.of));
  std::get<Mlp>(layer_).backward(ctx, dx, dy, x, std::get<Mlp::Saved>(s.of));
}

}  // namespace sluice
