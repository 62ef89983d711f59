// Folders of other model types, written by transformers (scripts/check_interop --goldens), give the same
// logits.
#include <catch2/catch.hpp>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>

#include "checkpoint/store.h"
#include "core/error.h"
#include "core/io.h"
#include "data/temporary.h"
#include "hf/config.h"
#include "hf/golden_logits.h"
#include "hf/holds.h"
#include "hf/import.h"
#include "hf/layouts.h"
#include "support/model.h"

using namespace sluice;
using namespace sluice::test;

namespace {

const std::string kGolden = SLUICE_SOURCE_DIR "/tests/golden/";

double logit_error(const std::string& folder, DType dtype) {
  const GoldenLogits golden(folder);
  const HfModel source = read_hf_config(folder + "/config.json");
  CHECK(source.unsupported.empty());
  TestModel t(source.model, golden.batch(), dtype);
  std::vector<NamedTensor> weights;
  for (size_t i = 0; i < t.store.specs().size(); ++i)
    weights.push_back({t.store.specs()[i].name, t.store.value(static_cast<ParamStore::Id>(i))});
  load_weights(folder, weights, nullptr, nullptr, {weight_map(source.format, source.model), {}});
  return golden.error(t.logits());
}

}  // namespace

TEST_CASE("logits of folders of other model types equal those of transformers", "[hf_families]") {
  const OneThread one_thread;
  for (const char* name : {"hf_qwen3_next", "hf_gated_attention", "hf_llama", "hf_gpt_oss",
                           "hf_sluice_kv_bias", "hf_sluice_softpick", "hf_sluice_sink_key"}) {
    INFO(name);
    CHECK(logit_error(kGolden + name, DType::f64) < 1e-6);
    CHECK(logit_error(kGolden + name, DType::f32) < 2e-5);
  }
  CHECK(read_hf_config(kGolden + "hf_qwen3_next/config.json").format == HfFormat::qwen3_next);
  CHECK(read_hf_config(kGolden + "hf_gated_attention/config.json").format == HfFormat::gated_attention);
  CHECK(read_hf_config(kGolden + "hf_llama/config.json").format == HfFormat::llama);
  CHECK(read_hf_config(kGolden + "hf_gpt_oss/config.json").format == HfFormat::gpt_oss);
}

TEST_CASE("every format refuses by name what it does not hold", "[hf_families]") {
  Config plain;
  plain.model.vocab_size = 257;
  const auto held = [](const Config& config, HfFormat format) { return not_held(config, format).empty(); };
  CHECK(held(plain, HfFormat::qwen3));
  CHECK(held(plain, HfFormat::sluice));
  CHECK_FALSE(held(plain, HfFormat::llama));       // qk_norm
  CHECK_FALSE(held(plain, HfFormat::qwen3_next));  // no gate
  Config gated = plain;
  gated.model.attention.gates = {GateConfig{}};
  CHECK_FALSE(held(gated, HfFormat::qwen3));
  CHECK(held(gated, HfFormat::qwen3_next));
  CHECK(held(gated, HfFormat::gated_attention));
  gated.model.attention.gates[0].granularity = GateGranularity::headwise;
  CHECK_FALSE(held(gated, HfFormat::qwen3_next));
  CHECK(held(gated, HfFormat::gated_attention));
  CHECK(held(gated, HfFormat::sluice));
  gated.model.attention.gates[0].heads = GateSharing::shared;
  CHECK_FALSE(held(gated, HfFormat::gated_attention));
  CHECK(held(gated, HfFormat::sluice));

  // Every key of the model that changes the function and is not one of those that a format says: its value is
  // refused with the key's name by all formats but modeling_sluice.py.
  Config other = plain;
  other.model.attention.kind = AttentionKind::sparse;
  CHECK(held(other, HfFormat::sluice));
  for (const HfFormat format : {HfFormat::llama, HfFormat::qwen3, HfFormat::qwen3_moe, HfFormat::qwen3_next,
                                HfFormat::gpt_oss, HfFormat::gated_attention}) {
    bool named = false;
    for (const std::string& reason : not_held(other, format))
      named = named || reason.find("model.attention.kind = sparse") != std::string::npos;
    CHECK(named);
  }
  other = gated;
  other.model.attention.gates[0] = GateConfig{};
  other.model.attention.gates[0].bias = 1.0;
  CHECK(held(other, HfFormat::sluice));
  CHECK_FALSE(held(other, HfFormat::qwen3_next));
  other = plain;
  other.model.attention_bias = true;
  CHECK(held(other, HfFormat::qwen3));
  CHECK_FALSE(held(other, HfFormat::gated_attention));
  other = plain;
  other.lora.rank = 4;
  CHECK_FALSE(held(other, HfFormat::sluice));
}

TEST_CASE("gpt_oss holds what gpt-oss is made of, and refuses the rest by name", "[hf_families]") {
  Config base;
  ModelConfig& m = base.model;
  m.vocab_size = 257;
  m.qk_norm = false;
  m.attention.kind = AttentionKind::sink;
  m.moe.num_experts = 4;
  m.moe.num_experts_per_tok = 2;
  m.moe.bias = true;
  m.moe.swiglu_limit = 7;
  const auto reasons = [](const Config& config, HfFormat format) {
    std::string all;
    for (const std::string& reason : not_held(config, format)) all += reason + "\n";
    return all;
  };
  const auto held = [&](auto&& set, bool expected) {
    Config config = base;
    set(config.model);
    CHECK(reasons(config, HfFormat::gpt_oss).empty() == expected);
    CHECK(reasons(config, HfFormat::sluice).empty());
  };
  held([](ModelConfig&) {}, true);
  held([](ModelConfig& c) { c.attention_bias = true; }, true);
  held([](ModelConfig& c) { c.attention.window = 64, c.attention.window_pattern = 2; }, true);
  held([](ModelConfig& c) { c.attention.window = 64; }, true);
  held([](ModelConfig& c) { c.rope.scaling = {RopeScalingType::yarn, 4.0, 64, 32.0, 1.0, false}; }, true);
  held([](ModelConfig& c) { c.tie_word_embeddings = true; }, true);
  held([](ModelConfig& c) { c.moe.swiglu_limit.reset(); }, false);
  held([](ModelConfig& c) { c.moe.bias = false; }, false);
  held([](ModelConfig& c) { c.moe.norm_topk_prob = false; }, false);
  held([](ModelConfig& c) { c.moe.shared_expert_intermediate_size = 8; }, false);
  held([](ModelConfig& c) { c.moe.mlp_only_layers = {0}; }, false);
  held([](ModelConfig& c) { c.attention.kind = AttentionKind::softmax; }, false);
  held([](ModelConfig& c) { c.qk_norm = true; }, false);
  const std::string others = reasons(base, HfFormat::qwen3_moe);
  for (const char* key :
       {"model.moe.bias = true", "model.moe.swiglu_limit = 7", "model.attention.kind = sink"})
    CHECK_THAT(others, Catch::Contains(key));
}

TEST_CASE("modeling_sluice.py holds every value of attention", "[hf_families]") {
  Config plain;
  plain.model.vocab_size = 257;
  int held = 0;
  const auto check = [&](const Config& config, const char* key, std::string_view value) {
    INFO(key << " = " << value);
    CHECK(not_held(config, HfFormat::sluice).empty());
    // What Qwen3 says is softmax attention without gates; the value is named.
    bool named = false;
    for (const std::string& reason : not_held(config, HfFormat::qwen3))
      named = named || reason.find(key) != std::string::npos;
    CHECK(named);
    ++held;
  };
  const auto each = [&](const char* key, const auto& names, auto&& set) {
    for (size_t i = 1; i < names.size(); ++i) {  // the first is the default
      Config config = plain;
      set(config.model.attention, i);
      check(config, key, names[i]);
    }
  };
  const auto gate = [](AttentionConfig& a) -> GateConfig& { return a.gates.emplace_back(); };
  for (size_t i = 1; i < EnumNames<AttentionKind>::names.size(); ++i) {
    Config config = plain;
    config.model.attention.kind = static_cast<AttentionKind>(i);
    check(config, "model.attention.kind", EnumNames<AttentionKind>::names[i]);
  }
  const auto sparse = [&](const auto& set) {
    Config config = plain;
    config.model.attention.kind = AttentionKind::sparse;
    set(config.model.attention.sparse);
    check(config, "model.attention.kind", "sparse");
  };
  sparse([](SparseConfig& s) {
    s.scope = IndexScope::kv_head, s.block = 4, s.sink = true, s.phase = SparsePhase::dense_warm_up;
    s.indexer.heads = 2, s.indexer.head_dim = 32, s.indexer.activation = IndexActivation::relu;
    s.indexer.bias = false, s.indexer.scale = 0.5, s.indexer.rope = true, s.indexer.key_norm = true;
    s.k.base = 7, s.k.min = 3, s.k.max = 9, s.k.temperature = 2, s.k.momentum = 0.5;
    s.loss.temperature = 3, s.loss.learn_temperature = true;
  });
  sparse([](SparseConfig& s) { s.force_self = true; });
  for (size_t i = 0; i < EnumNames<IndexHeadWeights>::names.size(); ++i)
    sparse([&](SparseConfig& s) { s.indexer.head_weights = static_cast<IndexHeadWeights>(i); });
  for (size_t i = 0; i < EnumNames<BudgetPolicy>::names.size(); ++i)
    sparse([&](SparseConfig& s) { s.k.policy = static_cast<BudgetPolicy>(i); });
  each("model.attention.exclusive", EnumNames<ExclusiveAttention>::names,
       [&](AttentionConfig& a, size_t i) { a.exclusive = static_cast<ExclusiveAttention>(i); });
  each("model.attention.output_norm", EnumNames<OutputNorm>::names,
       [&](AttentionConfig& a, size_t i) { a.output_norm = static_cast<OutputNorm>(i); });
  each("model.attention.output_activation", EnumNames<OutputActivation>::names,
       [&](AttentionConfig& a, size_t i) { a.output_activation = static_cast<OutputActivation>(i); });
  each("model.attention.gates", EnumNames<GatePosition>::names,
       [&](AttentionConfig& a, size_t i) { gate(a).position = static_cast<GatePosition>(i); });
  each("model.attention.gates", EnumNames<GateGranularity>::names,
       [&](AttentionConfig& a, size_t i) { gate(a).granularity = static_cast<GateGranularity>(i); });
  each("model.attention.gates", EnumNames<GateSharing>::names,
       [&](AttentionConfig& a, size_t i) { gate(a).heads = static_cast<GateSharing>(i); });
  each("model.attention.gates", EnumNames<GateCombine>::names,
       [&](AttentionConfig& a, size_t i) { gate(a).combine = static_cast<GateCombine>(i); });
  each("model.attention.gates", EnumNames<GateActivation>::names,
       [&](AttentionConfig& a, size_t i) { gate(a).activation = static_cast<GateActivation>(i); });
  each("model.attention.gates", EnumNames<GateInput>::names,
       [&](AttentionConfig& a, size_t i) { gate(a).input = static_cast<GateInput>(i); });
  Config windows = plain;
  windows.model.attention.window = 64;
  windows.model.attention.window_pattern = 2;
  check(windows, "model.attention.window_pattern", "2");
  CHECK(held >= 25);
}

TEST_CASE("changed config.json and index files give messages that name the file", "[hf_families]") {
  const TemporaryFolder folder;
  std::mt19937 random(7);
  int imported = 0, refused = 0;
  for (const char* name : {"hf_llama", "hf_qwen3_next", "hf_gpt_oss"}) {
    const std::string source = kGolden + name, copy = folder / name;
    io::make_directories(copy);
    for (const std::string& file : io::list_directory(source))
      write_bytes(copy + "/" + file, io::read_file(source + "/" + file));
    CHECK_FALSE(import_folder(copy).yaml.empty());
    for (const char* changed : {"config.json", "model.safetensors.index.json"}) {
      const std::string path = copy + "/" + changed;
      if (!io::exists(path)) continue;
      const std::string whole = io::read_file(path);
      for (int i = 0; i < 150; ++i) {
        std::string text = whole;
        for (int edits = 1 + static_cast<int>(random() % 3); edits > 0; --edits) {
          const size_t at = random() % text.size();
          if (random() % 3 == 0)
            text.erase(at, 1 + random() % 8);
          else
            text[at] = "0129-.eE\"{}[],:ntf\\ \n\xff"[random() % 24];
        }
        write_bytes(path, text);
        INFO(text);
        try {
          import_folder(copy);
          ++imported;
        } catch (const Error& error) {
          ++refused;
          CHECK_THAT(error.what(), Catch::Contains(copy));
          CHECK(error.code() != ExitCode::internal);
        }
      }
      write_bytes(path, whole);
    }
  }
  CHECK(refused > 100);
  CHECK(imported > 20);  // a changed initial deviation, for example
}
