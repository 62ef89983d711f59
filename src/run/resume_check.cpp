#include "run/resume_check.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>
#include <regex>

#include "checkpoint/state_reader.h"
#include "config/load.h"
#include "config/yaml.h"
#include "nn/transformer.h"
#include "params/param_store.h"

namespace sluice {
namespace {

std::string list(const std::vector<std::string>& items) {
  return fmt::format("{}", fmt::join(items, "\n  "));
}

/// A checkpoint holds moments of what was trained, and a run goes on with just these.
void compare_frozen(const Config& before, const Config& after, std::vector<std::string>& impossible) {
  ParamStore first(before.lora, before.optimizer.rules), second(after.lora, after.optimizer.rules);
  const Transformer one(before.model, first), other(after.model, second);
  if (first.specs().size() != second.specs().size()) return;  // another model, reported by its keys
  std::vector<std::string> thawed, frozen;
  for (size_t i = 0; i < first.specs().size(); ++i) {
    const bool was = first.specs()[i].trainable, is = second.specs()[i].trainable;
    if (was != is) (is ? thawed : frozen).push_back(second.specs()[i].name);
  }
  const auto add = [&](const std::vector<std::string>& names, const char* what) {
    if (names.empty()) return;
    impossible.push_back(fmt::format("optimizer.rules: {}{} {}", names[0],
                                     names.size() > 1 ? fmt::format(" and {} more", names.size() - 1) : "",
                                     what));
  };
  add(thawed, "frozen so far, trained now: the checkpoint holds no moments of it");
  add(frozen, "trained so far, frozen now: the checkpoint holds moments of it");
}

}  // namespace

void require_known_keys(const std::vector<std::string>& allow_change) {
  if (allow_change.empty()) return;
  std::vector<std::string> known;
  for (const KeyInfo& info : config_keys())
    if (info.type != "section" && info.type != "list") known.push_back(info.key);
  for (const std::string& key : allow_change) {
    const std::string any_element = std::regex_replace(key, std::regex("\\[[0-9]+\\]"), "[]");
    if (std::find(known.begin(), known.end(), any_element) != known.end()) continue;
    const auto same_ending = std::find_if(known.begin(), known.end(),
                                          [&](const std::string& k) { return k.ends_with("." + key); });
    const std::string near = same_ending != known.end() ? *same_ending : yaml::nearest(key, known);
    fail(ExitCode::usage,
         "--allow-change {}: there is no such key with a value; keys are named with their sections, as "
         "optimizer.lr{}",
         yaml::printable(key), near.empty() ? "" : fmt::format("; did you mean {}?", near));
  }
}

std::vector<ConfigChange> check_resume(const CheckpointInfo& checkpoint, const Config& config,
                                       const std::vector<std::string>& allow_change, const Blend& data,
                                       const Tokenizer& tokenizer, bool warns) {
  std::vector<ConfigChange> allowed;
  std::vector<std::string> impossible, consent;
  // The original device may not exist here and does not matter.
  const Config before = load_resolved_config(checkpoint.path + "/config.yaml", {"train.device=auto"});
  for (const ConfigChange& change : config_changes(before, config)) {
    const std::string text = fmt::format("{}: {} -> {}", change.key, change.before, change.after);
    if (change.kind == ChangeClass::identity) impossible.push_back(text);
    if (change.kind != ChangeClass::trajectory) continue;
    if (std::find(allow_change.begin(), allow_change.end(), change.key) == allow_change.end())
      consent.push_back(text);
    else
      allowed.push_back(change);
  }
  if (impossible.empty()) compare_frozen(before, config, impossible);
  const std::string fingerprint = data.fingerprint();
  const StateReader state(checkpoint.state, checkpoint.path + "/state.json");
  const auto differs = [&](const char* key, const std::string& now) {
    return state.has(key) && state.text(key) != now;
  };
  // A changed path is reported above; here the same path contains other tokens.
  const std::string data_before =
      state.has("data_fingerprint") ? state.text("data_fingerprint") : fingerprint;
  if (data_before != fingerprint && data_before != data.sampled_fingerprint())
    impossible.push_back(
        "the training data is not the data that this run was started with (its fingerprint differs)");
  if (differs("tokenizer_fingerprint", tokenizer.fingerprint()))
    impossible.push_back("the tokenizer is not the one this run was started with (its fingerprint differs)");
  if (impossible.empty() && consent.empty()) {
    if (warns && !data.hashed_whole() && state.has("data_modified") &&
        state.integer("data_modified", std::numeric_limits<int64_t>::lowest()) != data.modified())
      spdlog::warn(
          "the training data was copied or modified after {} was saved; beyond {} GiB a change inside the "
          "files is not "
          "always noticed",
          checkpoint.path, Blend::kHashedBytes >> 30);
    return allowed;
  }

  std::string message = fmt::format("cannot resume {} with this configuration", checkpoint.path);
  if (!impossible.empty()) message += "\n impossible:\n  " + list(impossible);
  if (!consent.empty()) message += "\n possible only with --allow-change KEY for each:\n  " + list(consent);
  message += fmt::format("\n otherwise: another run_dir, and train.init_from={} to start from its weights",
                         checkpoint.path);
  fail(ExitCode::usage, "{}", message);
}

}  // namespace sluice
