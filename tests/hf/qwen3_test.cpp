// A plain Qwen3 folder written by transformers (scripts/make_goldens_qwen3) loads and gives the same logits
// and text.
#include <catch2/catch.hpp>
#include <fstream>
#include <nlohmann/json.hpp>

#include "checkpoint/store.h"
#include "hf/golden_logits.h"
#include "support/model.h"

using namespace sluice;
using namespace sluice::test;

namespace {

const std::string kFolder = SLUICE_SOURCE_DIR "/tests/golden/qwen3_tiny";

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
  return c;
}

}  // namespace

TEST_CASE("logits of a Qwen3 folder equal those of transformers", "[qwen3]") {
  const OneThread one_thread;
  const GoldenLogits golden(kFolder);
  for (const auto& [dtype, tolerance] : {std::pair{DType::f64, 1e-6}, std::pair{DType::f32, 2e-5}}) {
    INFO(dtype_name(dtype));
    TestModel t(config_of(read("config.json")), golden.batch(), dtype);
    std::vector<NamedTensor> weights;
    for (size_t i = 0; i < t.store.specs().size(); ++i)
      weights.push_back({t.store.specs()[i].name, t.store.value(static_cast<ParamStore::Id>(i))});
    load_weights(kFolder, weights);
    CHECK(golden.error(t.logits()) < tolerance);
  }
}
