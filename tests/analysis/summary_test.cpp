#include "analysis/summary.h"

#include <catch2/catch.hpp>
#include <cmath>

#include "support/model.h"

namespace sluice {
namespace {

using test::Pool;

ModelSummary summary_of(test::TestModel& m) {
  m.loss();
  SummaryAccumulator summary(m.model, m.store, {});
  Context ctx(1 << 20);
  summary.add(ctx, m.batch.view(), m.saved);
  return summary.result();
}

/// Attention on the first key of the sequence, from all scores of the rotated queries and keys.
double explicit_first_token_attention(const test::TestModel& m, size_t layer) {
  const AttentionConfig& config = m.model.config().attention;
  const Attention::Saved& s = m.saved.blocks[layer].attention;
  const int64_t heads = s.q_position.y.dim(1), kv_heads = s.k_position.y.dim(1), D = s.q_position.y.dim(2),
                window = config.window_in_layer(static_cast<int64_t>(layer));
  const std::string name = fmt::format("model.layers.{}.self_attn.", layer);
  const auto parameter = [&](const char* last) { return m.store.value(m.id(name + last)); };
  const auto score = [&](int64_t t, int64_t h, const Tensor& keys, int64_t row) {
    double z = 0;
    for (int64_t c = 0; c < D; ++c)
      z += Pool::get(s.q_position.y, (t * heads + h) * D + c) * Pool::get(keys, row * D + c);
    return z / std::sqrt(static_cast<double>(D));
  };
  const bool pick = config.kind == AttentionKind::softpick;
  double total = 0;
  for (int64_t t = 0; t < m.batch.size(); ++t)
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t g = h / (heads / kv_heads), begin = m.batch.first_key[static_cast<size_t>(t)];
      double sum = pick ? 1e-6 : 0, first = 0;
      if (config.kind == AttentionKind::off_by_one) sum = 1;
      if (config.kind == AttentionKind::sink) sum = std::exp(Pool::get(parameter("sinks"), h));
      if (config.kind == AttentionKind::sink_key) sum = std::exp(score(t, h, parameter("sink_key"), h));
      if (config.kind == AttentionKind::kv_bias) sum = std::exp(score(t, h, parameter("bias_key"), g));
      for (int64_t j = window > 0 ? std::max(begin, t - window + 1) : begin; j <= t; ++j) {
        const double e = std::exp(score(t, h, s.k_position.y, j * kv_heads + g));
        sum += pick ? std::abs(e - 1) : e;
        if (j == begin) first = pick ? std::max(e - 1, 0.0) : e;
      }
      total += first / sum;
    }
  return total / static_cast<double>(m.batch.size() * heads);
}

double largest(const Tensor& t) {
  double result = 0;
  for (int64_t i = 0; i < t.numel(); ++i) result = std::max(result, std::abs(Pool::get(t, i)));
  return result;
}

}  // namespace

TEST_CASE("first-token attention from lse and z0 equals the explicit one, of every kind and window",
          "[summary]") {
  ModelConfig config = test::tiny_config();
  config.num_hidden_layers = 2;
  config.attention.kind = GENERATE(AttentionKind::softmax, AttentionKind::sink, AttentionKind::off_by_one,
                                   AttentionKind::sink_key, AttentionKind::kv_bias, AttentionKind::softpick);
  config.attention.window = GENERATE(0, 2);
  config.attention.window_pattern = config.attention.window;  // the second layer has none
  test::TestModel m(config, test::tiny_batch());
  m.randomize();
  const ModelSummary summary = summary_of(m);
  REQUIRE(summary.layers.size() == 2);
  double mean = 0;
  for (size_t layer = 0; layer < 2; ++layer) {
    const double expected = explicit_first_token_attention(m, layer);
    CHECK(summary.layers[layer].first_token_attention == Approx(expected).epsilon(1e-10));
    mean += expected / 2;
  }
  CHECK(summary.first_token_attention == Approx(mean).epsilon(1e-10));
  CHECK_FALSE(summary.mean_gate_score);
}

TEST_CASE("gate scores are the means of the activated logits of each gate", "[summary]") {
  ModelConfig config = test::tiny_config();
  config.attention.gates = {{},
                            {.position = GatePosition::value, .granularity = GateGranularity::headwise},
                            {.activation = GateActivation::ns_sigmoid, .input = GateInput::none}};
  test::TestModel m(config, test::tiny_batch());
  m.randomize();
  const ModelSummary summary = summary_of(m);
  const auto& scores = summary.layers[0].gate_scores;
  REQUIRE(scores.size() == 3);
  const auto sigmoid = [](double z) { return 1 / (1 + std::exp(-z)); };
  for (size_t g = 0; g < 3; ++g) {
    const AttentionGates& gates = m.model.blocks()[0].attention().gates();
    const Gate& gate = gates.gate(g);
    const Tensor z = gate.logits(gates.saved(m.saved.blocks[0].attention.gates, g));
    double total = 0;
    for (int64_t i = 0; i < z.numel(); ++i)
      total += g == 2 ? 0.5 + 0.5 * sigmoid(Pool::get(z, i)) : sigmoid(Pool::get(z, i));
    CHECK(scores[g] == Approx(total / static_cast<double>(z.numel())).epsilon(1e-10));
  }
  // The first gate at sdpa_output measures a head's importance.
  const AttentionGates& gates = m.model.blocks()[0].attention().gates();
  const Gate& first = gates.gate(0);
  const Tensor z = first.logits(gates.saved(m.saved.blocks[0].attention.gates, 0));
  const int64_t heads = z.dim(1), width = z.dim(2);
  std::vector<double> importance(static_cast<size_t>(heads), 0.0);
  for (int64_t i = 0; i < z.numel(); ++i)
    importance[static_cast<size_t>(i / width % heads)] +=
        sigmoid(Pool::get(z, i)) / static_cast<double>(z.dim(0) * width);
  double mean = 0, squares = 0;
  for (const double x : importance) mean += x / static_cast<double>(heads);
  for (const double x : importance) squares += (x - mean) * (x - mean);
  for (size_t h = 0; h < importance.size(); ++h)
    CHECK(summary.layers[0].importance[h] == Approx(importance[h]).epsilon(1e-10));
  REQUIRE(summary.imbalance);
  CHECK(*summary.imbalance ==
        Approx(std::sqrt(squares / static_cast<double>(heads - 1)) / mean).epsilon(1e-10));
  CHECK(*summary.mean_gate_score == Approx((scores[0] + scores[1] + scores[2]) / 3).epsilon(1e-12));
}

TEST_CASE("maxima cover branches and the residual stream", "[summary]") {
  ModelConfig config = test::tiny_config();
  config.num_hidden_layers = 2;
  config.norm_placement = GENERATE(NormPlacement::pre, NormPlacement::sandwich);
  test::TestModel m(config, test::tiny_batch());
  m.randomize();
  const ModelSummary summary = summary_of(m);
  double residual = 0;
  for (size_t layer = 0; layer < 2; ++layer) {
    const Block::Saved& s = m.saved.blocks[layer];
    CHECK(summary.layers[layer].attention_output_max == largest(s.attention_out.y));
    CHECK(summary.layers[layer].attention_residual_max == largest(s.x1));
    CHECK(summary.layers[layer].ffn_output_max == largest(s.ffn_out.y));
    CHECK(summary.layers[layer].ffn_residual_max == largest(s.y));
    residual = std::max({residual, largest(s.x1), largest(s.y)});
  }
  CHECK(summary.largest_residual == residual);
}

TEST_CASE("activations shared by layers (Recompute::block) are refused", "[summary]") {
  test::TestModel m(test::tiny_config(), test::tiny_batch(), DType::f64, Recompute::block);
  m.loss();
  Context ctx(1 << 20);
  SummaryAccumulator summary(m.model, m.store, {});
  CHECK_THROWS_AS(summary.add(ctx, m.batch.view(), m.saved), Error);
}

}  // namespace sluice
