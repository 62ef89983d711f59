// A mixture of experts against transformers' sparse blocks of Qwen3-MoE and Qwen3-Next: output and every
// gradient (tests/golden/moe_*.json, written by scripts/make_goldens_qwen3_moe).
#include <catch2/catch.hpp>
#include <fstream>
#include <nlohmann/json.hpp>

#include "support/model.h"

namespace sluice {
namespace {

using nlohmann::json;
using test::Pool;

json read_golden(const std::string& name) {
  std::ifstream file(std::string(SLUICE_SOURCE_DIR) + "/tests/golden/" + name + ".json");
  REQUIRE(file.good());
  return json::parse(file);
}

ModelConfig read_config(const json& j) {
  ModelConfig c = test::tiny_config();
  c.hidden_size = j["hidden_size"];
  c.moe.num_experts = j["num_experts"];
  c.moe.num_experts_per_tok = j["num_experts_per_tok"];
  c.moe.moe_intermediate_size = j["moe_intermediate_size"];
  c.moe.norm_topk_prob = j["norm_topk_prob"];
  c.moe.shared_expert_intermediate_size = j.value("shared_expert_intermediate_size", 0);
  c.moe.shared_expert_gate = c.moe.shared_expert_intermediate_size > 0;
  // The golden files contain only the output's gradient.
  c.moe.load_balance.coefficient = 0;
  c.moe.router_z_loss_coefficient = 0;
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

void check_block(const std::string& name, DType dtype, double tolerance, bool keep_inner) {
  INFO(name << " " << dtype_name(dtype) << (keep_inner ? "" : ", inner activations computed again"));
  const json golden = read_golden(name);
  const ModelConfig config = read_config(golden["config"]);
  const std::vector<int64_t> shape = golden["x"]["shape"];
  const int64_t T = shape[0], C = shape[1];

  ParamStore store;
  const Moe moe(config, store, "mlp", 0);
  Context ctx(1 << 22);
  Arena memory("memory", 1 << 20), gradients("gradients", 1 << 20);
  store.allocate(ctx, dtype, T, memory, &gradients);
  // The golden file contains exactly the weights of the store.
  REQUIRE(store.specs().size() == golden["weights"].size());
  const auto entry = [&](const char* of, size_t i) { return golden[of][store.specs()[i].name.substr(4)]; };
  for (size_t i = 0; i < store.specs().size(); ++i) {
    INFO(store.specs()[i].name);
    REQUIRE(entry("weights", i)["shape"] == json(store.specs()[i].shape));
    set_from_grid(store.value(static_cast<ParamStore::Id>(i)), entry("weights", i), golden["grid"]);
  }
  store.pack(ctx);

  Pool pool;
  const Tensor x = pool.zeros(dtype, {T, C}), dy = pool.zeros(dtype, {T, C}), dx = pool.zeros(dtype, {T, C});
  set_from_grid(x, golden["x"], golden["grid"]);
  set_from_grid(dy, golden["dy"], golden["grid"]);
  Moe::Saved s = moe.make_saved(memory, "moe", T, dtype, keep_inner);
  moe.forward(ctx, x, {}, s);
  CHECK(error_against(s.y, golden["y"]) < tolerance);
  moe.backward(ctx, dx, dy, x, {}, s);
  CHECK(error_against(dx, golden["dx"]) < tolerance);
  for (size_t i = 0; i < store.specs().size(); ++i) {
    INFO(store.specs()[i].name);
    CHECK(error_against(store.grad(static_cast<ParamStore::Id>(i)), entry("gradients", i)) < tolerance);
  }
}

}  // namespace

TEST_CASE("MoE blocks equal transformers: output, and gradients of input, router and every expert",
          "[moe][golden]") {
  const test::OneThread one_thread;
  for (const char* name :
       {"moe_qwen3", "moe_qwen3_unnormalised", "moe_qwen3_next", "moe_qwen3_next_unnormalised"})
    for (const bool keep_inner : {true, false}) {
      // The golden files have nine digits.
      check_block(name, DType::f64, 2e-8, keep_inner);
      check_block(name, DType::f32, 1e-5, keep_inner);
    }
}

}  // namespace sluice
