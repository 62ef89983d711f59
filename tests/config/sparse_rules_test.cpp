// What is refused of model.attention.sparse, by name and line.
#include <catch2/catch.hpp>
#include <fstream>

#include "config/load.h"
#include "config/scratch.h"
#include "core/error.h"

using namespace sluice;

namespace {

/// The first line of the message about this sparse section (and what follows it); "" if it is accepted.
std::string refusal(const std::string& section, const std::string& rest = "") {
  const test::ScratchFolder folder;
  folder.write("a.yaml", "model:\n  attention:\n    kind: sparse\n    sparse: {" + section + "}\n" + rest);
  try {
    load_config("a.yaml", {});
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::usage);
    const std::string text = error.what();
    const size_t at = text.find("a.yaml");
    return text.substr(at, text.find('\n') - at);
  }
  return "";
}

}  // namespace

TEST_CASE("sparse attention: contradictions are refused with file and line", "[config][sparse]") {
  const std::string at = "model.attention.sparse.";
  CHECK(refusal("") == "");
  CHECK(refusal("block: 4, k: {base: 512}, indexer: {activation: relu, head_weights: none}") == "");
  for (const char* key : {"block", "indexer.heads", "indexer.head_dim", "k.base", "k.min", "k.max"}) {
    const std::string name = key;
    const size_t dot = name.find('.');
    const std::string yaml =
        dot == std::string::npos ? name + ": 0" : name.substr(0, dot) + ": {" + name.substr(dot + 1) + ": 0}";
    CHECK(refusal(yaml).find(at + name + " must be at least 1, got 0") != std::string::npos);
  }
  const auto told = [](const std::string& section, const std::string& message, const std::string& rest = "") {
    INFO(section);
    const std::string text = refusal(section, rest);
    INFO(text);
    CHECK(text.find("a.yaml:") == 0);
    CHECK(text.find(message) != std::string::npos);
  };
  told("indexer: {rope: true, head_dim: 7}", at + "indexer.head_dim must be even (rotary pairs), got 7");
  told("indexer: {scale: 0}", at + "indexer.scale must be greater than 0, got 0");
  told("k: {policy: inverse, min: 9, max: 8}", at + "k.min = 9 is greater than k.max = 8");
  told("k: {momentum: 1}", at + "k.momentum must be in [0, 1), got 1");
  told("k: {temperature: 0}", at + "k.temperature must be greater than 0, got 0");
  told("loss: {temperature: -1}", at + "loss.temperature must be greater than 0, got -1");
  told("loss: {coefficient: -1}", at + "loss.coefficient must not be negative, got -1");
  told("loss: {coefficient: 0, learn_temperature: true}", at + "loss.learn_temperature has no effect");
  told("block: 4, force_self: true", at + "force_self has no effect with blocks");
  told("phase: dense_warm_up, phase_steps: 3", at + "phase_steps is the warm-up before the sparse phase");
  told("phase_steps: -3", at + "phase_steps must not be negative, got -3");
  told("phase: dense_warm_up, loss: {coefficient: 0}",
       at + "phase: dense_warm_up trains the indexer by its loss");
  told("scope: kv_head, indexer: {heads: 3}",
       at + "indexer.heads = 3 must be a multiple of num_key_value_heads = 2");
}
