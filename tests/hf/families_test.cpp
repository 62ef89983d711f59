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
#include "hf/holds.h"
#include "hf/import.h"
#include "hf/layouts.h"
#include "support/model.h"

using namespace sluice;
using namespace sluice::test;

namespace {

const std::string kGolden = SLUICE_SOURCE_DIR "/tests/golden/";

/// ||logits - golden|| / ||golden||
double logit_error(const std::string& folder, DType dtype) {
  const nlohmann::json golden = nlohmann::json::parse(io::read_file(folder + "/logits.json"));
  const auto ids = golden.at("input_ids").get<std::vector<int32_t>>();
  TokenBatch batch;
  batch.add(ids);
  // add() uses the last token only as a target; here it is also an input.
  batch.tokens.push_back(ids.back());
  batch.targets.push_back(-1);
  batch.positions.push_back(static_cast<int32_t>(ids.size()) - 1);
  batch.first_key.push_back(0);
  const HfModel source = read_hf_config(folder + "/config.json");
  CHECK(source.unsupported.empty());
  TestModel t(source.model, batch, dtype);
  std::vector<NamedTensor> weights;
  for (size_t i = 0; i < t.store.specs().size(); ++i)
    weights.push_back({t.store.specs()[i].name, t.store.value(static_cast<ParamStore::Id>(i))});
  load_weights(folder, weights, nullptr, nullptr, {weight_map(source.format, source.model), {}});
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
  return std::sqrt(difference / norm);
}

}  // namespace

TEST_CASE("logits of folders of other model types equal those of transformers", "[hf_families]") {
  const OneThread one_thread;
  for (const char* name : {"hf_qwen3_next", "hf_gated_attention", "hf_llama"}) {
    INFO(name);
    CHECK(logit_error(kGolden + name, DType::f64) < 1e-6);
    CHECK(logit_error(kGolden + name, DType::f32) < 2e-5);
  }
  CHECK(read_hf_config(kGolden + "hf_qwen3_next/config.json").format == HfFormat::qwen3_next);
  CHECK(read_hf_config(kGolden + "hf_gated_attention/config.json").format == HfFormat::gated_attention);
  CHECK(read_hf_config(kGolden + "hf_llama/config.json").format == HfFormat::llama);
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
  // refused with the key's name by all formats, modeling_sluice.py included.
  Config other = plain;
  other.model.attention.window = 64;
  for (const HfFormat format : {HfFormat::llama, HfFormat::qwen3, HfFormat::qwen3_moe, HfFormat::qwen3_next,
                                HfFormat::gated_attention, HfFormat::sluice}) {
    bool named = false;
    for (const std::string& reason : not_held(other, format))
      named = named || reason.find("model.attention.window = 64") != std::string::npos;
    CHECK(named);
  }
  other = plain;
  other.model.attention.kind = AttentionKind::softpick;
  CHECK_FALSE(held(other, HfFormat::sluice));
  other = gated;
  other.model.attention.gates[0] = GateConfig{};
  other.model.attention.gates[0].bias = 1.0;
  CHECK_FALSE(held(other, HfFormat::sluice));
  CHECK_FALSE(held(other, HfFormat::qwen3_next));
  other = plain;
  other.lora.rank = 4;
  CHECK_FALSE(held(other, HfFormat::sluice));
}

TEST_CASE("changed config.json and index files give messages that name the file", "[hf_families]") {
  const TemporaryFolder folder;
  std::mt19937 random(7);
  int imported = 0, refused = 0;
  for (const char* name : {"hf_llama", "hf_qwen3_next"}) {
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
