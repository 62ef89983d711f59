#include "hf/idle_overrides.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <string_view>

#include "config/load.h"
#include "config/model_function.h"
#include "config/yaml.h"
#include "core/error.h"

namespace sluice {
namespace {

using Keys = std::vector<std::string_view>;

bool any_names(const Keys& names, std::string_view key) {
  return std::any_of(names.begin(), names.end(), [&](std::string_view name) { return names_key(name, key); });
}

/// Keys that are read, with all below them.
Keys keys_read(ModelUse use) {
  Keys keys = {"model",         "data.seq_len",    "data.begin_token", "data.tokenizer.end_of_document",
               "train.threads", "train.precision", "train.device"};
  const auto add = [&](const Keys& more) { keys.insert(keys.end(), more.begin(), more.end()); };
  if (use == ModelUse::losses || use == ModelUse::analysis)
    add({"data.validation", "data.packing", "data.document_mask", "data.document_positions", "analysis"});
  if (use != ModelUse::text) add({"parallel.context"});
  if (use == ModelUse::losses || use == ModelUse::tasks) add({"train.micro_batch_size"});
  if (use == ModelUse::losses) add({"eval.ruler"});
  return keys;
}

/// Of the model, how its weights begin and what it is trained for.
const Keys kOfTraining = {"model.initializer",
                          "model.initializer_range",
                          "model.scaled_residual_init",
                          "model.attention.gates.init",
                          "model.gated_norm.init",
                          "model.attention.head_balance",
                          "model.moe.load_balance",
                          "model.moe.router_z_loss_coefficient",
                          "model.logit_z_loss_coefficient"};

/// What does in a command what these keys do in training.
constexpr std::pair<std::string_view, std::string_view> kInstead[] = {
    {"eval.tasks", "sluice eval --tasks FILE"},
    {"eval.shots", "sluice eval --shots N"},
    {"eval.max_questions", "sluice eval --max-questions N"},
    {"eval.max_tokens", "sluice eval --max-tokens N"},
    {"eval.prompts", "sluice generate --prompt TEXT"},
    {"eval.prompt_tokens", "sluice generate --tokens N"},
    {"data.tokenizer", "--tokenizer byte|PATH"},
    {"data.train", "--data NAME=PREFIX"},
    {"train.seed", "sluice generate --seed N"},
};

/// A key with a value, or a section or list of them, with any index.
void refuse_unknown(const std::string& text, const std::string& key) {
  if (text.find('=') == std::string::npos || key.empty())
    fail(ExitCode::usage, "{}: is not key=value, as data.seq_len=1024 is", yaml::printable(text));
  const std::string any_element = without_indices(key);
  std::vector<std::string> known;
  for (const KeyInfo& info : config_keys()) known.push_back(info.key);
  if (std::any_of(known.begin(), known.end(),
                  [&](const std::string& one) { return names_key(any_element, one); }))
    return;
  const std::string near = yaml::nearest(key, known);
  fail(ExitCode::usage, "{}: unknown key {}{}", yaml::printable(text), yaml::printable(key),
       near.empty() ? "; sluice config reference lists all" : fmt::format("; did you mean {}?", near));
}

}  // namespace

void refuse_idle_overrides(const std::vector<std::string>& overrides, ModelUse use) {
  const auto key_of = [](const std::string& text) {
    const std::string key = text.substr(0, text.find('='));
    return key.substr(0, key.find_last_not_of(' ') + 1);
  };
  const auto given = [&](std::string_view name) {
    return std::any_of(overrides.begin(), overrides.end(),
                       [&](const std::string& text) { return names_key(name, key_of(text)); });
  };
  Keys allowed = keys_read(use);
  // Keys that must agree with others which are read.
  if (given("train.micro_batch_size")) allowed.push_back("train.global_batch_size");
  if (given("data.seq_len")) allowed.push_back("eval.ruler");
  for (const std::string& text : overrides) {
    const std::string key = key_of(text);
    refuse_unknown(text, key);
    if (any_names(allowed, key) && !any_names(kOfTraining, key)) continue;
    std::string instead;
    for (const auto& [name, option] : kInstead)
      if (names_key(name, key)) instead = fmt::format("; use {}", option);
    fail(ExitCode::usage, "{}: has no effect on a trained model here{}; keys that have one: {}", text,
         instead, fmt::join(keys_read(use), ", "));
  }
}

}  // namespace sluice
