// sluice config: explains keys, resolves and checks files, and compares two of them.
#include <spdlog/fmt/fmt.h>

#include <cstdio>
#include <memory>

#include "commands.h"
#include "config/json.h"
#include "config/load.h"
#include "core/error.h"

namespace sluice {
namespace {

void explain(const std::string& prefix) {
  bool found = false;
  for (const KeyInfo& k : config_keys()) {
    const bool below = k.key.compare(0, prefix.size(), prefix) == 0 &&
                       (prefix.empty() || k.key.size() == prefix.size() || k.key[prefix.size()] == '.' ||
                        k.key[prefix.size()] == '[' || prefix.back() == '.');
    if (!below || k.type == "section") continue;
    found = true;
    fmt::print("{} = {}    ({})\n", k.key, k.value, k.type);
    if (!k.help.empty()) fmt::print("    {}\n", k.help);
  }
  if (found) return;
  // Suggest keys that contain the given text anywhere.
  std::string near;
  for (const KeyInfo& k : config_keys())
    if (k.key.find(prefix) != std::string::npos && k.type != "section") near += "\n  " + k.key;
  fail(ExitCode::usage, "there is no key {}{}", prefix,
       near.empty() ? "; see sluice config reference" : "; similar keys:" + near);
}

void diff(const Config& a, const Config& b) {
  constexpr const char* kClass[] = {"identity", "trajectory", "operational"};
  for (const ConfigChange& c : config_changes(a, b))
    fmt::print("{:<12} {}: {} -> {}\n", kClass[static_cast<int>(c.kind)], c.key, c.before, c.after);
}

}  // namespace

void add_config_command(Command& app, int& exit_code) {
  struct Options {
    std::string file, other, prefix;
    std::vector<std::string> files, overrides;
    bool json = false, places = false;
  };
  const auto options = std::make_shared<Options>();
  Command* config = app.add_subcommand("config", "Explain, show, check and compare configurations");
  config->require_subcommand(1);
  config->footer(
      "Examples:\n  sluice config show configs/quickstart/gated.yaml optimizer.lr=1e-3\n"
      "  sluice config explain model.attention");

  config->add_subcommand("reference", "Every key with its default and meaning")->callback([] {
    fmt::print("{}", reference_yaml());
  });

  Command* show = config->add_subcommand("show", "The resolved configuration, every key");
  show->add_option("FILE", options->file, "configuration")->required();
  show->add_option("key=value", options->overrides, "overrides");
  show->add_flag("--json", options->json, "as one JSON object");
  show->callback([options] {
    const Config resolved = load_config(options->file, options->overrides);
    if (options->json) {
      fmt::print("{}\n", to_json(resolved));
    } else {
      fmt::print("# hash {}\n{}", config_hash(resolved), to_yaml(resolved));
    }
  });

  Command* check = config->add_subcommand("check", "Check files and report every problem");
  check->add_option("FILE", options->files, "configurations")->required();
  check->callback([options, &exit_code] {
    for (const std::string& file : options->files) {
      try {
        load_config(file);
        fmt::print("{}: ok\n", file);
      } catch (const Error& error) {
        std::fflush(stdout);
        fmt::print(stderr, "{}\n", error.what());
        exit_code = static_cast<int>(error.code());
      }
    }
  });

  Command* json = config->add_subcommand(
      "json", "Each YAML file as a line of JSON, whatever it describes; null for one that cannot be read");
  json->add_option("FILE", options->files, "YAML, read as strictly as a configuration")->required();
  json->add_flag("--places", options->places, "each value with its line, its column and its text as written");
  json->callback([options, &exit_code] {
    for (const std::string& file : options->files) {
      try {
        fmt::print("{}\n", yaml_file_to_json(file, options->places));
      } catch (const Error& error) {
        fmt::print("null\n");
        fmt::print(stderr, "{}\n", error.what());
        exit_code = static_cast<int>(error.code());
      }
    }
  });

  Command* explain_command =
      config->add_subcommand("explain", "The meaning of the keys that start with PREFIX");
  explain_command->add_option("PREFIX", options->prefix, "a key or the beginning of one");
  explain_command->callback([options] { explain(options->prefix); });

  Command* diff_command = config->add_subcommand(
      "diff", "Keys whose values differ, and whether a run can resume with the change");
  diff_command->add_option("A", options->file, "configuration")->required();
  diff_command->add_option("B", options->other, "configuration")->required();
  diff_command->callback([options] { diff(load_config(options->file), load_config(options->other)); });
}

}  // namespace sluice
