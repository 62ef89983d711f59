// Switch heads inside the model.
#include <catch2/catch.hpp>
#include <cstring>

#include "support/model.h"

namespace sluice {
namespace {

using test::Pool;
using test::TestModel;

ModelConfig with_experts(int64_t experts, int64_t chosen, SwitchProjections projections, int64_t width = 0) {
  ModelConfig c = test::tiny_config();
  c.attention.switch_heads = {.num_experts = experts,
                              .num_experts_per_tok = chosen,
                              .projections = projections,
                              .expert_width = width};
  return c;
}

}  // namespace

TEST_CASE(
    "gradients of switch heads equal central differences: experts, experts per token, projections, widths, "
    "head layouts",
    "[gradient][switch_heads]") {
  const test::OneThread one_thread;
  int turn = 0;
  for (const auto& [experts, chosen] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {4, 4}, {8, 2}, {8, 8}})
    for (const SwitchProjections projections : {SwitchProjections::value, SwitchProjections::key_value})
      for (const int64_t width : {0, 2, 1})
        for (const int64_t kv_heads : {1, 2, 4}) {
          if (experts == 1 && width > 0) continue;
          ModelConfig c = with_experts(experts, chosen, projections, width);
          c.num_key_value_heads = kv_heads;
          c.qk_norm = turn % 2 == 0;
          // Beside gates of keys and values, which come after.
          if (turn % 3 == 0)
            c.attention.gates = {GateConfig{.position = GatePosition::key},
                                 GateConfig{.position = GatePosition::value}};
          ++turn;
          TestModel m(c, test::tiny_batch());
          m.randomize(static_cast<uint32_t>(turn));
          m.loss_and_gradient();
          for (const char* name : {"v_switch", "k_switch", "v_proj", "k_proj", "q_proj", "input_layernorm"}) {
            const bool keys = projections == SwitchProjections::key_value;
            if (std::string(name) == "k_switch" && !keys) continue;
            const auto id = m.id(std::string("model.layers.0.") + (name[0] == 'i' ? "" : "self_attn.") +
                                 name + ".weight");
            INFO("E " << experts << " K " << chosen << " w " << width << " kv " << kv_heads << " keys "
                      << keys << ": " << name);
            // Small steps, none of which changes the selection.
            CHECK(test::gradient_error(
                      m.store.value(id), m.store.grad(id), [&] { return m.loss(); }, 4, 2e-6) <= 1e-7);
          }
        }
}

TEST_CASE("switch heads with one expert equal a headwise value gate, bit for bit",
          "[equivalence][switch_heads]") {
  for (const bool keys : {false, true})
    for (const auto& [dtype, head_dim] :
         {std::pair{DType::f32, 4}, {DType::bf16, 4}, {DType::f64, 4}, {DType::f32, 48}, {DType::bf16, 34}}) {
      ModelConfig switched =
          with_experts(1, 1, keys ? SwitchProjections::key_value : SwitchProjections::value);
      switched.num_hidden_layers = 2;
      switched.head_dim = head_dim;
      ModelConfig gated = switched;
      gated.attention.switch_heads = {};
      const GateConfig headwise{.position = GatePosition::value, .granularity = GateGranularity::headwise};
      if (keys)
        gated.attention.gates.push_back(headwise), gated.attention.gates[0].position = GatePosition::key;
      gated.attention.gates.push_back(headwise);
      TestModel a(gated, test::tiny_batch(), dtype), b(switched, test::tiny_batch(), dtype);
      a.randomize();
      // The same shapes in the same order under other names.
      REQUIRE(a.store.flat_size() == b.store.flat_size());
      std::memcpy(b.store.flat_values().data, a.store.flat_values().data,
                  static_cast<size_t>(a.store.flat_values().bytes()));
      for (size_t i = 0; i < a.store.specs().size(); ++i)
        CHECK(a.store.specs()[i].shape == b.store.specs()[i].shape);
      CHECK(a.loss_and_gradient() == b.loss_and_gradient());
      CHECK(a.logits() == b.logits());
      CHECK(std::memcmp(a.store.flat_grads().data, b.store.flat_grads().data,
                        static_cast<size_t>(a.store.flat_grads().bytes())) == 0);
    }
}

TEST_CASE("switch heads: generation with a KV cache equals the full forward pass", "[cache][switch_heads]") {
  ModelConfig c = with_experts(8, 2, SwitchProjections::key_value, 2);
  c.num_hidden_layers = 2;
  test::TokenBatch all;
  all.add(test::random_tokens(9, c.vocab_size, 4));
  TestModel m(c, all);
  m.randomize();
  const std::vector<double> expected = m.logits();
  Arena memory("generation", 1 << 20);
  KeyValueCache cache = m.model.make_cache(memory, 8, DType::f64);
  const Batch b = all.view();
  for (int64_t begin = 0, count = 3; begin < 8; begin += count, count = 1) {
    Transformer::Saved s = m.model.make_saved(memory, count, DType::f64, Recompute::none);
    m.model.forward(*m.context,
                    {b.tokens.rows(begin, count), b.targets.rows(begin, count),
                     b.positions.rows(begin, count), b.first_key.rows(begin, count)},
                    s, {}, &cache);
    Pool pool;
    const Tensor out = pool.zeros(DType::f64, {count, c.vocab_size});
    m.model.logits(*m.context, out, s.hidden);
    for (int64_t i = 0; i < out.numel(); ++i)
      REQUIRE(Pool::get(out, i) ==
              Approx(expected[static_cast<size_t>(begin * c.vocab_size + i)]).epsilon(1e-12));
  }
}

TEST_CASE("switch heads: recomputed activations change no bit of any gradient", "[recompute][switch_heads]") {
  ModelConfig c = with_experts(4, 2, SwitchProjections::key_value);
  c.num_hidden_layers = 3;
  TestModel none(c, test::tiny_batch(), DType::bf16),
      block(c, test::tiny_batch(), DType::bf16, Recompute::block);
  CHECK(none.loss_and_gradient() == block.loss_and_gradient());
  CHECK(std::memcmp(none.store.flat_grads().data, block.store.flat_grads().data,
                    static_cast<size_t>(none.store.flat_grads().bytes())) == 0);
}

}  // namespace sluice
