#include "analysis/gate_health.h"

#include <catch2/catch.hpp>
#include <cmath>

#include "analysis/summary.h"
#include "support/model.h"

namespace sluice {
namespace {

using test::Pool;
using Rows = std::vector<double>;

constexpr int64_t kTokens = 10;

double logit(double score) { return std::log(score / (1 - score)); }

ModelConfig config_of(const std::vector<GateConfig>& gates) {
  ModelConfig config = test::tiny_config();  // four heads of four channels, two of keys and values
  config.attention.gates = gates;
  return config;
}

struct Gated : test::TestModel {
  explicit Gated(const std::vector<GateConfig>& gates) : TestModel(config_of(gates), batch_of_ten()) {
    randomize();
    loss();
  }
  static test::TokenBatch batch_of_ten() {
    test::TokenBatch b;
    b.add(test::random_tokens(7, 11, 1));
    b.add(test::random_tokens(5, 11, 2));
    return b;
  }
  /// The logits of gate `g`, as forward left them.
  Tensor logits(size_t g) const {
    const AttentionGates& gates = model.blocks()[0].attention().gates();
    return gates.gate(g).logits(gates.saved(saved.blocks[0].attention.gates, g));
  }
  ModelSummary summary() {
    SummaryAccumulator accumulator(model, store, {});
    Context ctx(1 << 20);
    accumulator.add(ctx, batch.view(), saved);
    accumulator.add(ctx, batch.view(), saved);  // shares do not change with the number of batches
    return accumulator.result();
  }
};

void equal(const Rows& found, const Rows& expected) {
  REQUIRE(found.size() == expected.size());
  for (size_t i = 0; i < found.size(); ++i) CHECK(found[i] == Approx(expected[i]).margin(1e-12));
}

}  // namespace

TEST_CASE("shares of a headwise gate's scores near its ends, and heads that are shut", "[summary]") {
  Gated m({{.granularity = GateGranularity::headwise}});
  const Tensor z = m.logits(0);
  for (int64_t t = 0; t < kTokens; ++t) {
    Pool::set(z, t * 4 + 0, logit(0.01));                 // shut for all tokens
    Pool::set(z, t * 4 + 1, logit(t == 3 ? 0.5 : 0.04));  // for all but one
    Pool::set(z, t * 4 + 2, logit(t < 4 ? 0.96 : 0.94));  // open for four
    Pool::set(z, t * 4 + 3, logit(t < 1 ? 0.999 : 0.06));
  }
  const ModelSummary s = m.summary();
  REQUIRE(s.layers[0].gate_health.size() == 1);
  const GateHealth& gate = s.layers[0].gate_health[0];
  equal(gate.below, {1, 0.9, 0, 0});
  equal(gate.above, {0, 0, 0.4, 0.1});
  equal(gate.shut_tokens, {1, 0.9, 0, 0});
  CHECK(gate.shut_heads() == 1);
  const GateShares shares = shares_of(s.gates);
  CHECK(shares.below == Approx(1.9 / 4));
  CHECK(shares.above == Approx(0.5 / 4));
  CHECK(shares.shut_heads == Approx(0.25));
}

TEST_CASE("a head of an elementwise gate is shut by the mean over its channels", "[summary]") {
  Gated m({GateConfig{}});
  const Tensor z = m.logits(0);
  const double scores[4][4] = {{0.01, 0.02, 0.03, 0.13},  // mean 0.0475: shut, though one channel is not
                               {0.01, 0.01, 0.01, 0.2},   // mean 0.0575
                               {0.99, 0.96, 0.5, 0.5},
                               {0.06, 0.94, 0.06, 0.94}};
  for (int64_t i = 0; i < kTokens * 16; ++i) Pool::set(z, i, logit(scores[i % 16 / 4][i % 4]));
  const ModelSummary s = m.summary();
  const GateHealth& gate = s.layers[0].gate_health[0];
  equal(gate.below, {0.75, 0.75, 0, 0});
  equal(gate.above, {0, 0, 0.5, 0});
  equal(gate.shut_tokens, {1, 0, 0, 0});
}

TEST_CASE(
    "gates of keys and values have their heads, constants stand for every token, and unbounded scores "
    "have no shares",
    "[summary]") {
  Gated m({{.position = GatePosition::value, .granularity = GateGranularity::headwise},
           {.granularity = GateGranularity::headwise, .input = GateInput::none},
           {.activation = GateActivation::silu, .bias = 0.5},
           {.position = GatePosition::dense_output}});
  const Tensor value = m.logits(0), constant = m.logits(1);
  for (int64_t t = 0; t < kTokens; ++t) {
    Pool::set(value, t * 2, logit(0.5));
    Pool::set(value, t * 2 + 1, logit(t < 5 ? 0.97 : 0.02));
  }
  for (int64_t h = 0; h < 4; ++h) Pool::set(constant, h, logit(h == 2 ? 0.001 : 0.5));
  const ModelSummary s = m.summary();
  const std::vector<GateHealth>& gates = s.layers[0].gate_health;
  REQUIRE(gates.size() == 4);
  equal(gates[0].below, {0, 0.5});
  equal(gates[0].above, {0, 0.5});
  equal(gates[1].shut_tokens, {0, 0, 1, 0});
  CHECK((gates[2].below.empty() && gates[2].above.empty() && gates[2].shut_tokens.empty()));
  CHECK(gates[2].row_norms.size() == 4);
  CHECK(gates[3].below.size() == 1);
  CHECK(std::isnan(shares_of({gates[2]}).below));
  CHECK(shares_of({gates[0], gates[1], gates[2]}).shut_heads == Approx(1.0 / 6));

  // Each head's rows of the weights.
  const auto norms = [&](const std::string& name, int64_t heads) {
    const Tensor w = m.store.value(m.id("model.layers.0.self_attn." + name));
    Rows squares(static_cast<size_t>(heads), 0.0);
    for (int64_t i = 0; i < w.numel(); ++i)
      squares[static_cast<size_t>(i * heads / w.numel())] += Pool::get(w, i) * Pool::get(w, i);
    for (double& x : squares) x = std::sqrt(x);
    return squares;
  };
  equal(gates[0].row_norms, norms("value_gate_proj.weight", 2));
  equal(gates[1].row_norms, norms("gate.weight", 4));
  equal(gates[2].row_norms, norms("gate_proj_2.weight", 4));
  equal(gates[3].row_norms, norms("dense_gate_proj.weight", 1));
}

TEST_CASE("norms of values and the largest residual, at first tokens and at all others", "[summary]") {
  Gated m({});
  const Block::Saved& s = m.saved.blocks[0];
  const Tensor v = s.attention.gates[GatePosition::value].y;
  // Two sequences: first tokens are 0 and 6. The norms of a token's two value heads are 3 and 5.
  for (int64_t t = 0; t < kTokens; ++t) {
    const double scale = t == 0 || t == 6 ? 1 : 10 + static_cast<double>(t);
    for (int64_t i = 0; i < 8; ++i) Pool::set(v, t * 8 + i, 0);
    Pool::set(v, t * 8 + 1, 3 * scale);
    Pool::set(v, t * 8 + 4, 4 * scale);
    Pool::set(v, t * 8 + 7, -3 * scale);
  }
  for (const Tensor& x : {s.x1, s.y})
    for (int64_t i = 0; i < x.numel(); ++i) Pool::set(x, i, 0.25);
  Pool::set(s.x1, 6 * 6 + 2, -40);  // the second first token
  Pool::set(s.y, 5 * 6 + 5, 7);     // the first sequence's last one
  const ModelSummary summary = m.summary();
  const LayerSummary& layer = summary.layers[0];
  CHECK(layer.value_norm.first == Approx(4).epsilon(1e-12));
  CHECK(layer.value_norm.rest == Approx(4 * (80 + 1 + 2 + 3 + 4 + 5 + 7 + 8 + 9) / 8.0).epsilon(1e-12));
  CHECK(layer.residual_max.first == 40);
  CHECK(layer.residual_max.rest == 7);
  CHECK(summary.value_norm.first == layer.value_norm.first);
  CHECK(summary.residual_max.rest == 7);
  Pool::set(s.y, 9 * 6, std::nan(""));
  CHECK(std::isnan(m.summary().residual_max.rest));
  CHECK(m.summary().residual_max.first == 40);
}

}  // namespace sluice
