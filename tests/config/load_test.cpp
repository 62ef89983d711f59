#include "config/load.h"

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "config/fields.h"
#include "config/scalars.h"
#include "config/scratch.h"

using namespace sluice;

namespace {

/// Every scalar of a configuration as "key=value" lines.
std::string listing(Config config) {
  std::string out;
  for_each_leaf(config, [&](const std::string& key, auto& value, const char*) {
    out += key + "=" + scalar_text(value) + "\n";
  });
  return out;
}

/// A configuration whose lists are not empty, so that every key exists.
Config full() {
  Config c;
  c.name = "full";
  c.run_dir = "runs/full";
  c.model.attention.gates.resize(2);
  c.data.train = {{"a", "/data/a", 1}, {"b", "/data/b", 2}};
  c.data.validation = {{"v", "/data/v", 1}};
  c.optimizer.rules.resize(1);
  c.optimizer.rules[0].match = "embed";
  return c;
}

/// Another value of the same type.
void mutate(bool& x) { x = !x; }
void mutate(int64_t& x) { x += 2; }
void mutate(uint64_t& x) { x += 1; }
void mutate(double& x) { x = x == 0.5 ? 0.25 : x / 2 + 0.25; }
void mutate(std::vector<int64_t>& x) { x.push_back(1); }
void mutate(std::vector<std::string>& x) { x.push_back("x, y"); }
void mutate(std::string& x) { x += "z: \"\\ '#"; }
template <class E>
requires std::is_enum_v<E>
void mutate(E& x) {
  const auto count = EnumNames<E>::names.size();
  x = static_cast<E>((static_cast<size_t>(x) + 1) % count);
}
template <class T>
void mutate(std::optional<T>& x) {
  if constexpr (std::same_as<T, bool>) {
    x = false;
  } else {
    x = static_cast<T>(300);
  }
}

ChangeClass expected_class(const std::string& key) {
  const auto in = [&](std::initializer_list<const char*> prefixes) {
    for (const std::string prefix : prefixes)
      if (key.compare(0, prefix.size(), prefix) == 0) return true;
    return false;
  };
  if (key == "parallel.gradient_dtype") return ChangeClass::trajectory;
  if (in({"name",
          "run_dir",
          "eval.",
          "analysis.",
          "checkpoint.",
          "log.",
          "parallel.",
          "train.threads",
          "train.device",
          "train.deterministic",
          "train.matmul_algorithm",
          "train.recompute",
          "train.divergence_factor",
          "train.init_ignore",
          "train.init_missing",
          "train.check_limits",
          "model.attention.kernel",
          "data.allow_overlap",
          "data.validation",
          "data.tokenizer.path",
          "data.train[0].path",
          "data.train[1].path",
          "data.train[0].name",
          "data.train[1].name",
          "model.match_"}))
    return ChangeClass::operational;
  if (in({"optimizer.type"})) return ChangeClass::identity;
  if (in({"optimizer.", "train.max_", "train.on_", "train.init_from", "model.moe.load_balance",
          "model.moe.router_z", "model.logit_z", "model.attention.head_balance",
          "model.attention.sparse.loss.coefficient"}))
    return ChangeClass::trajectory;
  return ChangeClass::identity;
}

}  // namespace

TEST_CASE("precedence: defaults, bases in order, the file, the command line", "[config]") {
  const test::ScratchFolder folder;
  folder.write("bases/one.yaml",
               "model: {hidden_size: 100, num_hidden_layers: 7, rope: {theta: 5}}\ntrain: {seed: 1, "
               "max_tokens: 20B}\n");
  folder.write("bases/two.yaml", "extends: [sub/three.yaml]\nmodel: {hidden_size: 200}\n");
  folder.write("bases/sub/three.yaml",
               "optimizer: {lr: 5e-4, beta1: 0.8}\nmodel: {hidden_size: 1, branch_clip: 3}\n");
  folder.write("a.yaml",
               "extends: [bases/one.yaml, bases/two.yaml]\nmodel: {branch_clip: null, rope: {scaling: "
               "{beta_fast: 30}}}\n"
               "optimizer: {beta1: 0.7}\n");
  const Config c =
      load_config("a.yaml", {"train.seed=9", "model.rope={theta: 1e6}", "optimizer.beta2=null", "name=x"});
  CHECK(c.model.hidden_size == 200);
  CHECK(c.model.num_hidden_layers == 7);
  CHECK(c.model.rope.theta == 1e6);  // a section on the command line merges
  CHECK(c.model.rope.scaling.beta_fast == 30);
  CHECK(!c.model.branch_clip);  // null restores the default
  CHECK(c.optimizer.lr == 5e-4);
  CHECK(c.optimizer.beta1 == 0.7);
  CHECK(c.optimizer.beta2 == 0.95);
  CHECK(c.train.seed == 9);
  CHECK(c.train.max_tokens == 20'000'000'000);
  CHECK(c.name == "x");
  CHECK(c.run_dir == "runs/x");
}

TEST_CASE("lists replace, and their elements can be set from the command line", "[config]") {
  const test::ScratchFolder folder;
  folder.write("base.yaml", "model: {attention: {gates: [{position: query}, {position: key}]}}\n");
  folder.write("a.yaml",
               "extends: base.yaml\nmodel: {attention: {gates: [{position: value, heads: shared}]}}\n");
  CHECK(load_config("base.yaml").model.attention.gates.size() == 2);
  Config c = load_config("a.yaml", {"model.attention.gates[0].granularity=headwise"});
  REQUIRE(c.model.attention.gates.size() == 1);
  CHECK(c.model.attention.gates[0].position == GatePosition::value);
  CHECK(c.model.attention.gates[0].heads == GateSharing::shared);
  CHECK(c.model.attention.gates[0].granularity == GateGranularity::headwise);
  c = load_config("a.yaml", {"model.attention.gates=[{position: query}, {}]"});
  REQUIRE(c.model.attention.gates.size() == 2);
  CHECK(c.model.attention.gates[0].heads == GateSharing::specific);
  CHECK(load_config("a.yaml", {"model.attention.gates=[]"}).model.attention.gates.empty());
}

TEST_CASE("whole numbers with exponents and suffixes are read exactly", "[config]") {
  int64_t x = 0;
  uint64_t u = 0;
  const auto value = [&](const char* text) {
    CHECK(parse_integer(text, x) == "");
    return x;
  };
  CHECK(value("1e9") == 1'000'000'000);
  CHECK(value("1.5B") == 1'500'000'000);
  CHECK(value("3.5T") == 3'500'000'000'000);
  CHECK(value("512k") == 512'000);
  CHECK(value("64Ki") == 65536);
  CHECK(value("0.5Mi") == 524288);
  CHECK(value("-12") == -12);
  CHECK(value("0") == 0);
  CHECK(value("9223372036854775807") == INT64_MAX);
  CHECK(value("2500e-2") == 25);
  CHECK(parse_integer("9223372036854775808", x) == "is too large: 9223372036854775808");
  CHECK(parse_integer("1e400", x) == "is too large: 1e400");
  CHECK(parse_integer("18446744073709551615", u) == "");
  CHECK(u == UINT64_MAX);
  CHECK(parse_integer("18446744073709551616", u) == "is too large: 18446744073709551616");
  for (const char* bad :
       {"", "e5", "1e", "1.2.3", "0.0001k", "1 000", "true", "1:30", "inf", "--1", "1e5x"}) {
    INFO(bad);
    CHECK(parse_integer(bad, x) != "");
  }
}

TEST_CASE("relative paths are resolved against the file that states them", "[config]") {
  const test::ScratchFolder folder;
  folder.write("configs/data/base.yaml",
               "data:\n  tokenizer: {type: sentencepiece, path: ../tok.model}\n"
               "  train: [{name: a, path: a/*.bin}, {name: b, path: /abs/b}]\n");
  folder.write("configs/a.yaml", "extends: data/base.yaml\nmodel: {match_parameters_of: ../other.yaml}\n");
  const Config c =
      load_config("configs/a.yaml", {"train.init_from=ckpt", "data.validation=[{name: v, path: ../v}]"});
  const std::string here = std::filesystem::current_path();
  CHECK(c.data.tokenizer.path == "configs/tok.model");
  CHECK(c.data.train[0].path == "configs/data/a/*.bin");
  CHECK(c.data.train[1].path == "/abs/b");
  CHECK(c.model.match_parameters_of == "other.yaml");
  CHECK(c.train.init_from == "ckpt");
  CHECK(c.data.validation[0].path == (std::filesystem::path(here).parent_path() / "v").string());
  CHECK(load_config("configs/data/base.yaml").train.init_from.empty());

  // The written configuration can be moved anywhere.
  folder.write("runs/a/config.yaml", to_yaml(c));
  CHECK(listing(load_config("runs/a/config.yaml")) == listing(c));
}

TEST_CASE("to_yaml round-trips any value of a key", "[config]") {
  const test::ScratchFolder folder;
  Config c = full();
  c.data.train[0].path = "/data/with space: \"#'\\ {x}\n\t*.bin";
  c.optimizer.rules[0].match = "null";
  c.optimizer.rules[0].weight_decay = false;
  c.optimizer.lr = 0.1 + 0.2;
  c.optimizer.eps = 1.2345678901234567e-21;
  c.optimizer.min_lr = 5e-324;
  c.train.seed = UINT64_MAX;
  c.train.max_tokens = INT64_MAX;
  c.model.branch_clip = 300;
  folder.write("b.yaml", to_yaml(c));
  CHECK(listing(load_config("b.yaml")) == listing(c));
}

TEST_CASE("every changed key is found and classified", "[config]") {
  const Config before = full();
  std::vector<std::string> keys;
  Config walked = before;
  for_each_leaf(walked, [&](const std::string& key, auto&, const char*) { keys.push_back(key); });
  REQUIRE(keys.size() > 80);
  std::set<ChangeClass> kinds;
  for (const std::string& mutated : keys) {
    Config after = before;
    for_each_leaf(after, [&](const std::string& key, auto& value, const char*) {
      if (key == mutated) mutate(value);
    });
    const std::vector<ConfigChange> changes = config_changes(before, after);
    INFO(mutated);
    REQUIRE(changes.size() == 1);
    CHECK(changes[0].key == mutated);
    CHECK(changes[0].before != changes[0].after);
    CHECK(changes[0].kind == expected_class(mutated));
    kinds.insert(changes[0].kind);
    // The hash covers exactly the keys that can change the result.
    const std::string section = mutated.substr(0, mutated.find('.'));
    const bool counts = mutated != "name" && mutated != "run_dir" && mutated != "train.threads" &&
                        section != "eval" && section != "analysis" && section != "checkpoint" &&
                        section != "log";
    CHECK((config_hash(before) != config_hash(after)) == counts);
  }
  CHECK(kinds.size() == 3);
}

TEST_CASE("longer and shorter lists are changes", "[config]") {
  const Config before = full();
  Config after = before;
  after.model.attention.gates.pop_back();
  after.optimizer.rules.push_back({"norm", 2, std::nullopt});
  const std::vector<ConfigChange> changes = config_changes(before, after);
  REQUIRE(changes.size() == 13);
  CHECK(changes[0].key == "model.attention.gates[1].position");
  CHECK(changes[0].after == "(absent)");
  CHECK(changes[0].kind == ChangeClass::identity);
  CHECK(changes[9].key == "optimizer.rules[1].match");
  CHECK(changes[9].before == "(absent)");
  CHECK(changes[9].kind == ChangeClass::trajectory);
}

TEST_CASE("configs/reference.yaml equals the generated reference", "[config]") {
  std::ifstream file(SLUICE_SOURCE_DIR "/configs/reference.yaml");
  std::stringstream text;
  text << file.rdbuf();
  CHECK(text.str() == reference_yaml());
  // Every key is in it, every default is the default.
  Config reference = load_config(SLUICE_SOURCE_DIR "/configs/reference.yaml");
  Config defaults;
  defaults.name = "reference";
  defaults.run_dir = "runs/reference";
  CHECK(listing(reference) == listing(defaults));
  for (const KeyInfo& key : config_keys()) {
    const std::string name = key.key.substr(key.key.rfind('.') + 1);
    CHECK(text.str().find(name + ":") != std::string::npos);
  }
}

TEST_CASE("every shipped configuration is read", "[config]") {
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(SLUICE_SOURCE_DIR "/configs")) {
    if (entry.path().extension() != ".yaml" || entry.path().parent_path().filename() == "sweeps") continue;
    INFO(entry.path());
    CHECK_NOTHROW(load_config(entry.path()));
    ++files;
  }
  CHECK(files > 90);
}
