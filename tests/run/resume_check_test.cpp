#include "run/resume_check.h"

#include <catch2/catch.hpp>

#include "config/load.h"
#include "core/io.h"
#include "support/tiny_training.h"

namespace sluice {
namespace {

ParameterRule freeze(const char* match) {
  ParameterRule rule;
  rule.match = match;
  rule.trainable = false;
  return rule;
}

}  // namespace

TEST_CASE("A run resumes with the same parameters frozen only, however rules say it", "[freeze][resume]") {
  test::TinyTraining t;
  t.config.model.vocab_size = 257;  // of the tokenizer that the configuration names
  const Blend data = t.blend();
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(t.config.data.tokenizer);
  const auto message = [&](std::vector<ParameterRule> before, std::vector<ParameterRule> after,
                           const std::vector<std::string>& allowed) -> std::string {
    Config config = t.config;
    config.optimizer.rules = std::move(before);
    CheckpointInfo checkpoint;
    checkpoint.path = t.folder / "checkpoint";
    io::make_directories(checkpoint.path);
    io::write_file_atomic(checkpoint.path + "/config.yaml", to_yaml(config));
    checkpoint.state = nlohmann::json::object();
    config.optimizer.rules = std::move(after);
    try {
      check_resume(checkpoint, config, allowed, data, *tokenizer, false);
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::usage);
      return error.what();
    }
    return "";
  };
  const std::string match = "optimizer.rules[0].match", trainable = "optimizer.rules[0].trainable";
  CHECK(message({freeze("embed_tokens")}, {freeze("embed_tokens")}, {}).empty());
  CHECK(message({freeze("embed_tokens")}, {freeze("model.embed")}, {match}).empty());
  CHECK_THAT(message({freeze("embed_tokens")}, {freeze("model.embed")}, {}),
             Catch::Contains("--allow-change"));
  CHECK_THAT(
      message({freeze("embed_tokens")}, {freeze("q_proj")}, {match}),
      Catch::Contains(
          "model.embed_tokens.weight frozen so far, trained now: the checkpoint holds no moments") &&
          Catch::Contains("model.layers.0.self_attn.q_proj.weight and 1 more trained so far, frozen now") &&
          Catch::Contains("train.init_from="));
  ParameterRule trained = freeze("embed_tokens");
  trained.trainable = true;
  CHECK_THAT(message({freeze("embed_tokens")}, {trained}, {trainable}),
             Catch::Contains("holds no moments of it"));
}

TEST_CASE("keys of --allow-change exist, each named with its section", "[resume]") {
  require_known_keys({});
  require_known_keys({"optimizer.lr", "optimizer.rules[3].match", "train.max_steps", "lora.targets"});
  const auto refusal = [](const std::string& key) -> std::string {
    try {
      require_known_keys({"optimizer.lr", key});
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::usage);
      return error.what();
    }
    return "";
  };
  CHECK_THAT(refusal("bogus.key"), Catch::Contains("--allow-change bogus.key: there is no such key"));
  CHECK_THAT(refusal("lr"), Catch::Contains("did you mean optimizer.lr?"));
  CHECK_THAT(refusal("train.max_step"), Catch::Contains("did you mean train.max_steps?"));
  CHECK_THAT(refusal("optimizer"), Catch::Contains("--allow-change optimizer: there is no such key"));
  CHECK_THAT(refusal(""), Catch::Contains("there is no such key"));
}

TEST_CASE("A run does not resume with another begin token", "[resume][begin_token]") {
  test::TinyTraining t;
  t.config.model.vocab_size = 257;  // of the tokenizer that the configuration names
  CheckpointInfo checkpoint;
  checkpoint.path = t.folder / "checkpoint";
  io::make_directories(checkpoint.path);
  checkpoint.state = nlohmann::json::object();
  const Blend data = t.blend();
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(t.config.data.tokenizer);
  const auto resume = [&](std::optional<int64_t> before, std::optional<int64_t> after) {
    t.config.data.begin_token = before;
    io::write_file_atomic(checkpoint.path + "/config.yaml", to_yaml(t.config));
    t.config.data.begin_token = after;
    check_resume(checkpoint, t.config, {"data.begin_token"}, data, *tokenizer, false);
  };
  CHECK_NOTHROW(resume(std::nullopt, std::nullopt));
  CHECK_NOTHROW(resume(256, 256));
  CHECK_THROWS_WITH(resume(std::nullopt, 256),
                    Catch::Contains("impossible") && Catch::Contains("data.begin_token: null -> 256"));
  CHECK_THROWS_WITH(resume(256, 0), Catch::Contains("data.begin_token: 256 -> 0"));
}

}  // namespace sluice
