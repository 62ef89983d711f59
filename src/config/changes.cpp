// What changed between two configurations, and how much it matters (configs/README.md).
#include <spdlog/fmt/fmt.h>
#include <xxhash.h>

#include <algorithm>
#include <set>

#include "config/leaves.h"
#include "config/load.h"
#include "config/paths.h"

namespace sluice {
namespace {

/// The first matching prefix decides. Every key not listed is identity: it determines what is trained.
constexpr struct {
  std::string_view prefix;
  ChangeClass kind;
} kClasses[] = {
    {"name", ChangeClass::operational},
    {"run_dir", ChangeClass::operational},
    {"eval.", ChangeClass::operational},
    {"analysis.", ChangeClass::operational},
    {"checkpoint.", ChangeClass::operational},
    {"log.", ChangeClass::operational},
    {"data.validation", ChangeClass::operational},
    {"data.allow_overlap", ChangeClass::operational},
    {"train.device", ChangeClass::operational},
    {"train.divergence_factor", ChangeClass::operational},
    {"train.init_ignore", ChangeClass::operational},
    {"train.init_missing", ChangeClass::operational},  // a resumed run has all parameters
    {"train.init_from", ChangeClass::trajectory},  // its files may have moved: a resume reads none of them
    {"train.check_limits", ChangeClass::operational},
    {"model.attention.kernel", ChangeClass::operational},
    {"train.deterministic", ChangeClass::operational},
    {"train.matmul_algorithm", ChangeClass::operational},
    {"model.moe.load_balance", ChangeClass::trajectory},
    {"model.attention.head_balance", ChangeClass::trajectory},
    {"model.attention.sparse.loss.coefficient", ChangeClass::trajectory},
    {"model.moe.router_z_loss_coefficient", ChangeClass::trajectory},
    {"model.logit_z_loss_coefficient", ChangeClass::trajectory},
    {"train.threads", ChangeClass::operational},
    {"parallel.gradient_dtype", ChangeClass::trajectory},
    {"parallel.", ChangeClass::operational},
    {"train.recompute", ChangeClass::operational},  // the same bits, less memory
    // Their effect is intermediate_size, which is identity itself.
    {"model.match_parameters_of", ChangeClass::operational},
    {"model.match_multiple", ChangeClass::operational},
    {"train.max_steps", ChangeClass::trajectory},
    {"train.max_tokens", ChangeClass::trajectory},
    {"train.max_grad_norm", ChangeClass::trajectory},
    {"train.on_nonfinite", ChangeClass::trajectory},
    {"train.on_spike", ChangeClass::trajectory},
    {"optimizer.type", ChangeClass::identity},  // a checkpoint holds other moments
    {"optimizer.", ChangeClass::trajectory},
};

ChangeClass class_of(std::string_view key) {
  // Data files may move: checkpoints identify their contents by fingerprints.
  constexpr std::string_view kPath = ".path";
  if (key.substr(0, 5) == "data." && key.size() > kPath.size() &&
      key.substr(key.size() - kPath.size()) == kPath)
    return ChangeClass::operational;
  if (key.starts_with("data.train[") && key.ends_with("].name"))
    return ChangeClass::operational;  // for messages
  for (const auto& c : kClasses)
    if (key.substr(0, c.prefix.size()) == c.prefix) return c.kind;
  return ChangeClass::identity;
}

/// Whether it is a key of a gate that later versions added, at its default. Elements of lists are not among
/// the defaults of a whole configuration.
bool is_later_gate_default(const Leaf& leaf) {
  constexpr std::string_view kGates = "model.attention.gates[", kLater[] = {"input_channels", "init", "bias"};
  if (!leaf.key.starts_with(kGates)) return false;
  bool at_default = false;
  GateConfig defaults;
  for_each_leaf(defaults, [&](const std::string& key, auto& member, const char*) {
    const bool later = std::find(std::begin(kLater), std::end(kLater), key) != std::end(kLater);
    if (later && leaf.key.ends_with("]." + key)) at_default = leaf.value == scalar_text(member);
  });
  return at_default;
}

}  // namespace

std::string config_hash(const Config& config) {
  std::set<std::string> defaults;
  for (const Leaf& leaf : leaves(Config{})) defaults.insert(leaf.key + "=" + leaf.value);
  std::string text;
  for (const Leaf& leaf : leaves(config)) {
    // A key that a later version adds, left at its default, must not change the hash.
    if (defaults.count(leaf.key + "=" + leaf.value)) continue;
    if (leaf.key.starts_with("optimizer.rules[") && leaf.key.ends_with("].trainable") && leaf.value == "true")
      continue;
    if (is_later_gate_default(leaf)) continue;
    bool counts = leaf.key != "name" && leaf.key != "run_dir" && leaf.key != "train.threads";
    for (const std::string_view section : {"log.", "checkpoint.", "eval.", "analysis."})
      counts = counts && leaf.key.compare(0, section.size(), section) != 0;
    if (counts) text += leaf.key + "=" + leaf.value + "\n";
  }
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::vector<ConfigChange> config_changes(const Config& before, const Config& after) {
  // The same file may be named by an absolute or a relative path.
  Config first = before, second = after;
  make_paths_absolute(first);
  make_paths_absolute(second);
  const std::vector<Leaf> a = leaves(first), b = leaves(second);
  std::vector<ConfigChange> out;
  const auto value_in = [](const std::vector<Leaf>& list, const std::string& key) {
    const auto it = std::find_if(list.begin(), list.end(), [&](const Leaf& l) { return l.key == key; });
    return it == list.end() ? std::string("(absent)") : it->value;
  };
  const auto compare = [&](const std::string& key) {
    std::string x = value_in(a, key), y = value_in(b, key);
    if (x != y) out.push_back({key, std::move(x), std::move(y), class_of(key)});
  };
  // Lists differ in length at their ends only, so one pass over both keeps the order of the reference.
  size_t i = 0;
  for (const Leaf& leaf : b) {
    const auto in_a = std::find_if(a.begin() + static_cast<int64_t>(i), a.end(),
                                   [&](const Leaf& l) { return l.key == leaf.key; });
    if (in_a != a.end())
      for (; a.begin() + static_cast<int64_t>(i) != in_a; ++i) compare(a[i].key);
    if (in_a != a.end()) ++i;
    compare(leaf.key);
  }
  for (; i < a.size(); ++i) compare(a[i].key);
  return out;
}

}  // namespace sluice
