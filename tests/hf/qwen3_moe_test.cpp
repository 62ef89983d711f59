// A Qwen3-MoE folder written by transformers (scripts/make_goldens_qwen3_moe) loads, with experts under their
// own names, and gives the same logits and text.
#include <catch2/catch.hpp>
#include <fstream>
#include <nlohmann/json.hpp>

#include "checkpoint/store.h"
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

TokenBatch batch_of(const std::vector<int32_t>& ids) {
  TokenBatch batch;
  batch.add(ids);
  // add() uses the last token only as a target; here it is also an input.
  batch.tokens.push_back(ids.back());
  batch.targets.push_back(-1);
  batch.positions.push_back(static_cast<int32_t>(ids.size()) - 1);
  batch.first_key.push_back(0);
  return batch;
}

}  // namespace

TEST_CASE("logits of a Qwen3-MoE folder equal those of transformers", "[qwen3_moe]") {
  const OneThread one_thread;
  const nlohmann::json golden = read("logits.json");
  for (const auto& [dtype, tolerance] : {std::pair{DType::f64, 1e-6}, std::pair{DType::f32, 2e-5}}) {
    INFO(dtype_name(dtype));
    TestModel t(config_of(read("config.json")), batch_of(golden.at("input_ids")), dtype);
    std::vector<NamedTensor> weights;
    int experts = 0;
    for (size_t i = 0; i < t.store.specs().size(); ++i) {
      const std::string& name = t.store.specs()[i].name;
      experts += name.find(".experts.") != std::string::npos;
      weights.push_back({name, t.store.value(static_cast<ParamStore::Id>(i))});
    }
    CHECK(experts == 6 * 3);  // the second layer is dense
    load_weights(kFolder, weights);

    const std::vector<double> logits = t.logits();
    double difference = 0, norm = 0;
    size_t i = 0;
    for (const auto& row : golden.at("logits_f64"))
      for (const double expected : row) {
        difference += (logits.at(i) - expected) * (logits.at(i) - expected);
        norm += expected * expected;
        ++i;
      }
    CHECK(i == logits.size());
    CHECK(std::sqrt(difference / norm) < tolerance);
  }
}
