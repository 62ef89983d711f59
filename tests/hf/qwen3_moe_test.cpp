// A Qwen3-MoE folder written by transformers (scripts/make_goldens_qwen3_moe) loads, with experts under their
// own names, and gives the same logits and text.
#include <catch2/catch.hpp>
#include <fstream>
#include <nlohmann/json.hpp>

#include "checkpoint/store.h"
#include "hf/golden_logits.h"
#include "support/model.h"

using namespace sluice;
using namespace sluice::test;

namespace {

const std::string kFolder = SLUICE_SOURCE_DIR "/tests/golden/qwen3_moe_tiny";

nlohmann::json read(const std::string& name) {
  std::ifstream file(kFolder + "/" + name);
  return nlohmann::json::parse(file);
}

ModelConfig config_of(const nlohmann::json& hf) {
  ModelConfig c;
  c.vocab_size = hf.at("vocab_size");
  c.hidden_size = hf.at("hidden_size");
  c.num_hidden_layers = hf.at("num_hidden_layers");
  c.num_attention_heads = hf.at("num_attention_heads");
  c.num_key_value_heads = hf.at("num_key_value_heads");
  c.head_dim = hf.at("head_dim");
  c.intermediate_size = hf.at("intermediate_size");
  c.tie_word_embeddings = hf.at("tie_word_embeddings");
  c.rms_norm_eps = hf.at("rms_norm_eps");
  c.rope.theta = hf.at("rope_parameters").at("rope_theta");
  c.moe.num_experts = hf.at("num_local_experts");
  c.moe.num_experts_per_tok = hf.at("num_experts_per_tok");
  c.moe.moe_intermediate_size = hf.at("moe_intermediate_size");
  c.moe.norm_topk_prob = hf.at("norm_topk_prob");
  c.moe.decoder_sparse_step = hf.at("decoder_sparse_step");
  c.moe.mlp_only_layers = hf.at("mlp_only_layers").get<std::vector<int64_t>>();
  return c;
}

}  // namespace

TEST_CASE("logits of a Qwen3-MoE folder equal those of transformers", "[qwen3_moe]") {
  const OneThread one_thread;
  const GoldenLogits golden(kFolder);
  for (const auto& [dtype, tolerance] : {std::pair{DType::f64, 1e-6}, std::pair{DType::f32, 2e-5}}) {
    INFO(dtype_name(dtype));
    TestModel t(config_of(read("config.json")), golden.batch(), dtype);
    std::vector<NamedTensor> weights;
    int experts = 0;
    for (size_t i = 0; i < t.store.specs().size(); ++i) {
      const std::string& name = t.store.specs()[i].name;
      experts += name.find(".experts.") != std::string::npos;
      weights.push_back({name, t.store.value(static_cast<ParamStore::Id>(i))});
    }
    CHECK(experts == 6 * 3);  // the second layer is dense
    load_weights(kFolder, weights);
    CHECK(golden.error(t.logits()) < tolerance);
  }
}
