// Gates of one position: order, names, gradients, and the gate fused into the attention core.
#include "nn/gate_chain.h"

#include <catch2/catch.hpp>
#include <cstring>

#include "support/layer_parts.h"
#include "support/model.h"

namespace sluice {
namespace {

using test::LayerParts;
using test::Pool;
using P = GatePosition;

constexpr int64_t kTokens = 6, kHeads = 4, kChannels = 4;

ByPosition<GateSite> sites() {
  ByPosition<GateSite> all;
  for (const P position : {P::query, P::key, P::value, P::sdpa_output})
    all[position] = {"", kHeads, kChannels};
  all[P::query].prefix = "query_";
  all[P::value].prefix = "value_";
  all[P::dense_output] = {"dense_", 1, kHeads * kChannels, true};
  return all;
}

ModelConfig with_gates(std::vector<GateConfig> gates) {
  ModelConfig config = test::tiny_config();
  config.attention.gates = std::move(gates);
  return config;
}

const GateConfig kMultiply = {.granularity = GateGranularity::headwise};
const GateConfig kAdd = {.combine = GateCombine::add, .activation = GateActivation::silu};
const GateConfig kConstant = {.input = GateInput::none};

double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

}  // namespace

TEST_CASE("gates of one position apply in the order of the configuration's list", "[gate_chain]") {
  for (const bool multiply_first : {true, false}) {
    const ModelConfig config =
        with_gates(multiply_first ? std::vector{kMultiply, kAdd} : std::vector{kAdd, kMultiply});
    LayerParts parts;
    const AttentionGates gates(config, parts.store, "a", sites());
    parts.allocate(kTokens);
    Pool pool;
    const Tensor x = pool.normal(DType::f64, {kTokens, kHeads, kChannels}),
                 hidden = pool.normal(DType::f64, {kTokens, config.hidden_size});
    const GateChain& chain = gates[P::sdpa_output];
    GateChain::Saved s = chain.make_saved(parts.memory, "s", x, kTokens, DType::f64);
    chain.forward(parts.ctx, x, hidden, s);
    const Tensor multiply = s.gates[multiply_first ? 0 : 1].z, add = s.gates[multiply_first ? 1 : 0].z;
    for (int64_t i = 0; i < x.numel(); ++i) {
      const double factor = sigmoid(Pool::get(multiply, i / kChannels)), z = Pool::get(add, i),
                   term = z * sigmoid(z), before = Pool::get(x, i);
      REQUIRE(Pool::get(s.y, i) ==
              Approx(multiply_first ? before * factor + term : (before + term) * factor).epsilon(1e-12));
    }
  }
}

TEST_CASE("a position without gates passes its input through", "[gate_chain]") {
  LayerParts parts;
  const AttentionGates gates(with_gates({}), parts.store, "a", sites());
  parts.allocate(kTokens);
  Pool pool;
  const Tensor x = pool.normal(DType::f64, {kTokens, kHeads, kChannels}), copy = pool.copy(x, DType::f64);
  GateChain::Saved s = gates[P::value].make_saved(parts.memory, "s", x, kTokens, DType::f64);
  CHECK(s.y.data == x.data);
  gates[P::value].forward(parts.ctx, x, {}, s);
  Into into = Into::overwrite;
  gates[P::value].backward(parts.ctx, x, x, x, {}, s, {}, into);
  CHECK(test::equal_bits(x, copy));
  CHECK(into == Into::overwrite);
  CHECK_FALSE(gates[P::value].head_gate(s));
}

TEST_CASE("gradients of a gate chain equal central differences: input, hidden state, gates",
          "[gate_chain][gradient]") {
  const test::OneThread one_thread;
  const ModelConfig config = with_gates({kMultiply, kAdd, kConstant});
  LayerParts parts;
  const AttentionGates gates(config, parts.store, "a", sites());
  parts.allocate(kTokens);
  Pool pool;
  const int64_t C = config.hidden_size;
  const Tensor x = pool.normal(DType::f64, {kTokens, kHeads, kChannels}),
               hidden = pool.normal(DType::f64, {kTokens, C}),
               dy = pool.normal(DType::f64, {kTokens, kHeads, kChannels}),
               of_heads = pool.normal(DType::f64, {kHeads});
  const GateChain& chain = gates[P::sdpa_output];
  GateChain::Saved s = chain.make_saved(parts.memory, "s", x, kTokens, DType::f64);
  // <dy, y>, and of_heads times the first gate's scores.
  const auto loss = [&] {
    chain.forward(parts.ctx, x, hidden, s);
    double sum = test::dot(dy, s.y);
    for (int64_t i = 0; i < kTokens * kHeads; ++i)
      sum += Pool::get(of_heads, i % kHeads) * sigmoid(Pool::get(s.gates[0].z, i));
    return sum;
  };
  loss();
  const Tensor dx = pool.copy(dy, DType::f64), dhidden = pool.normal(DType::f64, {kTokens, C});
  Into into = Into::overwrite;
  chain.backward(parts.ctx, dx, dx, x, hidden, s, dhidden, into, of_heads);
  CHECK(into == Into::add);
  CHECK(test::gradient_error(x, dx, loss) < 1e-7);
  CHECK(test::gradient_error(hidden, dhidden, loss) < 1e-7);
  CHECK(parts.worst_parameter(loss) < 1e-7);
}

TEST_CASE("gates are registered and named in the order of the configuration's list", "[gate_chain]") {
  GateConfig value = kMultiply, query = kConstant;
  value.position = P::value;
  query.position = P::query;
  const ModelConfig config = with_gates({value, kMultiply, query, value, kAdd});
  LayerParts parts;
  const AttentionGates gates(config, parts.store, "a", sites());
  parts.allocate(kTokens);
  std::vector<std::string> names;
  for (const ParamSpec& spec : parts.store.specs()) names.push_back(spec.name);
  CHECK(names == std::vector<std::string>{"a.value_gate_proj.weight", "a.gate_proj.weight",
                                          "a.query_gate.weight", "a.value_gate_proj_2.weight",
                                          "a.gate_proj_2.weight"});
  LayerParts more;
  value.input = GateInput::self;
  value.bias = 1;
  AttentionGates(with_gates({value, value}), more.store, "a", sites());
  names.clear();
  for (const ParamSpec& spec : more.store.specs()) names.push_back(spec.name);
  CHECK(names == std::vector<std::string>{"a.value_self_gate_proj.weight", "a.value_self_gate_proj.bias",
                                          "a.value_self_gate_proj_2.weight",
                                          "a.value_self_gate_proj_2.bias"});
  REQUIRE(gates.size() == 5);
  AttentionGates::Saved s;
  Pool pool;
  const Tensor x = pool.zeros(DType::f64, {kTokens, kHeads, kChannels});
  for (const P position : {P::query, P::value, P::sdpa_output})
    s[position] = gates[position].make_saved(parts.memory, "s", x, kTokens, DType::f64);
  const std::vector<std::pair<P, size_t>> places = {
      {P::value, 0}, {P::sdpa_output, 0}, {P::query, 0}, {P::value, 1}, {P::sdpa_output, 1}};
  for (size_t i = 0; i < places.size(); ++i) {
    CHECK(gates.gate(i).config().position == places[i].first);
    CHECK(gates.saved(s, i).y.data == s[places[i].first].gates[places[i].second].y.data);
  }
}

TEST_CASE("only a single gate of the hidden state is fused into the core", "[gate_chain]") {
  const auto fused = [](std::vector<GateConfig> list) {
    LayerParts parts;
    AttentionGates gates(with_gates(std::move(list)), parts.store, "a", sites());
    CHECK_FALSE(gates[P::sdpa_output].fused());
    gates.fuse(P::sdpa_output);
    return gates[P::sdpa_output].fused();
  };
  GateConfig value;
  value.position = P::value;
  CHECK(fused({kMultiply}));
  CHECK(fused({value, kAdd}));
  CHECK_FALSE(fused({}));
  CHECK_FALSE(fused({value}));
  CHECK(fused({{.input_channels = 2, .bias = 1}}));
  CHECK_FALSE(fused({kConstant}));
  CHECK_FALSE(fused({{.input = GateInput::self}}));
  CHECK_FALSE(fused({kMultiply, kAdd}));
}

TEST_CASE("a headwise gate of the layer's output is refused", "[gate_chain]") {
  LayerParts parts;
  GateConfig dense = kMultiply;
  dense.position = P::dense_output;
  CHECK_THROWS_WITH(AttentionGates(with_gates({dense}), parts.store, "a", sites()),
                    Catch::Contains("a dense_output gate has no heads"));
}

}  // namespace sluice
