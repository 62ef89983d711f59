#pragma once
// The keys that are paths. They are resolved against the file that states them, and compared and written as
// absolute paths.
#include <spdlog/fmt/fmt.h>

#include <filesystem>
#include <string>

#include "config/config.h"

namespace sluice {

/// Calls visit(path, key) for every path in a configuration except run_dir, which is relative to the working
/// folder.
template <class Visit>
void for_each_path(Config& config, Visit visit) {
  visit(config.model.match_parameters_of, std::string("model.match_parameters_of"));
  visit(config.data.tokenizer.path, std::string("data.tokenizer.path"));
  visit(config.train.init_from, std::string("train.init_from"));
  for (size_t i = 0; i < config.data.train.size(); ++i)
    visit(config.data.train[i].path, fmt::format("data.train[{}].path", i));
  for (size_t i = 0; i < config.data.validation.size(); ++i)
    visit(config.data.validation[i].path, fmt::format("data.validation[{}].path", i));
  for (std::string& task : config.eval.tasks)
    visit(task, std::string("eval.tasks"));  // its elements have no place
}

inline void make_paths_absolute(Config& config) {
  for_each_path(config, [](std::string& path, const std::string&) {
    if (!path.empty()) path = std::filesystem::absolute(path).lexically_normal().string();
  });
}

}  // namespace sluice
