// Compares all gradients of all options with central differences. It iterates over the names of the enums, so
// that a new enumerator is tested automatically.
#include <catch2/catch.hpp>
#include <functional>
#include <set>

#include "support/enums.h"
#include "support/model.h"

namespace sluice {
namespace {

using test::for_each_value;
using test::gradient_error;
using test::kCount;
using test::name_of;
using test::Pool;
using test::TestModel;

constexpr double kTolerance = 1e-7;

std::string describe(const ModelConfig& c) {
  std::string text = fmt::format(
      "kind {}, output_norm {}, output_activation {}, norm {}, qk_norm {}, tied {}, clip {}",
      name_of(c.attention.kind), name_of(c.attention.output_norm), name_of(c.attention.output_activation),
      name_of(c.norm_placement), c.qk_norm, c.tie_word_embeddings, c.branch_clip.value_or(0));
  for (const GateConfig& g : c.attention.gates)
    text += fmt::format("; gate {} {} {} {} {} {}", name_of(g.position), name_of(g.granularity),
                        name_of(g.heads), name_of(g.combine), name_of(g.activation), name_of(g.input));
  return text;
}

/// The largest error over the parameters. Differences are taken in `samples` elements of each.
void check_gradients(const ModelConfig& config, int64_t samples, double step = 1e-5) {
  const test::OneThread one_thread;
  // Softpick has a kink at a score of 0, and steep weights around it where a token sees itself alone: smaller
  // steps, whose differences keep fewer digits.
  const bool steep = config.attention.kind == AttentionKind::softpick;
  if (steep) step = std::min(step, 1e-6);
  TestModel m(config, test::tiny_batch());
  m.randomize();
  m.loss_and_gradient();
  double worst = 0;
  std::string where;
  double largest = 0;
  for (size_t i = 0; i < m.store.specs().size(); ++i) {
    const auto id = static_cast<ParamStore::Id>(i);
    const double error = gradient_error(
        m.store.value(id), m.store.grad(id), [&] { return m.loss(); }, samples, step);
    for (int64_t j = 0; j < m.store.numel(id); ++j)
      largest = std::max(largest, std::abs(Pool::get(m.store.grad(id), j)));
    if (!(error <= worst)) worst = error, where = m.store.specs()[i].name;
  }
  INFO(describe(config) << "; worst: " << where);
  CHECK(worst <= (steep ? 10 : 1) * kTolerance);
  CHECK(largest > 1e-3);  // a model whose gradients vanish proves nothing
}

bool possible(const GateConfig& g) {
  return g.position != GatePosition::dense_output || g.granularity == GateGranularity::elementwise;
}

}  // namespace

TEST_CASE("gradients of every gate variant equal central differences", "[gradient][gate]") {
  int variants = 0;
  for_each_value<GatePosition>([&](GatePosition position) {
    for_each_value<GateGranularity>([&](GateGranularity granularity) {
      for_each_value<GateSharing>([&](GateSharing heads) {
        for_each_value<GateCombine>([&](GateCombine combine) {
          for_each_value<GateActivation>([&](GateActivation activation) {
            for_each_value<GateInput>([&](GateInput input) {
              ModelConfig c = test::tiny_config();
              c.attention.gates = {{position, granularity, heads, combine, activation, input}};
              if (!possible(c.attention.gates[0])) return;
              // Alternating with and without qk_norm.
              c.qk_norm = variants++ % 2 == 0;
              check_gradients(c, 3);
            });
          });
        });
      });
    });
  });
  // All of them except headwise gates of the layer's output, which has no heads.
  CHECK(variants == (kCount<GatePosition> * 2 - 1) * 3 * 2 * kCount<GateActivation> * kCount<GateInput>);
}

TEST_CASE("gradients of every combination of the other options equal central differences", "[gradient]") {
  for_each_value<AttentionKind>([&](AttentionKind kind) {
    for_each_value<OutputNorm>([&](OutputNorm output_norm) {
      for_each_value<OutputActivation>([&](OutputActivation output_activation) {
        for_each_value<NormPlacement>([&](NormPlacement norm_placement) {
          for (const bool qk_norm : {false, true})
            for (const bool tied : {false, true}) {
              ModelConfig c = test::tiny_config();
              c.attention.kind = kind;
              c.attention.output_norm = output_norm;
              c.attention.output_activation = output_activation;
              c.norm_placement = norm_placement;
              c.qk_norm = qk_norm;
              c.tie_word_embeddings = tied;
              if (tied != qk_norm) c.attention.gates = {GateConfig{}};
              // An indexer changes the random weights behind it; among them are steep norms.
              check_gradients(c, 3, kind == AttentionKind::sparse ? 3e-6 : 1e-5);
            }
        });
      });
    });
  });
}

TEST_CASE(
    "gradients of truncated inputs, biases, exclusive attention and gated norms equal central differences",
    "[gradient][gate][variants]") {
  for_each_value<ExclusiveAttention>([&](ExclusiveAttention exclusive) {
    for_each_value<GatePosition>([&](GatePosition position) {
      for (const bool more : {false, true}) {
        ModelConfig c = test::tiny_config();
        c.attention.exclusive = exclusive;
        if (exclusive == ExclusiveAttention::none && more) c.gated_norm.rank = 2;
        GateConfig g = {.position = position, .input_channels = more ? 4 : 0, .bias = 0.3};
        if (more && position != GatePosition::dense_output) g.granularity = GateGranularity::headwise;
        c.attention.gates = {g};
        if (more) c.attention.output_norm = OutputNorm::rmsnorm;
        g = {.position = position, .input = GateInput::self, .bias = -0.2};
        if (more) c.attention.gates.push_back(g);  // truncated inputs first, or added to another gradient
        if (more) std::reverse(c.attention.gates.begin(), c.attention.gates.end());
        check_gradients(c, 3);
      }
    });
  });
}

TEST_CASE("gradients of biases of the projections equal central differences", "[gradient][bias]") {
  for_each_value<AttentionKind>([&](AttentionKind kind) {
    for (const bool more : {false, true}) {
      ModelConfig c = test::tiny_config();
      c.attention_bias = true;
      c.attention.kind = kind;
      c.qk_norm = more;
      if (more) c.attention.gates = {GateConfig{.position = GatePosition::value}, GateConfig{}};
      // An indexer changes the random weights behind it; among them are steep norms.
      check_gradients(c, 6, kind == AttentionKind::sparse ? 3e-6 : 1e-5);
    }
  });
  ModelConfig c = test::tiny_config();
  c.attention_bias = true;
  c.attention.switch_heads.num_experts = 3;
  c.attention.switch_heads.num_experts_per_tok = 2;
  c.attention.switch_heads.projections = SwitchProjections::key_value;
  check_gradients(c, 6);
}

TEST_CASE("gradients of all that a gpt-oss is made of equal central differences", "[gradient][moe][bias]") {
  ModelConfig c = test::tiny_config();
  c.num_hidden_layers = 2;
  c.attention_bias = true;
  c.qk_norm = c.tie_word_embeddings = false;
  c.attention.kind = AttentionKind::sink;
  c.attention.window = 2;
  c.attention.window_pattern = 2;
  c.rope.scaling = {RopeScalingType::yarn, 4.0, 16, 32.0, 1.0, false};
  c.moe.num_experts = 4;
  c.moe.num_experts_per_tok = 2;
  c.moe.moe_intermediate_size = 4;
  c.moe.bias = true;
  c.moe.swiglu_limit = 0.7;
  c.moe.load_balance.coefficient = c.moe.router_z_loss_coefficient = 0;  // not part of the loss
  check_gradients(c, 6, 1e-6);
}

TEST_CASE("gradients with two gates at each of the five positions and every other option",
          "[gradient][gate]") {
  for_each_value<AttentionKind>([&](AttentionKind kind) {
    for (const bool qk_norm : {false, true}) {
      ModelConfig c = test::tiny_config();
      c.num_hidden_layers = 2;
      c.attention.kind = kind;
      c.qk_norm = qk_norm;
      c.attention.output_norm = OutputNorm::rmsnorm;
      c.attention.output_activation = OutputActivation::silu;
      c.norm_placement = NormPlacement::sandwich;
      for_each_value<GatePosition>([&](GatePosition position) {
        GateConfig g;
        g.position = position;
        c.attention.gates.push_back(g);
        g.combine = GateCombine::add;
        g.activation = GateActivation::silu;
        if (position != GatePosition::dense_output) g.granularity = GateGranularity::headwise;
        c.attention.gates.insert(c.attention.gates.begin(), g);
        g.input = GateInput::none;
        c.attention.gates.push_back(g);
      });
      check_gradients(c, 3);
    }
  });
}

TEST_CASE("gradients through an active branch clip equal central differences", "[gradient][clip]") {
  for_each_value<NormPlacement>([&](NormPlacement norm_placement) {
    ModelConfig c = test::tiny_config();
    c.norm_placement = norm_placement;
    // The derivative jumps at |x| = limit. Choose the limit farthest from all values.
    const test::OneThread one_thread;
    double best = 0, best_distance = 0;
    int64_t held = 0, passed = 0;
    for (double limit = 0.2; limit < 0.6; limit += 0.005) {
      c.branch_clip = limit;
      TestModel m(c, test::tiny_batch());
      m.randomize();
      m.loss();
      double distance = 1;
      int64_t above = 0, below = 0;
      for (const Tensor& t : {m.saved.blocks[0].attention.y, m.saved.blocks[0].ffn.y})
        for (int64_t i = 0; i < t.numel(); ++i) {
          const double x = std::abs(Pool::get(t, i));
          distance = std::min(distance, std::abs(x - limit));
          (x > limit ? above : below) += 1;
        }
      if (distance > best_distance) best = limit, best_distance = distance, held = above, passed = below;
    }
    INFO("limit " << best << ", nearest value " << best_distance);
    CHECK(held > 5);
    CHECK(passed > 5);
    REQUIRE(best_distance > 1e-3);
    c.branch_clip = best;
    check_gradients(c, 4, 1e-6);
  });
}

TEST_CASE("gradients of nanochat's options, each alone and all together", "[gradient][nanochat]") {
  const auto check = [](const std::function<void(ModelConfig&)>& change) {
    for_each_value<NormPlacement>([&](NormPlacement norm_placement) {
      ModelConfig c = test::tiny_config();
      c.norm_placement = norm_placement;
      c.attention.output_norm = norm_placement == NormPlacement::pre ? OutputNorm::none : OutputNorm::rmsnorm;
      c.attention.gates = {GateConfig{.position = GatePosition::query}, GateConfig{}};
      c.tie_word_embeddings = false;
      change(c);
      // The second derivative of relu2 jumps, so steps are smaller, and few cross it.
      check_gradients(c, 3, c.hidden_act == HiddenAct::relu2 ? 1e-6 : 1e-5);
    });
  };
  for_each_value<HiddenAct>([&](HiddenAct x) { check([&](ModelConfig& c) { c.hidden_act = x; }); });
  for_each_value<QkNormOrder>([&](QkNormOrder x) { check([&](ModelConfig& c) { c.qk_norm_order = x; }); });
  for_each_value<QkNormOrder>(
      [&](QkNormOrder x) { check([&](ModelConfig& c) { c.qk_norm_order = x, c.norm_weights = false; }); });
  for (const bool weights : {false, true})
    check([&](ModelConfig& c) { c.embedding_norm = true, c.norm_weights = weights; });
  check([](ModelConfig& c) { c.final_logit_softcapping = 1.5; });
  check([](ModelConfig& c) {
    c.hidden_act = HiddenAct::relu2;
    c.qk_norm_order = QkNormOrder::after_rope;
    c.norm_weights = false;
    c.embedding_norm = true;
    c.final_logit_softcapping = 1.5;
  });
}

TEST_CASE(
    "gradients of head layouts: one key/value head, as many as query heads, one head, heads wider than the "
    "model",
    "[gradient]") {
  for (const auto& [heads, kv_heads, head_dim] :
       std::vector<std::array<int64_t, 3>>{{4, 1, 4}, {4, 4, 2}, {1, 1, 4}, {6, 3, 10}}) {
    ModelConfig c = test::tiny_config();
    c.num_attention_heads = heads;
    c.num_key_value_heads = kv_heads;
    c.head_dim = head_dim;
    c.attention.kind = AttentionKind::sink;
    GateConfig g;
    g.input = GateInput::none;
    c.attention.gates = {GateConfig{}, g};
    check_gradients(c, 4);
  }
}

TEST_CASE("gradients of the head balance loss equal central differences for every mechanism",
          "[gradient][heads]") {
  int turn = 0;
  const auto check = [&](ModelConfig c) {
    for (const int64_t kv_heads : {1, 2, 4}) {
      // Heads left out, one or two layers, both deviations, first tokens counted or not, in rotating
      // combinations.
      c.num_key_value_heads = kv_heads;
      c.num_hidden_layers = 1 + turn % 2;
      c.qk_norm = turn % 5 != 0;
      HeadBalanceConfig& b = c.attention.head_balance;
      b.coefficient = 2;
      // On a single rank all scopes are the micro-batch, and the previous step has no gradient.
      b.scope = static_cast<HeadBalanceScope>((turn + turn / 3) % 3);
      b.shared_heads = turn / 3 % 3;
      b.shared_from = SharedHeads::online;
      b.ddof = turn / 2 % 2;
      b.skip_first = turn / 4 % 2 == 0;
      ++turn;
      INFO(fmt::format("balance: kv heads {}, shared {}, ddof {}, skip_first {}, layers {}", kv_heads,
                       b.shared_heads, b.ddof, b.skip_first, c.num_hidden_layers));
      check_gradients(c, 3, 3e-6);
    }
  };
  for_each_value<AttentionKind>([&](AttentionKind kind) {
    ModelConfig c = test::tiny_config();
    c.attention.kind = kind;
    check(c);
    c.attention.gates = {GateConfig{.position = GatePosition::value}};
    c.attention.output_norm = OutputNorm::rmsnorm;
    c.norm_placement = NormPlacement::sandwich;
    check(c);
    for_each_value<GateGranularity>([&](GateGranularity granularity) {
      for_each_value<GateInput>([&](GateInput input) {
        ModelConfig gated = test::tiny_config();
        gated.attention.kind = kind;
        gated.attention.gates = {GateConfig{.granularity = granularity, .input = input}};
        gated.attention.gates[0].activation = turn % 2 ? GateActivation::ns_sigmoid : GateActivation::sigmoid;
        check(gated);
      });
    });
    // The first of two gates counts, after a norm, so that it is not fused.
    ModelConfig two = test::tiny_config();
    two.attention.kind = kind;
    two.attention.gates = {GateConfig{.position = GatePosition::query}, GateConfig{},
                           GateConfig{.activation = GateActivation::silu}};
    two.attention.output_norm = OutputNorm::rmsnorm;
    check(two);
  });
}

TEST_CASE("gradients of the logit z-loss, with and without a soft cap and tied weights", "[gradient]") {
  for (const bool tied : {false, true})
    for (const double cap : {0.0, 1.5}) {
      ModelConfig c = test::tiny_config();
      c.tie_word_embeddings = tied;
      if (cap > 0) c.final_logit_softcapping = cap;
      c.logit_z_loss_coefficient = 0.3;
      check_gradients(c, 1000);
    }
}

TEST_CASE("recomputed blocks count their heads once and give the same bits", "[gradient][heads]") {
  const test::OneThread one_thread;
  for_each_value<AttentionKind>([&](AttentionKind kind) {
    ModelConfig c = test::tiny_config();
    c.num_hidden_layers = 3;
    c.attention.kind = kind;
    c.attention.head_balance.coefficient = 1;
    std::vector<std::string> bits;
    for (const Recompute recompute : {Recompute::none, Recompute::block}) {
      TestModel m(c, test::tiny_batch(), DType::f32, recompute);
      m.randomize();
      m.loss_and_gradient();
      bits.emplace_back();
      for (size_t i = 0; i < m.store.specs().size(); ++i) {
        const Tensor g = m.store.grad(static_cast<ParamStore::Id>(i));
        bits.back().append(static_cast<const char*>(g.data), static_cast<size_t>(g.bytes()));
      }
      const Tensor rows = m.load.heads.totals;
      bits.back().append(static_cast<const char*>(rows.data), static_cast<size_t>(rows.bytes()));
    }
    CHECK(bits[0] == bits[1]);
  });
}

TEST_CASE("a model's gradients that begin with products have the bits of ones that begin at zero",
          "[gradient][moe]") {
  const test::OneThread one_thread;
  std::vector<ModelConfig> configs(4, test::tiny_config());
  configs[0].attention.gates = {GateConfig{}, GateConfig{.position = GatePosition::value}};
  configs[1].tie_word_embeddings = true;
  configs[2].attention.kind = AttentionKind::sink;
  configs[2].attention_bias = true;
  configs[3].moe.num_experts = 16;  // more than have tokens
  configs[3].moe.num_experts_per_tok = 2;
  configs[3].moe.moe_intermediate_size = 4;
  configs[3].moe.shared_expert_intermediate_size = 4;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64})
    for (size_t i = 0; i < configs.size(); ++i)
      for (const bool frozen : {false, true}) {
        CAPTURE(dtype_name(dtype), i, frozen);
        std::vector<ParameterRule> rules;
        if (frozen) {
          rules.emplace_back();
          rules.back().match = "down_proj";
          rules.back().trainable = false;
        }
        TestModel m(configs[i], test::tiny_batch(), dtype, Recompute::none, {}, {}, rules);
        m.randomize();
        m.loss_and_gradient();
        m.add_gradient();
        const Tensor flat = m.store.flat_grads();
        const std::string expected(static_cast<const char*>(flat.data), static_cast<size_t>(flat.bytes()));
        for (int64_t j = 0; j < flat.numel(); ++j) Pool::set(flat, j, NAN);
        for (int unit = 0; unit < m.store.num_units(); ++unit) m.store.begin_sums(*m.context, unit);
        m.add_gradient();
        for (int unit = 0; unit < m.store.num_units(); ++unit) m.store.end_sums(*m.context, unit);
        m.add_gradient();
        CHECK(expected == std::string(static_cast<const char*>(flat.data), expected.size()));
      }
}

TEST_CASE("gradients of MoE layers beside dense layers, gates and sandwich norms", "[gradient][moe]") {
  for_each_value<NormPlacement>([&](NormPlacement norm_placement) {
    for (const bool shared : {false, true}) {
      ModelConfig c = test::tiny_config();
      c.num_hidden_layers = 3;
      c.norm_placement = norm_placement;
      c.attention.gates = {GateConfig{}};
      c.moe.num_experts = 5;
      c.moe.num_experts_per_tok = 2;
      c.moe.moe_intermediate_size = 3;
      c.moe.shared_expert_intermediate_size = shared ? 4 : 0;
      c.moe.shared_expert_gate = shared;
      c.moe.mlp_only_layers = {1};
      c.moe.load_balance.coefficient = c.moe.router_z_loss_coefficient =
          0;  // not part of the loss that is differenced
      check_gradients(c, 3);
    }
  });
}

}  // namespace sluice
