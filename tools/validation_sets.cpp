#include "validation_sets.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "core/error.h"
#include "eval/portable.h"

namespace sluice {

void add_set_options(Command& command, std::vector<std::string>& names, std::vector<std::string>& data) {
  command.add_option("--set", names, "use only this validation set; repeatable")
      ->type_name("NAME")
      ->allow_extra_args(false);
  command.add_option("--data", data, "token files to use instead of the configuration's; repeatable")
      ->type_name("NAME=PREFIX")
      ->allow_extra_args(false);
}

void add_model_argument(Command& command, std::string& path) {
  command
      .add_option("model", path,
                  "run folder (its newest valid checkpoint), checkpoint, or Hugging Face folder")
      ->required()
      ->type_name("RUN|CKPT|FOLDER");
}

void add_tokenizer_option(Command& command, std::string& tokenizer) {
  command
      .add_option("--tokenizer", tokenizer,
                  "byte, or the SentencePiece .model file or tokenizer.json that the model was trained with; "
                  "default: the checkpoint's own copy")
      ->type_name("byte|PATH");
}

std::vector<DataSource> chosen_sets(const std::vector<std::string>& data,
                                    const std::vector<std::string>& names, const Config& config) {
  std::vector<DataSource> sets;
  for (const std::string& text : data) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0)
      fail(ExitCode::usage, "--data {}: must be NAME=PREFIX of token files", text);
    const std::string name = text.substr(0, equals);
    for (const DataSource& set : sets)
      if (set.name == name)
        fail(ExitCode::usage, "--data {} and --data {}={}: two sets named {}; give them different names",
             text, name, set.path, name);
    sets.push_back({name, text.substr(equals + 1), 1.0});
  }
  if (sets.empty()) sets = config.data.validation;
  std::vector<std::string> known;
  for (const DataSource& set : sets) known.push_back(set.name);
  for (const std::string& name : names)
    if (std::find(known.begin(), known.end(), name) == known.end())
      fail(ExitCode::usage, "--set {}: no such validation set; there {}: {}", name,
           known.size() == 1 ? "is" : "are",
           known.empty() ? "none" : fmt::format("{}", fmt::join(known, ", ")));
  if (!names.empty())
    std::erase_if(sets, [&](const DataSource& set) {
      return std::find(names.begin(), names.end(), set.name) == names.end();
    });
  if (sets.empty())
    fail(ExitCode::usage, "the configuration names no validation set; give one with --data NAME=PREFIX");
  if (data.empty()) require_validation_data(sets);
  return sets;
}

}  // namespace sluice
