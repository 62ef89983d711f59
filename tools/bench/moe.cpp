// An MoE layer compared with a dense feed-forward network of the same active width: the cost of routing,
// permutation and grouped products in addition to the arithmetic.
#include "nn/moe.h"

#include <spdlog/fmt/fmt.h>

#include <deque>
#include <memory>

#include "bench/bench.h"
#include "nn/mlp.h"

namespace sluice::bench {
namespace {

struct Shape {
  int64_t tokens, hidden, experts, per_token, width;
};

/// A layer with its parameters and saved tensors; x and dy are normally distributed.
struct Dense {
  ParamStore store;
  Mlp layer;
  Mlp::Saved saved;
  explicit Dense(const ModelConfig& c, const Shape& s) : layer(c, store, "mlp", s.per_token * s.width) {}
  void forward(Context& ctx, const Tensor& x) { layer.forward(ctx, x, saved); }
  void backward(Context& ctx, const Tensor& dx, const Tensor& dy, const Tensor& x) {
    layer.backward(ctx, dx, dy, x, saved);
  }
};
struct Experts {
  ParamStore store;
  Moe layer;
  Moe::Saved saved;
  explicit Experts(const ModelConfig& c, const Shape&) : layer(c, store, "mlp", 0) {}
  void forward(Context& ctx, const Tensor& x) { layer.forward(ctx, x, {}, saved); }
  void backward(Context& ctx, const Tensor& dx, const Tensor& dy, const Tensor& x) {
    layer.backward(ctx, dx, dy, x, {}, saved);
  }
};

/// Owns the layers used by the candidates.
struct Layers {
  std::deque<Dense> dense;
  std::deque<Experts> experts;
};

template <class L>
void add(std::vector<Candidate>& candidates, const char* name, Inputs& in, L& l, const Shape& s, DType type) {
  Context& ctx = in.ctx;
  l.store.allocate(ctx, type, s.tokens, in.memory(), &in.memory());
  l.saved = l.layer.make_saved(in.memory(), "layer", s.tokens, type, /*keep_inner=*/true);
  if (!ctx.dry_run) {
    l.store.initialize(ctx, 1);
    l.store.pack(ctx);
  }
  const Tensor x = in.normal(type, {s.tokens, s.hidden}), dy = in.normal(type, {s.tokens, s.hidden});
  const Tensor dx = in.zeros(type, {s.tokens, s.hidden});
  const double flops = 6.0 * static_cast<double>(s.tokens) * static_cast<double>(s.hidden) *
                       static_cast<double>(s.per_token * s.width);
  nlohmann::json labels{{"tokens", s.tokens},
                        {"width", fmt::format("{} x {}", s.hidden, s.per_token * s.width)},
                        {"precision", dtype_name(type)}};
  if constexpr (std::is_same_v<L, Experts>)
    labels["experts"] = fmt::format("{} of {} of {}", s.per_token, s.experts, s.width);
  const auto forward = [&ctx, &l, x](int) { l.forward(ctx, x); };
  candidates.push_back({fmt::format("{}, forward", name), forward, flops, 0, labels});
  candidates.push_back({fmt::format("{}, forward and backward", name),
                        [=, &ctx, &l](int) {
                          l.forward(ctx, x);
                          l.backward(ctx, dx, dy, x);
                        },
                        3 * flops, 0, labels});
}

}  // namespace

nlohmann::json measure_moe(const RaceOptions& given, const std::vector<DType>& types) {
  RaceOptions options = given;
  std::vector<Shape> shapes{{4096, 512, 64, 8, 128}, {4096, 768, 64, 8, 256}};
  if (options.tiny)
    shapes = {{24, 32, 6, 2, 16}};
  else if (options.device == Device::cuda)
    shapes = {{16384, 2048, 16, 8, 768}, {16384, 2048, 128, 8, 768}};
  else
    options.warm_up = std::min(options.warm_up, 0.2), options.samples = 11;
  nlohmann::json rows = nlohmann::json::array();
  for (const Shape& s : shapes)
    for (const DType type : types) {
      Layers layers;
      nlohmann::json measured = race(options, [&](Inputs& in) {
        ModelConfig c;
        c.hidden_size = s.hidden;
        c.moe.num_experts = s.experts, c.moe.num_experts_per_tok = s.per_token,
        c.moe.moe_intermediate_size = s.width;
        std::vector<Candidate> candidates;
        add(candidates, "dense", in, layers.dense.emplace_back(c, s), s, type);
        add(candidates, "experts", in, layers.experts.emplace_back(c, s), s, type);
        return candidates;
      });
      for (size_t i : {size_t{2}, size_t{3}})
        if (measured[i].contains("us") && measured[i - 2].contains("us"))
          measured[i]["of_dense"] = measured[i]["us"].get<double>() / measured[i - 2]["us"].get<double>();
      for (const nlohmann::json& row : measured) rows.push_back(row);
    }
  return rows;
}

}  // namespace sluice::bench
