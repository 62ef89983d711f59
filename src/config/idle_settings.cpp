#include "config/idle_settings.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <string_view>

#include "config/leaves.h"
#include "config/model_function.h"

namespace sluice {
namespace {

/// Keys, or sections with all of their keys, that have no effect while a condition holds.
struct Idle {
  bool now;
  std::string why;  // "optimizer.type is adamw"
  std::vector<std::string> names;
};

/// Rules that freeze parameters: the last rule that matches a name decides alone, so that nothing else in
/// them is read.
void add_frozen_rules(const std::vector<ParameterRule>& rules, std::vector<Idle>& out) {
  for (size_t i = 0; i < rules.size(); ++i) {
    const std::string rule = fmt::format("optimizer.rules[{}].", i);
    Idle idle{!rules[i].trainable, rule + "trainable is false", {}};
    if (rules[i].lr_multiplier != ParameterRule().lr_multiplier) idle.names.push_back(rule + "lr_multiplier");
    if (rules[i].weight_decay) idle.names.push_back(rule + "weight_decay");
    out.push_back(idle);
  }
}

std::vector<Idle> idle_now(const Config& c) {
  const AttentionConfig& a = c.model.attention;
  const HeadBalanceConfig& balance = a.head_balance;
  const BudgetPolicy policy = a.sparse.k.policy;
  const bool sparse = a.kind == AttentionKind::sparse, has_experts = c.model.moe.num_experts != 0;
  const int64_t steps = training_steps(c);
  const auto is = [](const char* key, auto value) { return fmt::format("{} is {}", key, enum_name(value)); };
  std::vector<Idle> out = {
      {c.model.initializer == Initializer::fan_in,
       is("model.initializer", c.model.initializer),
       {"model.initializer_range"}},
      {!has_experts, "model.moe.num_experts is 0", {"model.moe"}},
      {!has_dense_layer(c.model), "every layer has experts", {"model.intermediate_size"}},
      {has_experts && c.model.moe.load_balance.coefficient == 0,
       "model.moe.load_balance.coefficient is 0",
       {"model.moe.load_balance.scope"}},
      {c.model.rope.scaling.type == RopeScalingType::none,
       "model.rope.scaling.type is none",
       {"model.rope.scaling"}},
      // A factor on queries and keys that are normalised behind it.
      {c.model.qk_norm && c.model.qk_norm_order == QkNormOrder::after_rope &&
           !(sparse && a.sparse.indexer.rope),
       "model.qk_norm_order is after_rope",
       {"model.rope.scaling.attention_factor"}},
      {c.model.match_parameters_of.empty(),
       "model.match_parameters_of is not given",
       {"model.match_multiple"}},
      {a.window >= c.data.seq_len,
       fmt::format("data.seq_len is {}", c.data.seq_len),
       {"model.attention.window", "model.attention.window_pattern"}},
      {balance.coefficient == 0,
       "model.attention.head_balance.coefficient is 0",
       {"model.attention.head_balance.scope", "model.attention.head_balance.shared_heads",
        "model.attention.head_balance.shared_from", "model.attention.head_balance.calibration_samples"}},
      {balance.coefficient != 0 && balance.shared_heads == 0,
       "model.attention.head_balance.shared_heads is 0",
       {"model.attention.head_balance.shared_from", "model.attention.head_balance.calibration_samples"}},
      {balance.coefficient != 0 && balance.shared_heads != 0 && balance.shared_from == SharedHeads::online,
       "model.attention.head_balance.shared_from is online",
       {"model.attention.head_balance.calibration_samples"}},
      {!sparse, is("model.attention.kind", a.kind), {"model.attention.sparse"}},
      {sparse && policy == BudgetPolicy::fixed,
       "model.attention.sparse.k.policy is fixed",
       {"model.attention.sparse.k.min", "model.attention.sparse.k.max",
        "model.attention.sparse.k.temperature", "model.attention.sparse.k.momentum"}},
      {sparse && (policy == BudgetPolicy::eq8 || policy == BudgetPolicy::inverse),
       is("model.attention.sparse.k.policy", policy),
       {"model.attention.sparse.k.temperature"}},
      {sparse && policy == BudgetPolicy::entropy,
       "model.attention.sparse.k.policy is entropy",
       {"model.attention.sparse.k.momentum"}},
      {sparse && a.sparse.loss.coefficient == 0,
       "model.attention.sparse.loss.coefficient is 0",
       {"model.attention.sparse.indexer.detach_input", "model.attention.sparse.loss.temperature"}},
      {c.lora.rank == 0, "lora.rank is 0", {"lora"}},
      {c.train.init_from.empty(), "train.init_from is not given", {"train.init_ignore"}},
      {c.optimizer.type == OptimizerType::adamw, "optimizer.type is adamw", {"optimizer.muon"}},
      {c.optimizer.type == OptimizerType::muon && c.optimizer.muon.momentum_warmup_steps == 0,
       "optimizer.muon.momentum_warmup_steps is 0",
       {"optimizer.muon.initial_momentum"}},
      {c.optimizer.schedule == Schedule::constant, "optimizer.schedule is constant", {"optimizer.min_lr"}},
      {c.optimizer.schedule != Schedule::wsd,
       is("optimizer.schedule", c.optimizer.schedule),
       {"optimizer.decay_steps"}},
      {c.parallel.expert == 1, "parallel.expert is 1", {"parallel.expert_capacity"}},
      {c.parallel.determinism == Determinism::exact,
       "parallel.determinism is exact",
       {"train.matmul_algorithm"}},
      {c.parallel.determinism != Determinism::exact,
       is("parallel.determinism", c.parallel.determinism),
       {"parallel.exact_sum"}},
      {c.data.validation.empty() && c.eval.ruler.samples == 0,
       "data.validation names no set",
       {"eval.every_steps", "eval.max_tokens"}},
      {c.eval.tasks.empty(), "eval.tasks names no file", {"eval.shots", "eval.max_questions"}},
      {c.eval.prompts.empty(), "eval.prompts is empty", {"eval.prompt_tokens"}},
      {c.eval.ruler.samples == 0, "eval.ruler.samples is 0", {"eval.ruler"}},
      {steps > 0 && c.log.trace_step > steps,
       fmt::format("the run ends with step {}", steps),
       {"log.trace_step"}},
  };
  add_frozen_rules(c.optimizer.rules, out);
  return out;
}

/// "a, b and c have".
std::string subject(const std::vector<std::string>& keys) {
  if (keys.size() == 1) return keys[0] + " has";
  const std::vector<std::string> first(keys.begin(), keys.end() - 1);
  return fmt::format("{} and {} have", fmt::join(first, ", "), keys.back());
}

}  // namespace

std::vector<std::string> idle_settings(const Config& config, const KeyPlaces& given,
                                       const std::string& file) {
  const std::vector<Leaf> defaults = leaves(Config{});
  const auto given_here = [&](const std::string& key) {
    const auto place = given.find(key);
    return place != given.end() && (place->second == "command line" || place->second.starts_with(file + ":"));
  };
  std::vector<std::string> set;  // in the order of the reference
  for (const Leaf& leaf : leaves(config)) {
    const auto same = [&](const Leaf& d) { return d.key == leaf.key && d.value == leaf.value; };
    if (given_here(leaf.key) && std::none_of(defaults.begin(), defaults.end(), same)) set.push_back(leaf.key);
  }
  std::vector<std::string> texts;
  for (const Idle& idle : idle_now(config)) {
    if (!idle.now) continue;
    std::vector<std::string> keys;
    for (const std::string& key : set)
      if (std::any_of(idle.names.begin(), idle.names.end(),
                      [&](std::string_view name) { return names_key(name, key); }))
        keys.push_back(key);
    if (!keys.empty())
      texts.push_back(fmt::format("{}: {} no effect while {}", given.at(keys[0]), subject(keys), idle.why));
  }
  return texts;
}

}  // namespace sluice
