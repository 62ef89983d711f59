#include "config/problems.h"

#include <algorithm>
#include <utility>

namespace sluice {
namespace {

std::string text_of(const std::vector<ConfigProblem>& problems, const KeyPlaces& places) {
  std::string text;
  for (const ConfigProblem& problem : problems) {
    if (!text.empty()) text += "\n";
    const auto given = std::find_if(problem.keys.begin(), problem.keys.end(),
                                    [&](const std::string& key) { return places.count(key) > 0; });
    if (given != problem.keys.end()) text += places.at(*given) + ": ";
    text += problem.message;
  }
  return text;
}

}  // namespace

ConfigError::ConfigError(std::vector<ConfigProblem> problems, const KeyPlaces& places)
    : Error(ExitCode::usage, text_of(problems, places)), problems_(std::move(problems)) {}

void refuse(std::vector<std::string> keys, const std::string& message) {
  std::vector<ConfigProblem> problems;
  problems.push_back({std::move(keys), message});
  throw ConfigError(std::move(problems));
}

void with_places(const KeyPlaces& places, const std::function<void()>& f) {
  try {
    f();
  } catch (const ConfigError& error) {
    throw ConfigError(error.problems(), places);
  }
}

}  // namespace sluice
