// Attention layers, blocks and models against PyTorch (tests/golden, written by scripts/make_goldens).
#include <catch2/catch.hpp>
#include <fstream>
#include <nlohmann/json.hpp>

#include "ops/elementwise.h"
#include "optim/optimizer.h"
#include "support/model.h"

namespace sluice {
namespace {

using nlohmann::json;
using test::Pool;
using test::TestModel;

json read_golden(const std::string& name) {
  std::ifstream file(std::string(SLUICE_SOURCE_DIR) + "/tests/golden/" + name + ".json");
  REQUIRE(file.good());
  return json::parse(file);
}

template <class E>
E parse(const json& j) {
  const std::string word = j;
  for (size_t i = 0; i < EnumNames<E>::names.size(); ++i)
    if (EnumNames<E>::names[i] == word) return static_cast<E>(i);
  throw std::runtime_error("unknown " + word);
}

ModelConfig read_config(const json& j) {
  ModelConfig c;
  c.vocab_size = j["vocab_size"];
  c.hidden_size = j["hidden_size"];
  c.num_hidden_layers = j["num_hidden_layers"];
  c.num_attention_heads = j["num_attention_heads"];
  c.num_key_value_heads = j["num_key_value_heads"];
  c.head_dim = j["head_dim"];
  c.intermediate_size = j["intermediate_size"];
  c.tie_word_embeddings = j["tie_word_embeddings"];
  c.rms_norm_eps = j["rms_norm_eps"];
  c.qk_norm = j["qk_norm"];
  c.norm_placement = parse<NormPlacement>(j["norm_placement"]);
  if (!j["branch_clip"].is_null()) c.branch_clip = j["branch_clip"].get<double>();
  c.rope.theta = j["rope_theta"];
  c.attention.kind = parse<AttentionKind>(j["kind"]);
  c.attention.output_norm = parse<OutputNorm>(j["output_norm"]);
  c.attention.output_activation = parse<OutputActivation>(j["output_activation"]);
  for (const json& g : j["gates"])
    c.attention.gates.push_back({parse<GatePosition>(g["position"]), parse<GateGranularity>(g["granularity"]),
                                 parse<GateSharing>(g["heads"]), parse<GateCombine>(g["combine"]),
                                 parse<GateActivation>(g["activation"]), parse<GateInput>(g["input"])});
  return c;
}

void set_from_grid(const Tensor& t, const json& j, double grid) {
  REQUIRE(t.numel() == static_cast<int64_t>(j["grid"].size()));
  for (int64_t i = 0; i < t.numel(); ++i)
    Pool::set(t, i, j["grid"][static_cast<size_t>(i)].get<double>() / grid);
}

double error_against(const Tensor& t, const json& j) {
  Pool pool;
  REQUIRE(t.numel() == static_cast<int64_t>(j["data"].size()));
  const Tensor expected = pool.zeros(DType::f64, {t.numel()});
  for (int64_t i = 0; i < t.numel(); ++i) Pool::set(expected, i, j["data"][static_cast<size_t>(i)]);
  return test::relative_error(t, expected);
}

/// Sets values from the golden file, which must contain exactly the weights of the store.
void set_weights(ParamStore& store, const json& golden) {
  REQUIRE(store.specs().size() == golden["weights"].size());
  for (size_t i = 0; i < store.specs().size(); ++i) {
    const json& w = golden["weights"][store.specs()[i].name];
    REQUIRE(w["shape"] == json(store.specs()[i].shape));
    set_from_grid(store.value(static_cast<ParamStore::Id>(i)), w, golden["grid"]);
  }
}

void check_gradients(const ParamStore& store, const json& golden, double tolerance) {
  for (size_t i = 0; i < store.specs().size(); ++i) {
    const std::string& name = store.specs()[i].name;
    INFO(name);
    CHECK(error_against(store.grad(static_cast<ParamStore::Id>(i)), golden["gradients"][name]) < tolerance);
  }
}

test::TokenBatch tokens_of(const json& golden) {
  test::TokenBatch batch;
  std::vector<int32_t> document = golden["tokens"].get<std::vector<int32_t>>();
  document.push_back(golden["targets"].back());
  batch.add(document);
  REQUIRE(batch.targets == golden["targets"].get<std::vector<int32_t>>());
  return batch;
}

struct Precision64And32 {
  DType dtype;
  double tolerance;
};
// The golden files have nine digits.
constexpr Precision64And32 kPrecisions[] = {{DType::f64, 2e-8}, {DType::f32, 1e-5}};

void check_layer(const std::string& name) {
  const json golden = read_golden(name);
  const ModelConfig config = read_config(golden["config"]);
  const auto T = static_cast<int64_t>(golden["positions"].size());
  for (const auto& [dtype, tolerance] : kPrecisions) {
    INFO(name << " " << dtype_name(dtype));
    ParamStore store;
    const bool attention = golden["kind"] == "attention";
    // The weights in the golden file show which of both is registered.
    std::optional<Attention> layer;
    std::optional<Block> block;
    if (attention)
      layer.emplace(config, store, "model.layers.0.self_attn", 0);
    else
      block.emplace(config, store, 0);
    Context ctx(1 << 24);
    Arena memory("memory", 1 << 20), gradients("gradients", 1 << 20);
    store.allocate(ctx, dtype, T, memory, &gradients);
    set_weights(store, golden);
    store.pack(ctx);

    std::vector<int32_t> positions = golden["positions"], first_key = golden["first_key"];
    Arena table("table", 1 << 16);
    const Tensor cos = table.alloc("cos", accumulate_dtype(dtype), {64, config.head_dim / 2}),
                 sin = table.alloc("sin", accumulate_dtype(dtype), {64, config.head_dim / 2});
    for (int64_t p = 0; p < 64; ++p)
      for (int64_t i = 0; i < config.head_dim / 2; ++i) {
        const double angle =
            static_cast<double>(p) *
            std::pow(config.rope.theta, -2.0 * static_cast<double>(i) / static_cast<double>(config.head_dim));
        Pool::set(cos, p * config.head_dim / 2 + i, std::cos(angle));
        Pool::set(sin, p * config.head_dim / 2 + i, std::sin(angle));
      }
    const Sequence sequence = {.positions = Tensor(positions.data(), DType::i32, {T}),
                               .first_key = Tensor(first_key.data(), DType::i32, {T}),
                               .rope_cos = cos,
                               .rope_sin = sin};
    Pool pool;
    const Tensor x = pool.zeros(dtype, {T, config.hidden_size}),
                 dy = pool.zeros(dtype, {T, config.hidden_size});
    set_from_grid(x, golden["x"], golden["grid"]);
    set_from_grid(dy, golden["dy"], golden["grid"]);
    if (attention) {
      Attention::Saved s = layer->make_saved(memory, "attention", T, dtype);
      layer->forward(ctx, x, sequence, s);
      CHECK(error_against(s.y, golden["y"]) < tolerance);
      const Tensor dx = pool.zeros(dtype, {T, config.hidden_size});
      layer->backward(ctx, dx, dy, x, sequence, s);
      CHECK(error_against(dx, golden["dx"]) < tolerance);
    } else {
      Block::Saved s = block->make_saved(memory, "block", T, dtype, true);
      const Residual y = block->forward(ctx, {.sum = x}, sequence, {}, s);
      add_forward(ctx, y.sum, y.a, y.b);  // no norm is behind it
      CHECK(error_against(s.y, golden["y"]) < tolerance);
      block->backward(ctx, dy, x, sequence, {}, s);  // in place
      CHECK(error_against(dy, golden["dx"]) < tolerance);
    }
    check_gradients(store, golden, tolerance);
  }
}

}  // namespace

TEST_CASE("attention layers equal PyTorch: output and every gradient", "[golden]") {
  for (const char* name : {"attention_plain", "attention_elementwise", "attention_headwise", "attention_sink",
                           "attention_five_gates"})
    check_layer(name);
}

TEST_CASE("a block equals PyTorch, plain and with gate, sandwich norm and clip", "[golden]") {
  check_layer("block_plain");
  check_layer("block_gated_sandwich_clip");
}

TEST_CASE("two-layer models equal PyTorch: loss and every gradient", "[golden]") {
  for (const char* name : {"model_plain", "model_elementwise", "model_headwise"}) {
    const json golden = read_golden(name);
    for (const auto& [dtype, tolerance] : kPrecisions) {
      INFO(name << " " << dtype_name(dtype));
      TestModel m(read_config(golden["config"]), tokens_of(golden), dtype);
      set_weights(m.store, golden);
      CHECK(m.loss_and_gradient() == Approx(golden["loss"].get<double>()).epsilon(tolerance));
      check_gradients(m.store, golden, tolerance);
    }
  }
}

TEST_CASE("ten training steps follow PyTorch's loss curve", "[golden]") {
  const json golden = read_golden("model_elementwise");
  const json& adamw = golden["adamw"];
  for (const auto& [dtype, tolerance] : {std::pair{DType::f64, 1e-8}, std::pair{DType::f32, 2e-4}}) {
    INFO(dtype_name(dtype));
    TestModel m(read_config(golden["config"]), tokens_of(golden), dtype);
    set_weights(m.store, golden);
    OptimizerConfig config;
    config.beta1 = adamw["beta1"];
    config.beta2 = adamw["beta2"];
    config.eps = adamw["eps"];
    config.weight_decay = adamw["weight_decay"];
    Optimizer optimizer(config, m.store);
    Arena moments("optimizer", 1 << 20);
    optimizer.allocate(*m.context, moments);
    REQUIRE(adamw["losses"].size() == 10);
    for (size_t step = 0; step < 10; ++step) {
      CHECK(m.loss_and_gradient() == Approx(adamw["losses"][step].get<double>()).epsilon(tolerance));
      const UpdateControl judged = optimizer.step(*m.context, adamw["lr"], adamw["max_grad_norm"]);
      CHECK(judged.grad_norm == Approx(adamw["gradient_norms"][step].get<double>()).epsilon(tolerance));
    }
    for (const auto& [name, value] : adamw["weights_after"].items()) {
      INFO(name);
      CHECK(error_against(m.store.value(m.id(name)), value) < (dtype == DType::f64 ? 1e-7 : 1e-3));
    }
  }
}

}  // namespace sluice
