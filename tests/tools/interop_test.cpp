// Hugging Face folders through the program: sluice export, import, eval of a folder, and new gates on trained
// weights.
#include <cmath>
#include <cstring>
#include <set>

#include "support/npy.h"
#include "tools/tiny_run.h"

using Catch::Matchers::Contains;

namespace sluice::test {
namespace {

std::string golden(const std::string& name) { return SLUICE_SOURCE_DIR "/tests/golden/" + name; }

/// The loss of a model on the held-out set.
double loss(const TinyRun& t, const std::string& model, std::vector<std::string> more = {}) {
  std::vector<std::string> arguments = {"eval", model, "--data", "held_out=" + (t.folder / "held_out"),
                                        "--json"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const Outcome o = t.sluice(arguments);
  INFO(model << ": " << o.err);
  REQUIRE(o.code == 0);
  const nlohmann::json j = nlohmann::json::parse(o.out);
  return j.at("sets").at("held_out").at("loss");
}

}  // namespace

TEST_CASE("an exported folder is the same model, in every format that holds it", "[interop]") {
  const TinyRun t;
  const std::string sixteen = "data.seq_len=16";
  struct Case {
    std::string name, chosen, expected;
    std::vector<std::string> overrides;
  };
  const std::string headwise = "model.attention.gates=[{granularity: headwise}]";
  const std::vector<std::string> gpt_oss = {"model.attention.gates=[]",
                                            "model.attention.kind=sink",
                                            "model.attention.window=6",
                                            "model.attention.window_pattern=2",
                                            "model.num_hidden_layers=2",
                                            "model.qk_norm=false",
                                            "model.attention_bias=true",
                                            "model.rope.scaling={type: yarn, factor: 2, truncate: false, "
                                            "original_max_position_embeddings: 8}",
                                            "model.moe={num_experts: 4, num_experts_per_tok: 2, "
                                            "moe_intermediate_size: 12, bias: true, swiglu_limit: 0.4}"};
  std::vector<Case> cases = {
      {"plain", "auto", "qwen3", {"model.attention.gates=[]"}},
      {"no_norm", "auto", "llama", {"model.attention.gates=[]", "model.qk_norm=false"}},
      {"next", "auto", "qwen3_next", {}},
      {"repository", "gated_attention", "gated_attention", {}},
      {"own", "sluice", "sluice", {}},
      {"headwise", "auto", "sluice", {headwise}},
      {"headwise_repository", "gated_attention", "gated_attention", {headwise}},
      {"sink", "auto", "sluice", {"model.attention.kind=sink"}},
      {"gpt_oss", "auto", "gpt_oss", gpt_oss},
      {"gpt_oss_own", "sluice", "sluice", gpt_oss},
      {"exclusive",
       "auto",
       "sluice",
       {"model.gated_norm.rank=2",
        "model.attention={exclusive: learned, output_norm: rmsnorm, gates: [{position: value, granularity: "
        "headwise, input: self}, {activation: two_sigmoid, input_channels: 4, bias: 0.5}]}"}},
  };
  for (const std::string kind : {"off_by_one", "sink_key", "kv_bias", "softpick"})
    cases.push_back({kind,
                     "auto",
                     "sluice",
                     {"model.attention={kind: " + kind + ", window: 6, window_pattern: 2}",
                      "model.num_hidden_layers=2"}});
  for (const Case& c : cases) {
    INFO(c.name);
    std::vector<std::string> overrides = c.overrides;
    const std::string run = t.folder / ("run_" + c.name), folder = t.folder / ("out_" + c.name);
    for (const char* key :
         {"model.num_attention_heads=4", "model.num_key_value_heads=2", "train.max_steps=2"})
      overrides.push_back(key);
    overrides.push_back("run_dir=" + run);
    REQUIRE(t.train(overrides).code == 0);
    const Outcome o = t.sluice({"export", run, "-o", folder, "--format", c.chosen});
    INFO(o.out << o.err);
    REQUIRE(o.code == 0);
    CHECK_THAT(o.out, Contains("(" + c.expected + ")"));
    // w - 1 of a norm rounds below 1/2 only.
    CHECK(loss(t, folder, {sixteen}) == Approx(loss(t, run)).epsilon(1e-6));
    CHECK(io::exists(folder + "/modeling_sluice.py") == (c.expected == "sluice"));
    const nlohmann::json config = nlohmann::json::parse(io::read_file(folder + "/config.json"));
    CHECK(config.at("qkv_bias") == false);
    CHECK(config.contains("auto_map") == (c.expected == "sluice"));
    CHECK(nlohmann::json::parse(io::read_file(folder + "/generation_config.json")).at("eos_token_id") == 256);
    CHECK_THAT(io::read_file(folder + "/README.md"), Contains("held_out"));
    // The export continues a training: sluice import writes the configuration of it.
    const std::string yaml = t.folder / (c.name + ".yaml");
    const Outcome imported = t.sluice({"import", folder, "-o", yaml});
    INFO(imported.out << imported.err);
    REQUIRE(imported.code == 0);
    CHECK_THAT(imported.out, Contains("mapped"));
    const Outcome on =
        t.sluice({"train", yaml, "run_dir=" + run + "_on", "train.max_steps=1", "data.seq_len=16",
                  "train.micro_batch_size=2", "train.global_batch_size=2", "train.threads=1",
                  "data.train=[{name: tiny, path: " + (t.folder / "train") + "}]"});
    INFO(io::read_file(yaml) << on.out << on.err);
    CHECK(on.code == 0);
    CHECK(t.sluice({"import", folder, "-o", yaml}).code == 73);
  }
  // What a gpt-oss stores transposed comes back to the bit: in a training of the folder that moves nothing.
  const std::string back = t.folder / "back";
  const Outcome still =
      t.sluice({"train", t.folder / "gpt_oss.yaml", "run_dir=" + back, "train.max_steps=1", "data.seq_len=16",
                "train.micro_batch_size=2", "train.global_batch_size=2", "train.threads=1",
                "optimizer.lr=1e-30", "optimizer.min_lr=0", "optimizer.weight_decay=0",
                "optimizer.rules=[{match: ., trainable: false}, {match: model.norm.weight, trainable: true}]",
                "data.train=[{name: tiny, path: " + (t.folder / "train") + "}]"});
  INFO(still.out << still.err);
  CHECK(still.code == 0);
  REQUIRE(t.sluice({"export", back, "-o", back + "_out", "--format", "sluice"}).code == 0);
  CHECK(t.sluice({"checkpoint", "diff", t.folder / "run_gpt_oss", back + "_out"}).code == 0);
  // The weights of the formats that only rename are the same to the bit.
  const Outcome same = t.sluice({"checkpoint", "diff", t.folder / "run_plain", t.folder / "out_plain"});
  INFO(same.out);
  CHECK(same.code == 0);
  const Outcome refused =
      t.sluice({"export", t.folder / "run_sink", "-o", t.folder / "no", "--format", "qwen3_next"});
  CHECK(refused.code == 64);
  CHECK_THAT(refused.err, Contains("the format qwen3_next cannot hold this model") &&
                              Contains("model.attention.kind = sink"));
  CHECK_FALSE(io::exists(t.folder / "no"));
}

TEST_CASE("a folder is evaluated with overrides, token by token", "[interop]") {
  const TinyRun t;
  REQUIRE(t.train().code == 0);
  const std::string folder = t.folder / "out";
  REQUIRE(t.sluice({"export", t.run, "-o", folder, "--dtype", "f32"}).code == 0);
  // Longer than in training, by YaRN.
  const double longer =
      loss(t, folder,
           {"data.seq_len=64", "model.rope.scaling.type=yarn", "model.rope.scaling.factor=4",
            "model.rope.scaling.original_max_position_embeddings=16"});
  CHECK(std::isfinite(longer));
  CHECK(longer != loss(t, folder, {"data.seq_len=64"}));
  // Unless it is said, YaRN stretches the model's own length, which is 16.
  for (const std::string& model : {folder, t.run})
    CHECK(
        loss(t, model, {"data.seq_len=64", "model.rope.scaling.type=yarn", "model.rope.scaling.factor=4"}) ==
        Approx(longer).epsilon(1e-6));
  CHECK(loss(t, t.run, {"data.seq_len=64"}) == Approx(loss(t, folder, {"data.seq_len=64"})).epsilon(1e-6));

  const std::string losses = t.folder / "losses.npy", logits = t.folder / "logits.npy";
  const double mean = loss(t, t.run, {"--max-tokens", "64", "--per-token", losses, "--logits", logits});
  const std::vector<float> nats = npy(losses), all = npy(logits);
  REQUIRE(nats.size() == 64);
  REQUIRE(all.size() == 64 * 257);
  double sum = 0;
  for (const float x : nats) sum += static_cast<double>(x);
  CHECK(sum / 64 == Approx(mean).epsilon(1e-5));
  const double zeroed = loss(
      t, t.run, {"--max-tokens", "64", "--per-token", t.folder / "zeroed.npy", "--zero-first-value", "all"});
  sum = 0;
  for (const float x : npy(t.folder / "zeroed.npy")) sum += static_cast<double>(x);
  CHECK(sum / 64 == Approx(zeroed).epsilon(1e-5));
  CHECK(zeroed != Approx(mean).epsilon(1e-4));
  // Heads are chosen by micro-batches, of which the last is not full, and in each way at some threshold.
  std::set<double> results;
  for (int percent = 17; percent < 26; ++percent) {
    const double chosen =
        loss(t, t.run,
             {"--max-tokens", "96", "--per-token", t.folder / "sinks.npy", "--zero-first-value", "sinks",
              "--sink-threshold", fmt::format("0.{}", percent), "train.micro_batch_size=4",
              "train.global_batch_size=4", "--force"});
    sum = 0;
    for (const float x : npy(t.folder / "sinks.npy")) sum += static_cast<double>(x);
    INFO(percent);
    CHECK(sum / 96 == Approx(chosen).epsilon(1e-7));
    results.insert(chosen);
  }
  CHECK(results.size() > 2);
  // Nothing is lost to the arrays: neither each other, nor what is read, nor an array that is there.
  const auto refused = [&](int code, const std::string& part, const std::string& file,
                           const std::vector<std::string>& more) {
    const std::string before = io::exists(file) ? io::read_file(file) : "";
    std::vector<std::string> arguments = {"eval", t.run, "--per-token", file};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Outcome o = t.sluice(arguments);
    INFO(o.err);
    CHECK(o.code == code);
    CHECK_THAT(o.err, Contains(part));
    CHECK((io::exists(file) ? io::read_file(file) : "") == before);
  };
  refused(73, "exists; --force replaces it", losses, {});
  refused(64, "--per-token and --logits are both", t.folder / "both.npy",
          {"--logits", t.folder / "./both.npy"});
  for (const std::vector<std::string>& more : {std::vector<std::string>{}, {"--force"}}) {
    refused(64, "held_out.bin: is read as an input", t.folder / "held_out.bin", more);
    refused(73, "exists and is not a NumPy array", t.run + "/config.yaml", more);
    refused(73, "exists and is not a NumPy array", step_folder(t.run, 8) + "/model.safetensors", more);
  }
  const Outcome import = t.sluice({"import", folder, "-o", folder + "/config.json", "--force"});
  CHECK(import.code == 64);
  CHECK_THAT(import.err, Contains("config.json: is read as an input and would be overwritten"));
  // An override without effect is told from one that there is none of.
  for (const auto& [text, part] :
       {std::pair<std::string, std::string>{"extra", "extra: is not key=value"},
        {"foo=1", "foo=1: unknown key foo"},
        {"data.seq_length=8", "unknown key data.seq_length; did you mean data.seq_len?"},
        {"model.rope.thetta=8", "unknown key model.rope.thetta; did you mean model.rope.theta?"},
        {"optimizer.lr=1", "optimizer.lr=1: has no effect on a trained model here"},
        {"optimizer.rules[0].lr_multiplier=1", "has no effect on a trained model here"}}) {
    const Outcome o = t.sluice({"generate", t.run, text});
    CHECK(o.code == 64);
    CHECK_THAT(o.err, Contains(part));
  }
  // A loss is the log-sum-exp of the logits without that of the target, which is in the files of tokens.
  double total = 0;
  for (size_t i = 0; i < 257; ++i) total += std::exp(static_cast<double>(all[i]));
  double nearest = 1;
  for (size_t i = 0; i < 257; ++i)
    nearest = std::min(
        nearest, std::abs(std::log(total) - static_cast<double>(all[i]) - static_cast<double>(nats[0])));
  CHECK(nearest < 1e-4);

  CHECK(t.sluice({"generate", folder, "-p", "ab", "-n", "4", "--temperature", "0"}).out ==
        t.sluice({"generate", t.run, "-p", "ab", "-n", "4", "--temperature", "0"}).out);
  CHECK(t.sluice({"analyze", folder, "-o", t.folder / "analysis", "--data",
                  "held_out=" + (t.folder / "held_out"), "--quiet", "data.seq_len=16"})
            .code == 0);
  // Weights that are not numbers give no text and no accuracy.
  const std::string weights = io::read_file(folder + "/model.safetensors"), task = t.folder / "task.jsonl";
  write_bytes(folder + "/model.safetensors",
              weights.substr(0, weights.size() - 64) + std::string(64, '\xff'));
  write_bytes(task, "{\"context\": \"a\", \"choices\": [\" b\", \" c\"], \"answer\": 0}\n");
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"generate", folder, "-p", "ab", "--temperature", "0"},
        {"generate", folder, "-p", "ab"},
        {"eval", folder, "--tasks", task},
        {"eval", folder, "--data", "text=" + (t.folder / "train"), "data.seq_len=700",
         "eval.ruler={samples: 1, lengths: [640], tasks: [niah_single_1]}"}}) {
    const Outcome o = t.sluice(arguments);
    INFO(arguments[0] << o.out << o.err);
    CHECK(o.code == 78);
    CHECK_THAT(o.err, Contains("not finite"));
  }
  write_bytes(folder + "/model.safetensors", weights);
  // Hidden behind no message: a folder that Sluice cannot compute says which value.
  nlohmann::json config = nlohmann::json::parse(io::read_file(folder + "/config.json"));
  config["attention_bias"] = true;
  write_bytes(folder + "/config.json", config.dump());
  const Outcome o = t.sluice({"eval", folder});
  CHECK(o.code == 64);
  CHECK_THAT(o.err, Contains("config.json") && Contains("qwen3_next") && Contains("attention_bias = true"));
}

TEST_CASE("a gate added to trained weights keeps their function", "[interop]") {
  const TinyRun t;
  const std::string bias = GENERATE("model.attention_bias=false", "model.attention_bias=true");
  CAPTURE(bias);
  // A rate at which the biases become large.
  REQUIRE(t.train({"model.attention.gates=[]", "train.max_steps=4", "optimizer.lr=0.1", bias}).code == 0);
  const double before = loss(t, t.run);
  const std::string from = "train.init_from=" + t.run;
  int runs = 0;
  // The loss of step 0 of evaluation, with a learning rate of 0, is that of the start.
  const auto start = [&](const std::string& gates, std::vector<std::string> more, std::string& output) {
    const std::string run = t.folder / fmt::format("gated{}", ++runs);
    more.insert(more.end(), {from, bias, "run_dir=" + run, "train.max_steps=1", "optimizer.lr=1e-30",
                             "optimizer.weight_decay=0", "train.init_missing=fresh"});
    if (!gates.empty()) more.push_back("model.attention.gates=[" + gates + "]");
    const Outcome o = t.train(more);
    INFO(o.out << o.err);
    REQUIRE(o.code == 0);
    output = o.out;
    return loss(t, run);
  };
  std::string out;
  for (const char* gates :
       {"{position: sdpa_output}", "{position: value}, {position: dense_output}", "{position: query}",
        "{position: key, granularity: headwise}", "{combine: add, activation: silu}",
        "{input: none, activation: identity}", "{input: none, activation: silu}", "{activation: ns_sigmoid}",
        "{heads: shared}", "{position: value, input: self}"}) {
    INFO(gates);
    CHECK(start(gates, {}, out) == Approx(before).epsilon(1e-6));
    CHECK_THAT(out, Contains("the function of the weights"));
  }
  CHECK(start("", {"model.attention.gates=[]", "model.attention.kind=sink"}, out) ==
        Approx(before).epsilon(1e-3));
  CHECK_THAT(out, Contains("sinks nearly: they start at -8"));
  CHECK(start("", {"model.attention.gates=[]", "model.attention.exclusive=learned"}, out) ==
        Approx(before).epsilon(1e-6));
  CHECK_THAT(out, Contains("they keep the function of the weights"));
  // Where it cannot be kept, that is said.
  start("{activation: silu}", {}, out);
  CHECK_THAT(out, Contains("the function changes by self_attn.gate_proj.weight"));
  // Only the parameters that are named may be missing, and without the key none.
  const Outcome other = t.train({from, bias, "run_dir=" + (t.folder / "no"), "train.init_missing=fresh",
                                 "train.init_missing_names=[sinks]"});
  CHECK(other.code == 65);
  CHECK_THAT(other.err, Contains("missing: model.layers.0.self_attn.gate_proj.weight"));
  // Adapters train nothing else: a sink would stay where it starts.
  const Outcome frozen = t.train({from, bias, "run_dir=" + (t.folder / "no"), "train.init_missing=fresh",
                                  "lora.rank=2", "model.attention.gates=[]", "model.attention.kind=sink"});
  CHECK(frozen.code == 64);
  CHECK_THAT(frozen.err, Contains("self_attn.sinks is new and would never be trained"));
  const Outcome none = t.train({from, "run_dir=" + (t.folder / "no")});
  CHECK(none.code == 64);
  CHECK_THAT(none.err, Contains("model.attention.gates") && Contains("train.init_missing: fresh"));
}

TEST_CASE("a gate behind one that adds or reads itself is not said to keep the function", "[interop]") {
  const TinyRun t;
  for (const std::string first : {"{position: query, combine: add}", "{position: query, input: self}"}) {
    INFO(first);
    const std::string source = t.folder / (first.find("self") == std::string::npos ? "adds" : "self");
    REQUIRE(
        t.train({"model.attention.gates=[" + first + "]", "train.max_steps=2", "run_dir=" + source}).code ==
        0);
    const auto start = [&](const std::string& second) {
      const Outcome o =
          t.train({"train.init_from=" + source, "run_dir=" + source + second, "train.max_steps=1",
                   "train.init_missing=fresh",
                   "model.attention.gates=[" + first + ", {position: query, activation: " + second + "}]"});
      INFO(o.err);
      REQUIRE(o.code == 0);
      return o.out;
    };
    CHECK_THAT(start("sigmoid"), Contains("the function changes by self_attn.query_gate_proj_2.weight"));
    CHECK_THAT(start("two_sigmoid"), Contains("they keep the function of the weights"));  // its score is 1
  }
}

TEST_CASE("sluice import names what a folder has and Sluice lacks", "[interop]") {
  const TinyRun t;
  const std::string folder = t.folder / "windowed";
  io::make_directories(folder);
  nlohmann::json config = nlohmann::json::parse(io::read_file(golden("qwen3_tiny") + "/config.json"));
  config["attn_logit_softcapping"] = 50.0;
  write_bytes(folder + "/config.json", config.dump());
  write_bytes(folder + "/model.safetensors", io::read_file(golden("qwen3_tiny") + "/model.safetensors"));
  const Outcome o = t.sluice({"import", folder});
  INFO(o.out << o.err);
  CHECK(o.code == 0);
  CHECK_THAT(o.out, Contains("init_ignore: [model.attention]") && Contains("hidden_size: 16"));
  CHECK_THAT(o.err, Contains("cannot hold  attn_logit_softcapping = 50.0"));
  // Tensors that do not fit: the model's type, and one line per size.
  config["hidden_size"] = 32;
  write_bytes(folder + "/config.json", config.dump());
  const Outcome wide = t.sluice({"import", folder});
  CHECK(wide.code == 65);
  CHECK_THAT(wide.err, Contains("model_type qwen3") && Contains("hidden_size: folder 16, configuration 32"));
  CHECK(t.sluice({"import", t.folder / "train.bin"}).code == 66);
  CHECK(t.sluice({"import", t.folder.path}).code == 66);
}

}  // namespace sluice::test
