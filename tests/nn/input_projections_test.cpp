#include "nn/input_projections.h"

#include <catch2/catch.hpp>
#include <cstring>

#include "ops/linear.h"
#include "support/model.h"

namespace sluice {
namespace {

using test::Pool;
using test::TestModel;

/// Heads and widths at which all of a layer's input projections are joined, those of headwise gates as well.
ModelConfig config(GateGranularity granularity) {
  ModelConfig c = test::tiny_config();
  c.hidden_size = 8;
  c.num_attention_heads = 8;
  GateConfig gate;
  gate.granularity = granularity;
  c.attention.gates = {gate};
  return c;
}

ParameterRule frozen(const char* match) {
  ParameterRule rule;
  rule.match = match;
  rule.trainable = false;
  return rule;
}

bool of_input(const std::string& name) {
  return name.find("self_attn.") != std::string::npos && name.find("o_proj") == std::string::npos &&
         name.find("_proj") != std::string::npos;
}

/// Its number of input projections, and of those that are joined to the one before.
std::pair<int, int> projections(const ParamStore& store) {
  int all = 0, joined = 0;
  for (const ParamSpec& spec : store.specs())
    if (of_input(spec.name)) ++all, joined += spec.joined;
  return {all, joined};
}

void check_gradients(TestModel& m, const char* part) {
  m.randomize();
  m.loss_and_gradient();
  for (ParamStore::Id id = 0; id < static_cast<ParamStore::Id>(m.store.specs().size()); ++id) {
    const ParamSpec& spec = m.store.spec(id);
    if (spec.name.find(part) == std::string::npos || !spec.trainable) continue;
    INFO(spec.name);
    CHECK(test::gradient_error(
              m.store.value(id), m.store.grad(id), [&] { return m.loss(); }, 6, 2e-6) <= 1e-7);
  }
}

}  // namespace

TEST_CASE("queries, keys, values and the first gate are one product in backward", "[gradient]") {
  const test::OneThread one_thread;
  for (const GateGranularity granularity : {GateGranularity::elementwise, GateGranularity::headwise})
    for (const Recompute recompute : {Recompute::none, Recompute::block}) {
      TestModel m(config(granularity), test::tiny_batch(), DType::f64, recompute);
      CHECK(projections(m.store) == std::pair{4, 3});
      check_gradients(m, "model.");
    }
}

TEST_CASE("gradients that a stage leaves elsewhere are copied to their columns", "[gradient]") {
  const test::OneThread one_thread;
  const auto with = [](auto change) {
    ModelConfig c = config(GateGranularity::elementwise);
    change(c);
    return c;
  };
  const auto gate_at = [](GatePosition position) {
    GateConfig gate;
    gate.position = position;
    return gate;
  };
  const std::pair<ModelConfig, int> cases[] = {
      {with([](ModelConfig& c) { c.attention_bias = true; }), 3},
      {with([&](ModelConfig& c) {
         for (const GatePosition p : {GatePosition::query, GatePosition::key, GatePosition::value})
           c.attention.gates.push_back(gate_at(p));
       }),
       3},
      {with([](ModelConfig& c) { c.attention.exclusive = ExclusiveAttention::full; }), 2},
      {with([](ModelConfig& c) { c.attention.gates[0].bias = 0.5; }), 2},
      {with([](ModelConfig& c) { c.attention.gates[0].input_channels = 4; }), 2},
      {with([](ModelConfig& c) { c.attention.kind = AttentionKind::kv_bias; }), 3},
      {with([](ModelConfig& c) { c.attention.kind = AttentionKind::sink; }), 3},
      {with([](ModelConfig& c) { c.qk_norm = false; }), 3},
      {with([](ModelConfig& c) { c.qk_norm_order = QkNormOrder::after_rope; }), 3},
      {with([](ModelConfig& c) { c.attention.switch_heads = {.num_experts = 2, .expert_width = 4}; }), 2},
      {with([](ModelConfig& c) {
         c.attention.kind = AttentionKind::sparse;
         c.attention.sparse.k.base = 16;
       }),
       3},
  };
  for (const auto& [model, joined] : cases) {
    TestModel m(model, test::tiny_batch());
    CHECK(projections(m.store).second == joined);
    check_gradients(m, "self_attn.");
  }
}

TEST_CASE("freezing some input projections changes no bit of the other gradients", "[gradient][freeze]") {
  const test::OneThread one_thread;
  const ModelConfig c = config(GateGranularity::elementwise);
  TestModel whole(c, test::tiny_batch());
  whole.randomize();
  whole.loss_and_gradient();
  for (const char* match : {"q_proj", "k_proj", "v_proj", "self_attn.gate_proj", "_proj"}) {
    INFO(match);
    TestModel m(c, test::tiny_batch(), DType::f64, Recompute::none, {}, {}, {frozen(match)});
    m.copy_from(whole);
    CHECK(m.loss_and_gradient() == whole.loss_and_gradient());
    for (ParamStore::Id id = 0; id < static_cast<ParamStore::Id>(m.store.specs().size()); ++id) {
      if (!m.store.trains(id)) continue;
      INFO(m.store.spec(id).name);
      const Tensor a = m.store.grad(id), b = whole.store.grad(whole.id(m.store.spec(id).name));
      CHECK(std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0);
    }
  }
}

TEST_CASE("adapters of joined input projections take part in forward and backward", "[gradient][lora]") {
  const test::OneThread one_thread;
  const LoraConfig lora{.rank = 2, .alpha = 3, .targets = {"q_proj", "v_proj", "self_attn.gate_proj"}};
  TestModel m(config(GateGranularity::elementwise), test::tiny_batch(), DType::f64, Recompute::none, {},
              lora);
  CHECK(projections(m.store).second == 3);
  check_gradients(m, ".lora_");
}

TEST_CASE("dx in bf16 is rounded once", "[bf16]") {
  ParamStore store;
  InputProjections inputs(store);
  for (const char* name : {"q", "k", "v"}) {
    const bool first = *name == 'q';
    inputs.add(store.add({.name = name,
                          .shape = {16, 32},
                          .init = Init::normal(1),
                          .packed = true,
                          .joined = !first,
                          .joined_in_backward = true}));
  }
  Context ctx(int64_t{1} << 24);
  Arena values("values", 1 << 20), gradients("gradients", 1 << 20);
  store.allocate(ctx, DType::bf16, 64, values, &gradients);
  store.initialize(ctx, 1);
  store.pack(ctx);
  Pool pool;
  const Tensor x = pool.normal(DType::bf16, {40, 32}), dx = pool.zeros(DType::bf16, {40, 32});
  ScratchScope t(ctx.scratch);
  const InputProjections::Gradients dy = inputs.make_gradients(t, 40, DType::bf16);
  REQUIRE(dy[0].has_shape({40, 48}));
  std::vector<double> exact(40 * 32, 0.0);
  for (const ParamStore::Id id : {0, 1, 2}) {
    const Tensor part = pool.normal(DType::bf16, {40, 16}), w = store.value(id);
    inputs.put(ctx, dy, id, part);
    for (int64_t i = 0; i < 40 * 32; ++i)
      for (int64_t n = 0; n < 16; ++n)
        exact[static_cast<size_t>(i)] += Pool::get(part, i / 32 * 16 + n) * Pool::get(w, n * 32 + i % 32);
  }
  Into into = Into::overwrite;
  inputs.backward(ctx, dx, dy, x, into);
  CHECK(into == Into::add);
  for (int64_t i = 0; i < dx.numel(); ++i)
    CHECK(Pool::get(dx, i) == Approx(exact[static_cast<size_t>(i)]).epsilon(1.0 / 256).margin(1e-5));
}

}  // namespace sluice
