#include "plan/model_rules.h"

#include <catch2/catch.hpp>
#include <sstream>

#include "config/problems.h"
#include "config/scratch.h"
#include "plan/plan.h"

namespace sluice {
namespace {

using Lines = std::vector<std::string>;

constexpr const char* kModel =
    "model: {vocab_size: 257, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 1, head_dim: 8, intermediate_size: 24}\n"
    "train: {micro_batch_size: 1, global_batch_size: 4, max_steps: 8}\n"
    "data: {seq_len: 16}\n";

/// The lines of the error of a configuration file with `more` in it, and of the plan of the same
/// configuration, which must be equal.
Lines problems(const std::string& more, int64_t ranks = 1, const std::vector<std::string>& overrides = {}) {
  const test::ScratchFolder folder;
  folder.write("a.yaml", kModel + more);
  KeyPlaces places;
  const Config config = load_config("a.yaml", overrides, &places);
  const auto lines_of = [](const auto& f) {
    Lines lines;
    try {
      f();
    } catch (const ConfigError& error) {
      std::istringstream text(error.what());
      for (std::string line; std::getline(text, line);) lines.push_back(line);
    }
    return lines;
  };
  const Lines found = lines_of([&] { require_model_rules(config, ranks, places); });
  CHECK(lines_of([&] { make_plan(config, ranks, places); }) == found);
  return found;
}

}  // namespace

TEST_CASE("rules that match no parameter are reported by file and line, all of them", "[plan][rules]") {
  CHECK(problems("").empty());
  CHECK(problems("optimizer:\n  rules:\n    - {match: q_proj, lr_multiplier: 2}\n").empty());
  CHECK(problems("optimizer:\n"
                 "  rules:\n"
                 "    - {match: q_porj, lr_multiplier: 2}\n"
                 "    - {match: embed_tokens, trainable: false}\n"
                 "    - match: o_porj\n"
                 "      weight_decay: true\n") ==
        Lines{"a.yaml:6:8: optimizer.rules[0]: no trained parameter's name contains 'q_porj'",
              "a.yaml:8:7: optimizer.rules[2]: no trained parameter's name contains 'o_porj'"});
  CHECK(problems("", 1, {"optimizer.rules=[{match: q_porj}]"}) ==
        Lines{"command line: optimizer.rules[0]: no parameter's name "
              "contains 'q_porj'"});
  CHECK(problems("optimizer: {rules: [{match: '.', trainable: false}]}\n") ==
        Lines{"a.yaml:4:13: optimizer.rules freeze every parameter: nothing is left to train (the last rule "
              "that matches a name decides)"});
  const Lines half = problems("optimizer: {rules: [{match: mlp.up_proj, trainable: false}]}\n");
  REQUIRE(half.size() == 1);
  CHECK(half[0].starts_with("a.yaml:4:13: optimizer.rules: model.layers.0.mlp.gate_proj.weight is trained"));
}

TEST_CASE("targets of adapters that match no matrix are reported by file and line", "[plan][rules][lora]") {
  const auto targets = [&](const std::string& names) {
    return problems("lora:\n  rank: 2\n  targets: [" + names + "]\n", 1, {"train.init_from=x"});
  };
  CHECK(targets("q_proj").empty());
  CHECK(targets("q_porj, o_proj, up_porj") ==
        Lines{"a.yaml:6:3: lora.targets: no matrix of this model is called q_porj",
              "a.yaml:6:3: lora.targets: no matrix of this model is called up_porj"});
  CHECK(targets("porj") == Lines{"a.yaml:6:3: lora.targets: no matrix of this model is called porj"});
  const Lines norm = targets("q_proj, input_layernorm");
  REQUIRE(norm.size() == 1);
  CHECK(norm[0].starts_with("a.yaml:6:3: lora.targets: model.layers.0.input_layernorm.weight is named"));
}

TEST_CASE("names without a parameter are reported together with what ranks cannot share", "[plan][rules]") {
  const Lines both = problems("optimizer: {rules: [{match: q_porj}]}\n", 3);
  REQUIRE(both.size() == 2);
  CHECK(both[0].starts_with("a.yaml:2:"));
  CHECK(both[0].find("which 3 ranks cannot share evenly") != std::string::npos);
  CHECK(both[1] == "a.yaml:4:22: optimizer.rules[0]: no parameter's name contains 'q_porj'");
}

TEST_CASE("a parameter match that cannot be met is reported by file and line", "[plan][rules]") {
  const test::ScratchFolder folder;
  folder.write("small.yaml", kModel);
  folder.write("wide.yaml",
               "model:\n  match_parameters_of: small.yaml\n  vocab_size: 257\n  hidden_size: 160\n");
  KeyPlaces places;
  const Config config = load_config("wide.yaml", {}, &places);
  CHECK_THROWS_WITH(make_plan(config, 1, places),
                    Catch::StartsWith("wide.yaml:2:3: model.match_parameters_of: no intermediate_size"));
}

}  // namespace sluice
