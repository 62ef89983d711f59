// Weights of another run or program: the function that they were trained for is compared with the configured
// one.
#include <filesystem>

#include "checkpoint/manifest.h"
#include "tools/tiny_run.h"

using Catch::Matchers::Contains;

namespace sluice::test {
namespace {

/// A trained run, and runs that start from its weights.
struct FromRun : TinyRun {
  int runs = 0;
  std::string last;  // the run folder of the last start
  FromRun() { REQUIRE(train().code == 0); }
  std::string checkpoint() const { return run + "/ckpt/step_00000008"; }
  Outcome start(const std::string& from, std::vector<std::string> more = {}) {
    last = folder / fmt::format("from{}", ++runs);
    for (const std::string& key :
         {"run_dir=" + last, "train.init_from=" + from, std::string("train.max_steps=1")})
      more.push_back(key);
    return train(more);
  }
  void expect(const Outcome& o, int code, const std::vector<std::string>& parts) const {
    INFO(o.out << o.err);
    CHECK(o.code == code);
    for (const std::string& part : parts) CHECK_THAT(o.err, Contains(part));
    CHECK_FALSE(io::exists(last));  // nothing was started
  }
};

std::string golden(const std::string& name) { return SLUICE_SOURCE_DIR "/tests/golden/" + name; }

}  // namespace

TEST_CASE("every key that changes the function is compared with the source checkpoint", "[init_from]") {
  FromRun t;
  Outcome o = t.start(t.run);
  INFO(o.out << o.err);
  CHECK(o.code == 0);
  CHECK_THAT(o.out, Contains("weights  from " + t.checkpoint() + " (checkpoint, step 8, hash "));
  CHECK_THAT(o.err, Contains("another train.seed gives another order"));
  const nlohmann::json from = nlohmann::json::parse(io::read_file(t.last + "/run.json")).at("init_from");
  CHECK(from.at("path") == t.checkpoint());
  CHECK(from.at("step") == 8);
  CHECK(from.at("fingerprint").get<std::string>().size() == 32);
  CHECK(from.at("accepted").empty());
  const std::string same_samples = t.last;
  CHECK_THAT(t.start(t.run, {"train.seed=99"}).err, !Contains("another order"));
  t.last = same_samples;
  // It persists even if the source is removed.
  CHECK(t.train({"run_dir=" + t.last, "train.init_from=" + t.run, "train.max_steps=2", "--allow-change",
                 "train.max_steps"})
            .code == 0);
  CHECK(nlohmann::json::parse(io::read_file(t.last + "/run.json")).at("init_from") == from);
  CHECK(nlohmann::json::parse(io::read_file(t.run + "/run.json")).at("init_from").is_null());

  t.expect(
      t.start(t.run, {"model.rope.theta=1e6", "model.rms_norm_eps=1e-5"}), 64,
      {"command line: train.init_from: the weights of " + t.checkpoint(),
       "command line: model.rope.theta = 1000000, but that of " + t.checkpoint() + "/config.yaml is 10000",
       "model.rms_norm_eps = 1e-5, but that of", "is 1e-6",
       "train.init_ignore: [model.rms_norm_eps, model.rope.theta]"});
  t.expect(t.start(t.run, {"model.rope.theta=1e6", "model.rms_norm_eps=1e-5",
                           "train.init_ignore=[model.rope.theta]"}),
           64, {"model.rms_norm_eps", "train.init_ignore: [model.rms_norm_eps]"});
  // The position in the file is reported.
  t.write_config("eval: {every_steps: 0}\n");
  t.expect(t.start(t.run, {"model.attention.gates=[{position: sdpa_output, activation: silu}]"}), 64,
           {"model.attention.gates[0].activation = silu, but that of", "is sigmoid",
            "train.init_ignore: [model.attention.gates]"});
  t.expect(t.start(t.run, {"model.attention.gates=[]"}), 64,
           {"command line: model.attention.gates = [], but that of", "{position: sdpa_output"});
  std::string text = io::read_file(t.config);
  text.replace(text.find("  head_dim: 8"), 13, "  head_dim: 16");
  write_bytes(t.config, text);
  t.expect(t.start(t.run), 64, {t.config + ":8:3: model.head_dim = 16, but that of", "is 8"});
  t.write_config("");

  // Context extension.
  o = t.start(
      t.run,
      {"model.rope={theta: 1e6, scaling: {type: yarn, factor: 4, original_max_position_embeddings: 16}}",
       "data.seq_len=64", "train.init_ignore=[model.rope]"});
  INFO(o.out << o.err);
  CHECK(o.code == 0);
  CHECK_THAT(o.out,
             Contains("accepted: model.rope.theta: 10000 -> 1000000, model.rope.scaling.type: none -> yarn"));
  CHECK(nlohmann::json::parse(io::read_file(t.last + "/run.json")).at("init_from").at("accepted").size() ==
        2);
  // Keys that only concern training may differ.
  CHECK(t.start(t.run, {"model.initializer_range=0.5", "model.attention.head_balance.coefficient=1e-4",
                        "train.seed=3"})
            .code == 0);
}

TEST_CASE("YaRN says how many positions of the source it stretches", "[init_from]") {
  FromRun t;
  const std::vector<std::string> yarn = {"model.rope.scaling={type: yarn, factor: 4}", "data.seq_len=64",
                                         "train.init_ignore=[model.rope]"};
  t.expect(t.start(t.run, yarn), 64,
           {"was trained with 16 positions, and model.rope.scaling.original_max_position_embeddings is 4096 "
            "by default"});
  std::vector<std::string> said = yarn;
  said[0] = "model.rope.scaling={type: yarn, factor: 4, original_max_position_embeddings: 16}";
  CHECK(t.start(t.run, said).code == 0);
}

TEST_CASE("weights of another tokenizer are refused unless that is accepted", "[init_from]") {
  FromRun t;
  // A checkpoint whose state names another tokenizer, made by hand with its checksums.
  const std::string state = t.checkpoint() + "/state.json";
  std::string text = io::read_file(state), manifest = io::read_file(t.checkpoint() + "/MANIFEST.json");
  const std::string ours = "byte:257", theirs = "byte:258";
  REQUIRE(text.find(ours) != std::string::npos);
  const std::string old = checksum(text);
  text.replace(text.find(ours), ours.size(), theirs);
  write_bytes(state, text);
  REQUIRE(manifest.find(old) != std::string::npos);
  manifest.replace(manifest.find(old), old.size(), checksum(text));
  const size_t last = manifest.rfind('\n', manifest.size() - 2) + 1;
  const size_t hash = manifest.find(
      checksum(std::string_view(io::read_file(t.checkpoint() + "/MANIFEST.json")).substr(0, last)), last);
  REQUIRE(hash != std::string::npos);
  manifest.replace(hash, 32, checksum(std::string_view(manifest).substr(0, last)));
  write_bytes(t.checkpoint() + "/MANIFEST.json", manifest);
  t.expect(t.start(t.checkpoint()), 64,
           {"data.tokenizer: the tokenizer's fingerprint is byte:257, but that of " + t.checkpoint() +
                " is byte:258",
            "train.init_ignore: [data.tokenizer]"});
  const Outcome o = t.start(t.checkpoint(), {"train.init_ignore=[data.tokenizer]"});
  INFO(o.out << o.err);
  CHECK(o.code == 0);
  CHECK_THAT(o.out, Contains("accepted: data.tokenizer: byte:258 -> byte:257"));
}

TEST_CASE("a Hugging Face folder is compared by its config.json, and refused without one", "[init_from]") {
  FromRun t;
  const std::string folder = t.folder / "hf";
  std::filesystem::copy(golden("qwen3_tiny"), folder);
  const std::string json = folder + "/config.json", original = io::read_file(json);
  const std::vector<std::string> tiny = {
      "data.tokenizer.type=byte", "model.attention.gates=[]",
      "model={vocab_size: 0, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 4, "
      "num_key_value_heads: 2, head_dim: 8, intermediate_size: 24}"};
  // 32 words are too few for the byte tokenizer, which is found as a difference.
  t.expect(t.start(folder, tiny), 64,
           {"model.vocab_size = 257, but vocab_size in " + json + " is 32",
            "train.init_ignore: [model.vocab_size]"});
  t.expect(t.start(folder,
                   {"model={hidden_size: 128, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8}"}),
           64, {"model.hidden_size = 128, but hidden_size in " + json + " is 16"});
  // After accepted differences, mismatches of tensors are reported in summary.
  const Outcome o = t.start(folder, {"model.attention.gates=[]",
                                     "model={hidden_size: 128, num_hidden_layers: 3, num_attention_heads: 4, "
                                     "num_key_value_heads: 2, head_dim: 8}",
                                     "train.init_ignore=[model]"});
  INFO(o.err);
  CHECK(o.code == 65);
  CHECK_THAT(o.err, Contains("model_type qwen3") &&
                        Contains("hidden_size: folder 16, configuration 128 (in ") &&
                        Contains("num_hidden_layers: folder 2, configuration 3") &&
                        Contains("vocab_size: folder 32, configuration 257"));
  CHECK(std::count(o.err.begin(), o.err.end(), '\n') < 8);

  const auto edited = [&](const std::string& key, const std::string& value) {
    nlohmann::json j = nlohmann::json::parse(original);
    j[key] = nlohmann::json::parse(value);
    write_bytes(json, j.dump());
    return t.start(folder, tiny);
  };
  t.expect(edited("rms_norm_eps", "1e-5"), 64, {"model.rms_norm_eps = 1e-6, but rms_norm_eps in", "is 1e-5"});
  t.expect(edited("rope_parameters", R"({"rope_theta": 1000000, "rope_type": "default"})"), 64,
           {"by default: model.rope.theta = 10000, but rope_parameters.rope_theta in", "is 1000000"});
  t.expect(edited("attention_bias", "true"), 64,
           {"by default: model.attention_bias = false, but attention_bias in", "is true"});
  t.expect(edited("mlp_bias", "true"), 64,
           {json + ": mlp_bias = true has no counterpart here", "cannot be used"});
  t.expect(edited("rope_scaling", R"({"rope_type": "llama3", "factor": 8})"), 65,
           {"rope_scaling and rope_parameters"});
  t.expect(edited("model_type", "\"gemma2\""), 65,
           {"weights of model_type gemma2 are not supported", "1 + w", "supported are llama"});
  t.expect(edited("hidden_size", "\"wide\""), 65, {json + ": hidden_size must be a whole number"});
  std::filesystem::remove(json);
  t.expect(t.start(folder, tiny), 65, {"there is no " + json, "train.init_ignore: [model]"});
  t.expect(t.start(folder + "/model.safetensors", tiny), 65, {"there is no " + json});
}

TEST_CASE("train.init_ignore accepts only model keys", "[init_from]") {
  const TinyRun t;
  for (const auto& [name, message] : std::vector<std::pair<std::string, std::string>>{
           {"model.rope.tetha",
            "model.rope.tetha is neither a model key nor data.tokenizer; did you mean model.rope.theta?"},
           {"theta", "did you mean model.rope.theta?"},
           {"optimizer.lr", "optimizer.lr is neither a model key"},
           {"model.rop", "model.rop is neither a model key"}}) {
    const Outcome o = t.train({"train.init_ignore=[" + name + "]"});
    CHECK(o.code == 64);
    CHECK_THAT(o.err, Contains(message));
  }
  for (const char* name : {"model", "model.rope", "model.attention.gates", "model.attention.gates[0].heads",
                           "model.attention.gates.heads", "data.tokenizer"}) {
    INFO(name);
    CHECK(t.sluice({"config", "show", t.config, std::string("train.init_ignore=[\"") + name + "\"]"}).code ==
          0);
  }
}

}  // namespace sluice::test
