#include <spdlog/spdlog.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/safetensors.h"
#include "checkpoint/store.h"
#include "support/temp_folder.h"

using namespace sluice;
using Catch::Matchers::Contains;

namespace {

const std::string kGolden = SLUICE_SOURCE_DIR "/tests/golden/qwen3_tiny";

/// Memory for named tensors.
struct Model {
  Arena arena{"test", 1 << 20};
  std::vector<NamedTensor> tensors;
  void add(const std::string& name, std::initializer_list<int64_t> dims, DType dtype = DType::f32) {
    tensors.push_back({name, arena.alloc(name, dtype, dims)});
  }
};

/// The Qwen3 of scripts/make_goldens_qwen3: 2 layers, 16 wide, 4 heads of 8, 2 of keys, 24 in between, 32
/// words.
Model tiny_qwen3(DType dtype, bool tied = true) {
  Model m;
  m.add("model.embed_tokens.weight", {32, 16}, dtype);
  for (int layer = 0; layer < 2; ++layer) {
    const std::string p = fmt::format("model.layers.{}.", layer);
    m.add(p + "input_layernorm.weight", {16}, dtype);
    m.add(p + "self_attn.q_proj.weight", {32, 16}, dtype);
    m.add(p + "self_attn.k_proj.weight", {16, 16}, dtype);
    m.add(p + "self_attn.v_proj.weight", {16, 16}, dtype);
    m.add(p + "self_attn.q_norm.weight", {8}, dtype);
    m.add(p + "self_attn.k_norm.weight", {8}, dtype);
    m.add(p + "self_attn.o_proj.weight", {16, 32}, dtype);
    m.add(p + "post_attention_layernorm.weight", {16}, dtype);
    m.add(p + "mlp.gate_proj.weight", {24, 16}, dtype);
    m.add(p + "mlp.up_proj.weight", {24, 16}, dtype);
    m.add(p + "mlp.down_proj.weight", {16, 24}, dtype);
  }
  m.add("model.norm.weight", {16}, dtype);
  if (!tied) m.add("lm_head.weight", {32, 16}, dtype);
  return m;
}

struct Values {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

void write_model(const std::string& path, const std::vector<Values>& tensors) {
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, const Values*> by_name;
  for (const Values& t : tensors) {
    entries.push_back({t.name, "F32", t.shape});
    by_name[t.name] = &t;
  }
  const std::string header = make_safetensors_header(entries);
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << header;
  for (const SafetensorsEntry& entry : entries)
    file.write(reinterpret_cast<const char*>(by_name[entry.name]->values.data()), entry.end - entry.begin);
}

void write_text(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

const Values kEmbed{"model.embed_tokens.weight", {2, 2}, {1, 2, 3, 4}},
    kNorm{"model.norm.weight", {2}, {5, 6}};

Model small() {
  Model m;
  m.add("model.embed_tokens.weight", {2, 2});
  m.add("model.norm.weight", {2});
  return m;
}

bool is_filled(const Model& m) {
  const float *a = m.tensors[0].tensor.as<float>(), *b = m.tensors[1].tensor.as<float>();
  return a[0] == 1 && a[3] == 4 && b[0] == 5 && b[1] == 6;
}

}  // namespace

TEST_CASE("a Qwen3 model saved by transformers loads", "[load_weights]") {
  Model f32 = tiny_qwen3(DType::f32), f64 = tiny_qwen3(DType::f64), narrow = tiny_qwen3(DType::bf16);
  load_weights(kGolden, f32.tensors);
  load_weights(kGolden + "/model.safetensors", f64.tensors);
  load_weights(kGolden, narrow.tensors);
  for (size_t i = 0; i < f32.tensors.size(); ++i) {
    const Tensor t = f32.tensors[i].tensor;
    double sum = 0;
    int64_t wrong = 0;
    for (int64_t j = 0; j < t.numel(); ++j) {
      const float x = t.as<float>()[j];
      sum += std::abs(static_cast<double>(x));
      wrong += f64.tensors[i].tensor.as<double>()[j] != static_cast<double>(x);
      wrong += narrow.tensors[i].tensor.as<bf16>()[j].bits != bf16(x).bits;
    }
    CHECK(sum > 0);
    CHECK(wrong == 0);
  }
  Model untied = tiny_qwen3(DType::f32, false);
  CHECK_THROWS_WITH(load_weights(kGolden, untied.tensors), Contains("missing: lm_head.weight (32, 16)"));
}

TEST_CASE("all differences between file and model are listed together", "[load_weights]") {
  Model m = tiny_qwen3(DType::f32);
  m.tensors.erase(m.tensors.begin() + 3);  // layer 0: k_proj
  m.add("model.layers.0.self_attn.gate_proj.weight", {32, 16});
  m.add("model.layers.1.self_attn.gate_proj.weight", {32, 16});
  m.tensors[0].tensor.shape[0] = 33;
  try {
    load_weights(kGolden, m.tensors);
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::data);
    CHECK_THAT(error.what(),
               Contains("qwen3_tiny does not fit the model (model_type qwen3, 4 tensors)") &&
                   Contains("missing: self_attn.gate_proj.weight in 2 layers, (32, 16) (the configuration "
                            "has a gate: model.attention.gates)") &&
                   Contains("unexpected: model.layers.0.self_attn.k_proj.weight (16, 16) F32") &&
                   Contains("vocab_size: folder 32, configuration 33 (in 1 tensor)"));
  }
}

TEST_CASE("a model of another size is reported by its sizes, not tensor by tensor", "[load_weights]") {
  const auto refusal = [](const Model& m) {
    try {
      load_weights(kGolden, m.tensors);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  Model wide = tiny_qwen3(DType::f32);
  for (NamedTensor& t : wide.tensors)
    for (int i = 0; i < t.tensor.rank; ++i)
      if (t.tensor.shape[static_cast<size_t>(i)] == 16 && t.name.find("k_proj") == std::string::npos &&
          t.name.find("v_proj") == std::string::npos)
        t.tensor.shape[static_cast<size_t>(i)] = 48;
  const std::string text = refusal(wide);
  INFO(text);
  CHECK(std::count(text.begin(), text.end(), '\n') == 1);
  CHECK_THAT(text, Contains("\n  hidden_size: folder 16, configuration 48 (in "));

  Model deep = tiny_qwen3(DType::f32);
  const size_t layer = 11;
  for (int more = 2; more < 4; ++more)
    for (size_t i = 0; i < layer; ++i) {
      NamedTensor t = deep.tensors[1 + layer + i];
      t.name.replace(t.name.find(".1."), 3, fmt::format(".{}.", more));
      deep.tensors.push_back(t);
    }
  CHECK_THAT(refusal(deep), Contains("22 tensors") &&
                                Contains("\n  num_hidden_layers: folder 2, configuration 4") &&
                                !Contains("missing"));
  Model shallow = tiny_qwen3(DType::f32);
  shallow.tensors.erase(shallow.tensors.begin() + 1 + static_cast<int64_t>(layer),
                        shallow.tensors.begin() + 1 + 2 * static_cast<int64_t>(layer));
  CHECK_THAT(refusal(shallow),
             Contains("\n  num_hidden_layers: folder 2, configuration 1") && !Contains("unexpected"));
}

TEST_CASE("shards are found through their index", "[load_weights]") {
  const TempFolder folder;
  write_model(folder / "model-00001-of-00002.safetensors", {kEmbed});
  write_model(folder / "model-00002-of-00002.safetensors", {kNorm});
  const auto index = [&](const std::string& embed, const std::string& norm) {
    write_text(
        folder / "model.safetensors.index.json",
        nlohmann::json{{"metadata", {{"total_size", 24}}},
                       {"weight_map", {{"model.embed_tokens.weight", embed}, {"model.norm.weight", norm}}}}
            .dump());
  };
  const std::string one = "model-00001-of-00002.safetensors", two = "model-00002-of-00002.safetensors";
  index(one, two);
  Model m = small();
  load_weights(folder.path, m.tensors);
  CHECK(is_filled(m));

  for (const std::string& bad :
       {"../" + two, folder / two, std::string("."), std::string(".."), std::string(), std::string("a\0b", 3),
        std::string(300, 'a'), std::string("sub/dir")}) {
    index(one, bad);
    CHECK_THROWS_WITH(load_weights(folder.path, m.tensors), Contains("cannot be the name of a shard"));
  }
  index(one, one);
  CHECK_THROWS_WITH(load_weights(folder.path, m.tensors), Contains("although the index lists it"));
  index(one, "absent.safetensors");
  CHECK_THROWS_WITH(load_weights(folder.path, m.tensors), Contains("absent.safetensors"));
  std::filesystem::create_symlink(folder / two, folder / "link.safetensors");
  index(one, "link.safetensors");
  CHECK_THROWS_WITH(load_weights(folder.path, m.tensors), Contains("symbolic link"));
  index(one, two);
  write_model(folder / two, {kNorm, kEmbed});
  CHECK_THROWS_AS(load_weights(folder.path, m.tensors), Error);
  for (const char* text : {"", "[]", "{}", "{\"weight_map\": []}", "{\"weight_map\": {\"a\": 1}}",
                           "{\"weight_map\": {\"a\": \"x\", \"a\": \"y\"}}"}) {
    write_text(folder / "model.safetensors.index.json", text);
    CHECK_THROWS_AS(load_weights(folder.path, m.tensors), Error);
  }
}

TEST_CASE("a tied model ignores an output head that equals the embedding, and only that", "[load_weights]") {
  const TempFolder folder;
  Values head = kEmbed;
  head.name = "lm_head.weight";
  write_model(folder / "model.safetensors", {kEmbed, kNorm, head});
  Model m = small();
  load_weights(folder.path, m.tensors);
  CHECK(is_filled(m));
  head.values[2] += 1;
  write_model(folder / "model.safetensors", {kEmbed, kNorm, head});
  CHECK_THROWS_WITH(load_weights(folder.path, m.tensors), Contains("unexpected: lm_head.weight (2, 2) F32"));
}

TEST_CASE("weights come from a checkpoint or the newest one of a run", "[load_weights]") {
  const TempFolder folder;
  std::vector<float> embed = {1, 2, 3, 4}, norm = {5, 6};
  CheckpointContent content;
  content.weights = {{kEmbed.name, Tensor(embed.data(), DType::f32, {2, 2})},
                     {kNorm.name, Tensor(norm.data(), DType::f32, {2})}};
  content.state = nlohmann::json::object();
  content.hf_config = nlohmann::json::object();
  content.step = 5;
  {
    CheckpointStore store(folder / "ckpt", CheckpointConfig{}, content);
    store.save(content);
    REQUIRE(store.wait());
  }
  for (const char* path : {"", "/ckpt", "/ckpt/step_00000005", "/ckpt/step_00000005/model.safetensors"}) {
    Model m = small();
    load_weights(folder.path + path, m.tensors);
    CHECK(is_filled(m));
  }
  Model m = small();
  CHECK_THROWS_AS(load_weights(folder / "absent", m.tensors), Error);
  std::filesystem::create_directory(folder / "empty");
  CHECK_THROWS_WITH(load_weights(folder / "empty", m.tensors), Contains("neither a checkpoint nor a model"));
  spdlog::set_level(spdlog::level::off);
  std::filesystem::resize_file(folder / "ckpt/step_00000005/model.safetensors", 40);
  CHECK_THROWS_WITH(load_weights(folder / "ckpt/step_00000005", m.tensors), Contains("the manifest says"));
  CHECK_THROWS_WITH(load_weights(folder.path, m.tensors), Contains("no valid checkpoint"));
  spdlog::set_level(spdlog::level::info);
}
