#pragma once
// Reading a configuration: defaults < extends chain < file < key=value overrides. Reading is strict and
// reports every problem at once.
#include <map>
#include <string>
#include <vector>

#include "config/config.h"

namespace sluice {

/// For each key that is given ("model.attention.gates[0].position"), its place: "file:line:column" or
/// "command line". A key that is absent has its default.
using KeyPlaces = std::map<std::string, std::string>;

/// What a configuration is loaded for, which decides what is checked beyond what no command could use.
struct LoadPurpose {
  int64_t ranks = 0;      // share the training: what they cannot share is a problem; 0: not known yet
  bool training = false;  // also what validate_for_training asks for
};

/// Loads `path`, follows `extends`, applies `overrides` ("optimizer.lr=3e-4"), checks types and combinations,
/// resolves relative paths (data, tokenizer, init_from, match_parameters_of) against the file that states
/// them, fills name and run_dir. Throws Error(usage) whose message lists every problem with file:line:column,
/// the known names and a suggestion. Does not touch data files. `places`, where given, is filled.
Config load_config(const std::string& path, const std::vector<std::string>& overrides = {},
                   KeyPlaces* places = nullptr, const LoadPurpose& purpose = {});

/// Loads the resolved configuration that a run or a checkpoint keeps. It may come from another machine and
/// states every key itself, so `extends`, which could make it read and quote other files, is refused.
Config load_resolved_config(const std::string& path, const std::vector<std::string>& overrides = {});

/// The same of a text. name: what messages call it; paths in it are relative to the working folder.
Config load_resolved_text(const std::string& text, const std::string& name,
                          const std::vector<std::string>& overrides = {});

/// Checks what training needs beyond a valid model: data.train, either max_steps or max_tokens, and a
/// schedule that fits into the run. Throws Error(usage) that lists every problem.
void validate_for_training(const Config& config);

/// Optimizer steps of the run: max_steps, or max_tokens rounded up to whole steps; 0 when neither is given.
int64_t training_steps(const Config& config);

/// The resolved configuration as YAML, every key; load_config reads it back to an equal Config (from
/// anywhere: paths of data, tokenizer and models are written absolute; in memory those below the working
/// folder are relative to it).
std::string to_yaml(const Config& config);

/// to_yaml of the defaults with every key's help as a comment: configs/reference.yaml.
std::string reference_yaml();

/// One key of the schema, as `sluice config explain` prints it.
struct KeyInfo {
  std::string key;    // "model.rope.theta"; elements of lists as "model.attention.gates[].position"
  std::string type;   // "integer", "number", "pre | sandwich", "list", "section"
  std::string value;  // the default; empty for sections
  std::string help;
};
/// Every key, in the order of the reference.
std::vector<KeyInfo> config_keys();

/// Hash (XXH3-128, hex) of the keys that determine the result and differ from their defaults: all but name,
/// run_dir, log, checkpoint, eval, threads. A key that a later version adds does not change it.
std::string config_hash(const Config& config);

/// How a key may change between a checkpoint and the run that resumes it (configs/README.md).
enum class ChangeClass { identity, trajectory, operational };
struct ConfigChange {
  std::string key, before, after;
  ChangeClass kind;
};
/// Every key whose value differs, in the order of the reference.
std::vector<ConfigChange> config_changes(const Config& before, const Config& after);

}  // namespace sluice
