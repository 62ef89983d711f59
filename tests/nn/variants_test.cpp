// Gates that start as the identity, truncated inputs, biases, gates of the value state, exclusive attention,
// GatedNorm, and the order of what comes after attention: each against its formula.
#include <catch2/catch.hpp>
#include <cmath>

#include "config/fields.h"
#include "support/enums.h"
#include "support/model.h"

namespace sluice {
namespace {

using test::for_each_value;
using test::Pool;
using test::TestModel;
using P = GatePosition;

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f64};

ModelConfig two_layers() {
  ModelConfig c = test::tiny_config();
  c.num_hidden_layers = 2;
  return c;
}

double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

/// 2 sigmoid(W x[:2] + 0) with W = 0.
GateConfig identity_gate(P position, GateGranularity granularity) {
  return {.position = position,
          .granularity = granularity,
          .activation = GateActivation::two_sigmoid,
          .input_channels = 2,
          .init = GateInit::zero};
}

/// The loss of a model of this configuration, as it starts.
double first_loss(const ModelConfig& config, DType type) {
  TestModel m(config, test::tiny_batch(), type);
  return m.loss();
}

void set_all(TestModel& m, const std::string& part, double value) {
  int64_t found = 0;
  for (size_t i = 0; i < m.store.specs().size(); ++i) {
    if (m.store.specs()[i].name.find(part) == std::string::npos) continue;
    const Tensor t = m.store.value(static_cast<ParamStore::Id>(i));
    for (int64_t j = 0; j < t.numel(); ++j) Pool::set(t, j, value);
    ++found;
  }
  REQUIRE(found > 0);
}

/// sum over i of a[i] b[i].
double product(const Tensor& a, int64_t first_a, const Tensor& b, int64_t first_b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += Pool::get(a, first_a + i) * Pool::get(b, first_b + i);
  return sum;
}

}  // namespace

TEST_CASE("2 sigmoid gates with zero weights give the baseline's first loss bit for bit", "[variants]") {
  for (const DType type : kTypes) {
    const double baseline = first_loss(two_layers(), type);
    for_each_value<GatePosition>([&](P position) {
      for_each_value<GateGranularity>([&](GateGranularity granularity) {
        if (position == P::dense_output && granularity == GateGranularity::headwise) return;
        ModelConfig c = two_layers();
        c.attention.gates = {identity_gate(position, granularity)};
        if (position == P::sdpa_output) c.attention.gates[0].bias = 0;
        TestModel m(c, test::tiny_batch(), type);
        INFO(test::name_of(position) << " " << test::name_of(granularity) << " " << dtype_name(type));
        CHECK(m.loss() == baseline);
        set_all(m, "gate_proj.weight", 0.5);  // the gate is there
        CHECK(m.loss() != baseline);
      });
    });
  }
}

TEST_CASE("learned exclusive attention gives the baseline's first loss bit for bit",
          "[variants][exclusive]") {
  for (const DType type : kTypes) {
    ModelConfig c = two_layers();
    c.attention.exclusive = ExclusiveAttention::learned;
    TestModel m(c, test::tiny_batch(), type);
    const double baseline = first_loss(two_layers(), type);
    CHECK(m.loss() == baseline);
    set_all(m, "exclusive_scale", 1);
    CHECK(m.loss() != baseline);
    c.attention.exclusive = ExclusiveAttention::full;
    CHECK(m.loss() == first_loss(c, type));
  }
}

TEST_CASE("tokens that see only themselves give exclusive attention nothing to say and nothing to learn",
          "[variants][exclusive]") {
  const auto learns = [](const ModelConfig& c, DType type) {
    TestModel m(c, test::tiny_batch(), type);
    m.randomize();
    if (c.attention.exclusive == ExclusiveAttention::learned) set_all(m, "exclusive_scale", 1);
    CHECK(std::isfinite(m.loss_and_gradient()));
    double largest = 0;
    for (const char* name : {"q_proj", "k_proj", "v_proj"}) {
      const Tensor d = m.store.grad(m.id("model.layers.0.self_attn." + std::string(name) + ".weight"));
      for (int64_t i = 0; i < d.numel(); ++i) largest = std::max(largest, std::abs(Pool::get(d, i)));
    }
    return largest > 0;
  };
  for (const DType type : {DType::f32, DType::bf16, DType::f64})
    for (const ExclusiveAttention exclusive : {ExclusiveAttention::full, ExclusiveAttention::learned})
      for_each_value<OutputNorm>([&](OutputNorm norm) {
        for_each_value<NormPlacement>([&](NormPlacement placement) {
          for (const AttentionKind kind : {AttentionKind::softmax, AttentionKind::sink}) {
            INFO(dtype_name(type) << " " << enum_name(exclusive) << " " << enum_name(norm) << " "
                                  << enum_name(placement) << " " << enum_name(kind));
            ModelConfig c = two_layers();
            c.rms_norm_eps = 1e-6;
            c.attention.kind = kind;
            c.attention.exclusive = exclusive;
            c.attention.output_norm = norm;
            c.norm_placement = placement;
            c.attention.window = 1;
            // Without a norm the rounding of bf16 stays what it is.
            const bool rounding = type == DType::bf16 && kind == AttentionKind::sink &&
                                  norm == OutputNorm::none && placement == NormPlacement::pre;
            CHECK(learns(c, type) == rounding);
            if (type != DType::f32 || norm == OutputNorm::none) continue;
            c.attention.window = 2;
            CHECK(learns(c, type));
          }
        });
      });
}

TEST_CASE("a gate of leading channels equals one whose other weights are zero", "[variants][gate]") {
  for_each_value<GatePosition>([&](P position) {
    ModelConfig c = two_layers();
    const int64_t C = c.hidden_size, n = 2;
    c.attention.gates = {{.position = position, .input_channels = n}};
    TestModel truncated(c, test::tiny_batch());
    c.attention.gates[0].input_channels = 0;
    TestModel whole(c, test::tiny_batch());
    truncated.randomize();
    whole.copy_from(truncated);
    for (size_t i = 0; i < whole.store.specs().size(); ++i) {
      if (whole.store.specs()[i].name.find("self_attn.") == std::string::npos ||
          whole.store.specs()[i].name.find("gate_proj") == std::string::npos)
        continue;
      const auto id = static_cast<ParamStore::Id>(i);
      REQUIRE(truncated.store.specs()[i].shape[1] == n);
      for (int64_t j = 0; j < whole.store.numel(id); ++j)
        Pool::set(whole.store.value(id), j,
                  j % C < n ? Pool::get(truncated.store.value(id), j / C * n + j % C) : 0);
    }
    CHECK(truncated.loss_and_gradient() == Approx(whole.loss_and_gradient()).epsilon(1e-13));
    const ParamStore::Id embedding = whole.id("model.embed_tokens.weight");
    CHECK(test::relative_error(truncated.store.grad(embedding), whole.store.grad(embedding)) < 1e-12);
  });
}

TEST_CASE("a gate's bias starts where the configuration says, and alone gives constant scores",
          "[variants][gate]") {
  for (const auto granularity : {GateGranularity::elementwise, GateGranularity::headwise}) {
    ModelConfig c = two_layers();
    c.attention.gates = {{.granularity = granularity, .init = GateInit::zero, .bias = -1.25}};
    TestModel m(c, test::tiny_batch());
    const ParamStore::Id bias = m.id("model.layers.0.self_attn.gate_proj.bias");
    CHECK(m.store.numel(bias) ==
          (granularity == GateGranularity::headwise ? 1 : c.head_dim) * c.num_attention_heads);
    CHECK_FALSE(m.store.specs()[static_cast<size_t>(bias)].weight_decay);
    for (int64_t i = 0; i < m.store.numel(bias); ++i) CHECK(Pool::get(m.store.value(bias), i) == -1.25);
    m.loss();
    const Attention::Saved& s = m.saved.blocks[0].attention;
    for (int64_t i = 0; i < s.core.o.numel(); ++i)
      REQUIRE(Pool::get(s.gates[P::sdpa_output].y, i) ==
              Approx(Pool::get(s.core.o, i) * sigmoid(-1.25)).epsilon(1e-13));
  }
}

TEST_CASE("the value-state gate computes its scores from the values that it gates", "[variants][gate]") {
  for (const auto granularity : {GateGranularity::headwise, GateGranularity::elementwise}) {
    ModelConfig c = two_layers();
    c.attention.gates = {{.position = P::value, .granularity = granularity, .input = GateInput::self}};
    TestModel m(c, test::tiny_batch());
    m.randomize();
    m.loss();
    const Attention::Saved& s = m.saved.blocks[1].attention;
    const Tensor w = m.store.value(m.id("model.layers.1.self_attn.value_self_gate_proj.weight")), v = s.v.y,
                 gated = s.gates[P::value].y;
    const int64_t width = v.dim(1) * v.dim(2), D = v.dim(2);
    for (int64_t i = 0; i < v.numel(); ++i) {
      const int64_t t = i / width, row = granularity == GateGranularity::headwise ? i % width / D : i % width;
      const double score = sigmoid(product(w, row * width, v, t * width, width));
      REQUIRE(Pool::get(gated, i) == Approx(Pool::get(v, i) * score).epsilon(1e-12));
    }
  }
}

TEST_CASE("exclusive attention acts on the core's output, with the gated values, before norm and gate",
          "[variants][exclusive]") {
  ModelConfig c = two_layers();
  c.attention.kind = AttentionKind::sink;
  c.attention.exclusive = ExclusiveAttention::full;
  c.attention.output_norm = OutputNorm::rmsnorm;
  c.attention.gates = {{.position = P::value}, {.granularity = GateGranularity::headwise}};
  TestModel m(c, test::tiny_batch());
  m.randomize();
  m.loss();
  const Attention::Saved& s = m.saved.blocks[1].attention;
  const Tensor weight = m.store.value(m.id("model.layers.1.self_attn.o_norm.weight")),
               values = s.gates[P::value].y, z = s.gates[P::sdpa_output].gates[0].z, y = s.core.y,
               out = s.exclusive.y;
  const int64_t H = y.dim(1), D = y.dim(2), group = H / values.dim(1);
  for (int64_t row = 0; row < y.dim(0) * H; ++row) {
    const int64_t value = row / group * D;
    CHECK(std::abs(product(out, row * D, values, value, D)) < 1e-12);
    const double c_th = product(y, row * D, values, value, D) / product(values, value, values, value, D);
    const double rstd =
        1 / std::sqrt(product(out, row * D, out, row * D, D) / static_cast<double>(D) + c.rms_norm_eps);
    for (int64_t d = 0; d < D; ++d) {
      REQUIRE(Pool::get(out, row * D + d) ==
              Approx(Pool::get(y, row * D + d) - c_th * Pool::get(values, value + d)).margin(1e-13));
      REQUIRE(Pool::get(s.gates[P::sdpa_output].y, row * D + d) ==
              Approx(Pool::get(out, row * D + d) * rstd * Pool::get(weight, row % H * D + d) *
                     sigmoid(Pool::get(z, row)))
                  .margin(1e-12));
    }
  }
}

TEST_CASE("RMSNorm of each head comes before its gate", "[variants][gate]") {
  ModelConfig c = two_layers();
  c.attention.output_norm = OutputNorm::rmsnorm;
  c.attention.gates = {GateConfig{}};
  TestModel m(c, test::tiny_batch());
  m.randomize();
  m.loss();
  const Attention::Saved& s = m.saved.blocks[0].attention;
  const Tensor weight = m.store.value(m.id("model.layers.0.self_attn.o_norm.weight")), o = s.core.o,
               z = s.gates[P::sdpa_output].gates[0].z, y = s.gates[P::sdpa_output].y;
  const int64_t H = o.dim(1), D = o.dim(2);
  for (int64_t row = 0; row < o.dim(0) * H; ++row) {
    const double rstd =
        1 / std::sqrt(product(o, row * D, o, row * D, D) / static_cast<double>(D) + c.rms_norm_eps);
    for (int64_t i = row * D; i < (row + 1) * D; ++i)
      REQUIRE(Pool::get(y, i) ==
              Approx(Pool::get(o, i) * rstd * Pool::get(weight, i % (H * D)) * sigmoid(Pool::get(z, i)))
                  .margin(1e-13));
  }
}

TEST_CASE("GatedNorm multiplies the norm by sigmoid(U silu(D n)), and with U = 0 is half the norm",
          "[variants][gated_norm]") {
  const DType dtype = GENERATE(DType::f64, DType::f32, DType::bf16);
  const double margin = dtype == DType::f64 ? 1e-13 : dtype == DType::f32 ? 1e-5 : 0.03;
  for (const auto init : {GateInit::matrix, GateInit::zero}) {
    ModelConfig c = two_layers();
    c.gated_norm = {3, init};
    TestModel m(c, test::tiny_batch(), dtype);
    if (init == GateInit::matrix) m.randomize();
    m.loss();
    const Block::Saved& block = m.saved.blocks[1];
    for (const auto& [s, name] : {std::pair(&block.attention_norm, "input_layernorm"),
                                  std::pair(&block.ffn_norm, "post_attention_layernorm")}) {
      const std::string prefix = std::string("model.layers.1.") + name;
      const Tensor down = m.store.value(m.id(prefix + ".gate_down.weight")),
                   up = m.store.value(m.id(prefix + ".gate_up.weight")), n = s->norm.y;
      const int64_t C = c.hidden_size, r = c.gated_norm.rank;
      for (int64_t t = 0; t < n.dim(0); ++t)
        for (int64_t i = 0; i < C; ++i) {
          double z = 0;
          for (int64_t k = 0; k < r; ++k) {
            const double x = product(down, k * C, n, t * C, C);
            z += Pool::get(up, i * r + k) * x * sigmoid(x);
          }
          const double value = Pool::get(n, t * C + i), gated = Pool::get(s->y, t * C + i);
          REQUIRE(gated == Approx(value * sigmoid(z)).margin(margin));
          if (init == GateInit::zero) REQUIRE(gated == 0.5 * value);
        }
    }
  }
}

TEST_CASE("variants decode with a KV cache as the full forward pass computes them", "[variants][cache]") {
  ModelConfig c = two_layers();
  c.attention.exclusive = ExclusiveAttention::full;
  c.gated_norm.rank = 2;
  c.attention.gates = {
      {.position = P::value, .granularity = GateGranularity::headwise, .input = GateInput::self},
      {.input_channels = 3, .bias = 0.5}};
  test::TokenBatch batch;
  batch.add(test::random_tokens(9, c.vocab_size, 3));
  TestModel m(c, batch);
  m.randomize();
  const std::vector<double> all = m.logits();
  Arena memory("cache", 1 << 20);
  KeyValueCache cache = m.model.make_cache(memory, 8, DType::f64);
  Pool pool;
  const auto V = static_cast<size_t>(c.vocab_size);
  for (int64_t begin = 0, count = 3; begin < 8; begin += count, count = 1) {
    const Batch whole = m.batch.view();
    const auto rows = [&](const Tensor& t) { return t.rows(begin, count); };
    Batch part = {.tokens = rows(whole.tokens),
                  .targets = rows(whole.targets),
                  .positions = rows(whole.positions),
                  .first_key = rows(whole.first_key)};
    Transformer::Saved s = m.model.make_saved(memory, count, DType::f64, Recompute::none);
    m.model.forward(*m.context, part, s, {}, &cache);
    const Tensor logits = pool.zeros(DType::f64, {count, c.vocab_size});
    m.model.logits(*m.context, logits, s.hidden);
    for (int64_t i = 0; i < logits.numel(); ++i)
      REQUIRE(Pool::get(logits, i) ==
              Approx(all[static_cast<size_t>(begin) * V + static_cast<size_t>(i)]).margin(1e-12));
  }
}

}  // namespace sluice
