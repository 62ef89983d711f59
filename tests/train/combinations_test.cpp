// Random combinations of gates, sinks, exclusive attention, norms, experts, head balance and switch heads.
// What validation accepts has the gradients that central differences say, and trains; what it refuses makes
// no sense.
#include <catch2/catch.hpp>
#include <map>

#include "config/fields.h"
#include "config/load.h"
#include "support/enums.h"
#include "support/model.h"
#include "support/tiny_training.h"

namespace sluice {
namespace {

using test::gradient_error;
using test::kCount;
using test::TestModel;

constexpr int kDraws = 600;

using Random = std::mt19937;

bool chance(Random& random, double p) { return std::uniform_real_distribution<double>()(random) < p; }
template <class E>
E any(Random& random) {
  return static_cast<E>(random() % static_cast<uint32_t>(kCount<E>));
}

GateConfig random_gate(Random& random) {
  GateConfig g;
  g.position = any<GatePosition>(random);
  g.granularity = any<GateGranularity>(random);
  g.heads = chance(random, 0.6) ? GateSharing::specific : any<GateSharing>(random);
  g.combine = chance(random, 0.7) ? GateCombine::multiply : GateCombine::add;
  g.activation = any<GateActivation>(random);
  g.input = any<GateInput>(random);
  if (chance(random, 0.2)) g.input_channels = 1 + static_cast<int64_t>(random() % 4);
  if (chance(random, 0.2)) g.init = GateInit::zero;
  if (chance(random, 0.2)) g.bias = 0.5;
  return g;
}

/// The same choices for every model that a generator in the same state is given.
void choose(ModelConfig& m, Random& random) {
  AttentionConfig& a = m.attention;
  // The selection of sparse attention is not differentiable: nn/sparse_attention_test.cpp.
  do a.kind = any<AttentionKind>(random);
  while (a.kind == AttentionKind::sparse);
  if (chance(random, 0.3)) a.window = 2 + static_cast<int64_t>(random() % 4);
  if (a.window > 0 && chance(random, 0.5)) a.window_pattern = m.num_hidden_layers = 2;
  a.gates.clear();
  for (auto count = random() % 4; count > 0; --count) a.gates.push_back(random_gate(random));
  a.exclusive = any<ExclusiveAttention>(random);
  a.output_norm = any<OutputNorm>(random);
  a.output_activation = chance(random, 0.7) ? OutputActivation::none : OutputActivation::silu;
  m.gated_norm.rank = static_cast<int64_t>(random() % 3);
  if (chance(random, 0.2)) m.gated_norm.init = GateInit::zero;
  m.norm_placement = any<NormPlacement>(random);
  m.qk_norm = chance(random, 0.7);
  if (chance(random, 0.3)) {
    m.moe.num_experts = 4;
    m.moe.num_experts_per_tok = 2;
    m.moe.moe_intermediate_size = 4;
    if (chance(random, 0.5)) m.moe.shared_expert_intermediate_size = 4, m.moe.shared_expert_gate = true;
  }
  // Not part of the loss that is differenced.
  m.moe.load_balance.coefficient = m.moe.router_z_loss_coefficient = 0;
  if (chance(random, 0.3)) a.head_balance.coefficient = 0.1;
  if (chance(random, 0.3)) {
    a.switch_heads.num_experts = 3;
    a.switch_heads.num_experts_per_tok = 2;
    a.switch_heads.projections = any<SwitchProjections>(random);
  }
  m.attention_bias = chance(random, 0.3);
  if (m.moe.num_experts == 0) return;
  m.moe.bias = chance(random, 0.5);
  if (chance(random, 0.5)) m.moe.swiglu_limit = 1.5;
}

/// The rules of configs/README.md, said again.
bool makes_sense(const ModelConfig& m) {
  bool first = true;
  for (const GateConfig& g : m.attention.gates) {
    if (g.position == GatePosition::dense_output &&
        (g.granularity != GateGranularity::elementwise || g.heads != GateSharing::specific))
      return false;
    if (g.input != GateInput::hidden && g.input_channels > 0) return false;
    if (g.input == GateInput::none && (g.bias || g.init == GateInit::zero)) return false;
    if (g.position != GatePosition::sdpa_output) continue;
    const bool measures =
        g.heads == GateSharing::specific && g.combine == GateCombine::multiply &&
        (g.activation == GateActivation::sigmoid || g.activation == GateActivation::ns_sigmoid);
    if (first && m.attention.head_balance.coefficient > 0 && !measures) return false;
    first = false;
  }
  return m.gated_norm.rank > 0 || m.gated_norm.init == GateInit::matrix;
}

/// What validation says; "" if it accepts.
std::string refusal(Config config) {
  config.model.vocab_size = 0;  // the corpus of the test has fewer tokens than there are bytes
  try {
    validate_for_training(config);
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::usage);
    const std::string text = error.what();
    CHECK(text.find("model.") != std::string::npos);
    return text;
  }
  return "";
}

std::string describe(const ModelConfig& m) {
  std::string text = fmt::format(
      "{} window {} {} exclusive {} {} {} gated norm {} {} {} qk_norm {} experts {} bias {} limit {} balance "
      "{} switch {} {} attention bias {}",
      enum_name(m.attention.kind), m.attention.window, m.attention.window_pattern,
      enum_name(m.attention.exclusive), enum_name(m.attention.output_norm),
      enum_name(m.attention.output_activation), m.gated_norm.rank, enum_name(m.gated_norm.init),
      enum_name(m.norm_placement), m.qk_norm, m.moe.num_experts, m.moe.bias, m.moe.swiglu_limit.value_or(0),
      m.attention.head_balance.coefficient, m.attention.switch_heads.num_experts,
      enum_name(m.attention.switch_heads.projections), m.attention_bias);
  for (const GateConfig& g : m.attention.gates)
    text += fmt::format("; {} {} {} {} {} {} {} {} {}", enum_name(g.position), enum_name(g.granularity),
                        enum_name(g.heads), enum_name(g.combine), enum_name(g.activation), enum_name(g.input),
                        g.input_channels, enum_name(g.init), g.bias.value_or(0));
  return text;
}

void check_gradients(const ModelConfig& config) {
  TestModel m(config, test::tiny_batch());
  m.randomize();
  m.loss_and_gradient();
  double worst = 0;
  std::string where;
  for (size_t i = 0; i < m.store.specs().size(); ++i) {
    const auto id = static_cast<ParamStore::Id>(i);
    const auto error_with = [&](double step) {
      return gradient_error(
          m.store.value(id), m.store.grad(id), [&] { return m.loss(); }, 2, step, 1e-4);
    };
    // A wide step resolves small gradients; a narrow one seldom crosses a kink of softpick or a change of the
    // selected experts.
    const double error = std::min(error_with(2e-6), error_with(2e-7));
    if (!(error <= worst)) worst = error, where = m.store.specs()[i].name;
  }
  INFO("worst: " << where);
  CHECK(worst <= 1e-6);
}

void check_step(const Config& config, const Blend& blend) {
  Trainer trainer(config, blend);
  trainer.initialize();
  const std::string before = test::all_bits(trainer);
  const StepMetrics step = trainer.step();
  CHECK(std::isfinite(step.loss));
  CHECK(std::isfinite(step.grad_norm));
  CHECK(step.grad_norm > 0);
  CHECK(test::all_bits(trainer) != before);
}

}  // namespace

TEST_CASE("random combinations of variants: gradients, one training step, refusals", "[combinations]") {
  const test::OneThread one_thread;
  test::TinyTraining tiny;
  tiny.config.data.seq_len = 16;
  const Blend blend = tiny.blend();
  int accepted = 0, refused = 0;
  for (uint32_t draw = 0; draw < kDraws; ++draw) {
    Config config = tiny.config;
    ModelConfig model = test::tiny_config();
    Random for_training(draw), for_gradients(draw);
    choose(config.model, for_training);
    choose(model, for_gradients);
    INFO("draw " << draw << ": " << describe(model));
    const std::string problem = refusal(config);
    INFO(problem);
    REQUIRE(problem.empty() == makes_sense(model));
    if (!problem.empty()) {
      ++refused;
      continue;
    }
    ++accepted;
    check_gradients(model);
    check_step(config, blend);
  }
  // Enough of both, or the walk shows nothing.
  CHECK(accepted >= 60);
  CHECK(refused >= 40);
}

}  // namespace sluice
