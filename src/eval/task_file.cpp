#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/line_reader.h"
#include "core/strict_json.h"
#include "eval/tasks.h"

namespace sluice {
namespace {

using nlohmann::json;

constexpr size_t kLongestLine = size_t{16} << 20, kMostChoices = 1000;

class LineParser {
 public:
  LineParser(const std::string& line, std::string where)
      : where_(std::move(where)), object_(parse_strict_json(line, where_)) {
    if (!object_.is_object()) fail(ExitCode::data, "{}: must be a JSON object", where_);
  }

  TaskQuestion question() const {
    TaskQuestion out;
    if (object_.contains("contexts")) {
      const std::string continuation = text("continuation");
      for (const std::string& context : list("contexts")) out.choices.push_back({context, continuation});
    } else {
      const std::string context = text("context");
      for (const std::string& choice : list("choices")) out.choices.push_back({context, choice});
    }
    for (const TaskChoice& choice : out.choices)
      if (choice.continuation.empty()) fail(ExitCode::data, "{}: a continuation is empty", where_);
    const auto answer = object_.find("answer");
    if (answer == object_.end() || !answer->is_number_unsigned() ||
        answer->get<uint64_t>() >= out.choices.size())
      fail(ExitCode::data, "{}: \"answer\" must be the number of a choice, from 0 to {}", where_,
           out.choices.size() - 1);
    out.answer = answer->get<size_t>();
    return out;
  }

 private:
  std::string text(const char* key) const {
    const auto found = object_.find(key);
    if (found == object_.end() || !found->is_string())
      fail(ExitCode::data, "{}: \"{}\" must be a text", where_, key);
    return found->get<std::string>();
  }
  std::vector<std::string> list(const char* key) const {
    const auto found = object_.find(key);
    const bool fits = found != object_.end() && found->is_array() && found->size() >= 2 &&
                      found->size() <= kMostChoices &&
                      std::all_of(found->begin(), found->end(), [](const json& x) { return x.is_string(); });
    if (!fits) fail(ExitCode::data, "{}: \"{}\" must be a list of 2 to {} texts", where_, key, kMostChoices);
    return found->get<std::vector<std::string>>();
  }

  std::string where_;
  json object_;
};

}  // namespace

Task read_task(const std::string& path) {
  Task task;
  task.name = std::filesystem::path(path).stem().string();
  if (task.name.ends_with(".jsonl")) task.name.resize(task.name.size() - 6);  // of .jsonl.gz
  LineReader reader(path);
  for (std::string line; reader.next(line, kLongestLine); line.clear()) {
    const std::string where = fmt::format("{}:{}", reader.path(), reader.line_number());
    if (reader.within_line()) fail(ExitCode::data, "{}: the line has more than 16 MiB", where);
    if (line.find_first_not_of(" \t\r\n") == std::string::npos) continue;
    task.questions.push_back(LineParser(line, where).question());
  }
  if (task.questions.empty()) fail(ExitCode::data, "{}: contains no question", path);
  return task;
}

std::vector<Task> read_tasks(const std::vector<std::string>& paths) {
  std::vector<Task> tasks;
  for (const std::string& path : paths) {
    tasks.push_back(read_task(path));
    for (size_t i = 0; i + 1 < tasks.size(); ++i)
      if (tasks[i].name == tasks.back().name)
        fail(ExitCode::usage,
             "{} and {}: two tasks named {}; results are kept by name: rename one of the files", paths[i],
             path, tasks[i].name);
  }
  return tasks;
}

}  // namespace sluice
