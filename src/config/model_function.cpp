#include "config/model_function.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "config/fields.h"
#include "config/load.h"
#include "config/yaml.h"

namespace sluice {
namespace {

/// Model keys that do not change the function of given weights. Every key not listed here does.
constexpr std::string_view kSameFunction[] = {
    // initialisation
    "model.initializer", "model.initializer_range", "model.scaled_residual_init",
    "model.attention.gates.init", "model.gated_norm.init",
    "model.match_parameters_of",  // it sets a width, which is compared itself
    "model.match_multiple",
    // training losses
    "model.attention.head_balance", "model.moe.load_balance", "model.moe.router_z_loss_coefficient",
    "model.logit_z_loss_coefficient", "model.attention.sparse.loss.coefficient",
    "model.attention.sparse.indexer.detach_input", "model.attention.sparse.phase_steps",
    // how the function is computed
    "model.attention.kernel",
    "model.max_position_embeddings",  // number of rows in the rotary table
};

int64_t layers_looked_at(const ModelConfig& m) {
  return std::clamp<int64_t>(m.num_hidden_layers, 0, 1 << 16);
}

/// Copies from `b` to `a` the keys that have no effect in one of the two models. The key that disables them
/// already shows the difference.
void align_idle_keys(ModelConfig& a, const ModelConfig& b) {
  RopeScalingConfig& scaling = a.rope.scaling;
  const auto none = RopeScalingType::none;
  if (scaling.type == none || b.rope.scaling.type == none) {
    const RopeScalingType type = std::exchange(scaling, b.rope.scaling).type;
    scaling.type = type;
  }
  if (!a.qk_norm || !b.qk_norm) a.qk_norm_order = b.qk_norm_order;
  SwitchHeadsConfig& heads = a.attention.switch_heads;
  if (heads.num_experts == 0 || b.attention.switch_heads.num_experts == 0) {
    const int64_t experts = std::exchange(heads, b.attention.switch_heads).num_experts;
    heads.num_experts = experts;
  }
  const auto sparse = AttentionKind::sparse;
  if (a.attention.kind != sparse || b.attention.kind != sparse) a.attention.sparse = b.attention.sparse;
  if (!has_dense_layer(a) || !has_dense_layer(b)) a.intermediate_size = b.intermediate_size;
  if (a.moe.num_experts == 0 || b.moe.num_experts == 0) {
    const int64_t experts = std::exchange(a.moe, b.moe).num_experts;
    a.moe.num_experts = experts;
    return;
  }
  if (a.moe.shared_expert_intermediate_size == 0 || b.moe.shared_expert_intermediate_size == 0)
    a.moe.shared_expert_gate = b.moe.shared_expert_gate;
  // Several settings can select the same MoE layers.
  for (int64_t i = 0; i < layers_looked_at(a); ++i)
    if (a.num_hidden_layers != b.num_hidden_layers || a.moe.in_layer(i) != b.moe.in_layer(i)) return;
  a.moe.decoder_sparse_step = b.moe.decoder_sparse_step;
  a.moe.mlp_only_layers = b.moe.mlp_only_layers;
}

struct Leaf {
  std::string key, text;
  std::string compared;  // a number rounded to single precision
};

std::string compared_text(double value) {
  const auto narrow = static_cast<double>(static_cast<float>(value));
  return scalar_text(std::isfinite(narrow) && narrow != 0 ? narrow : value);
}
std::string compared_text(const std::optional<double>& value) {
  return value ? compared_text(*value) : "null";
}
std::string compared_text(const auto& value) { return scalar_text(value); }

std::vector<Leaf> leaves_of(ModelConfig model) {
  std::vector<Leaf> leaves;
  LeafWalker walker(
      [&](const std::string& key, auto& member, const char*) {
        leaves.push_back({key, scalar_text(member), compared_text(member)});
      },
      "model");
  model.fields(walker);
  return leaves;
}

/// "[{position: sdpa_output, granularity: headwise, ...}]".
std::string gates_text(std::vector<GateConfig> gates) {
  std::string text;
  for (GateConfig& gate : gates) {
    std::string keys;
    for_each_leaf(gate, [&](const std::string& key, auto& member, const char*) {
      keys += fmt::format("{}{}: {}", keys.empty() ? "" : ", ", key, scalar_text(member));
    });
    text += fmt::format("{}{{{}}}", text.empty() ? "" : ", ", keys);
  }
  return "[" + text + "]";
}

}  // namespace

std::string without_indices(std::string_view key) {
  std::string out;
  bool inside = false;
  for (const char c : key) {
    inside = c == '[' || (inside && c != ']');
    if (!inside && c != ']') out += c;
  }
  return out;
}

bool names_key(std::string_view name, std::string_view key) {
  const auto covers = [](std::string_view section, std::string_view inner) {
    if (inner.substr(0, section.size()) != section) return false;
    return inner.size() == section.size() || inner[section.size()] == '.' || inner[section.size()] == '[';
  };
  if (name.empty()) return false;
  // A name with an index covers that element only.
  const bool indexed =
      name.find_first_of("0123456789") != std::string_view::npos && name.find('[') != std::string_view::npos;
  return covers(name, key) || (!indexed && covers(without_indices(name), without_indices(key)));
}

bool changes_function(std::string_view key) {
  return std::none_of(std::begin(kSameFunction), std::end(kSameFunction),
                      [&](std::string_view same) { return names_key(same, key); });
}

bool has_dense_layer(const ModelConfig& m) {
  for (int64_t i = 0; i < layers_looked_at(m); ++i)
    if (!m.moe.in_layer(i)) return true;
  return false;
}

ModelConfig model_after(ModelConfig model, int64_t steps) {
  SparseConfig& sparse = model.attention.sparse;
  if (sparse.dense_after(steps)) sparse.phase = SparsePhase::dense_warm_up;
  return model;
}

std::vector<FunctionDifference> function_differences(const ModelConfig& source, const ModelConfig& here) {
  ModelConfig first = source, second = here;
  align_idle_keys(first, second);
  std::vector<FunctionDifference> differences;
  if (first.attention.gates.size() != second.attention.gates.size()) {
    differences.push_back(
        {"model.attention.gates", gates_text(first.attention.gates), gates_text(second.attention.gates)});
    first.attention.gates.clear();
    second.attention.gates.clear();
  }
  const std::vector<Leaf> a = leaves_of(first), b = leaves_of(second);
  for (size_t i = 0; i < a.size(); ++i)
    if (changes_function(a[i].key) && a[i].compared != b[i].compared)
      differences.push_back({a[i].key, a[i].text, b[i].text});
  return differences;
}

std::string init_ignore_problem(const std::string& name) {
  if (name == kIgnoreTokenizer || name == "model") return "";
  std::vector<std::string> known = {kIgnoreTokenizer};
  std::string ending;  // a model key with this ending
  for (const KeyInfo& info : config_keys()) {
    if (!names_key("model", info.key)) continue;
    // [3] stands for any element.
    if (names_key(name, info.key) || names_key(without_indices(name), info.key)) return "";
    known.push_back(without_indices(info.key));
    if (ending.empty() && info.key.ends_with("." + name)) ending = without_indices(info.key);
  }
  const std::string near = ending.empty() ? yaml::nearest(name, known) : ending;
  return fmt::format("train.init_ignore: {} is neither a model key nor {}{}", yaml::printable(name),
                     kIgnoreTokenizer, near.empty() ? "" : "; did you mean " + near + "?");
}

}  // namespace sluice
