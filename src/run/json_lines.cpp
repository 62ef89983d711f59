#include "run/json_lines.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <optional>

#include "core/line_reader.h"

namespace sluice {

namespace {

/// A longer line is none of ours: it is removed like any other that cannot be read.
constexpr size_t kLongestLine = size_t{16} << 20;

/// The "step" of a whole line; nothing else of it is kept in memory.
std::optional<int64_t> step_of(const std::string& line) {
  const auto only_step = [](int depth, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
    return event != nlohmann::json::parse_event_t::key || (depth == 1 && parsed == "step");
  };
  const nlohmann::json parsed = nlohmann::json::parse(line, only_step, false);
  if (!parsed.is_object() || !parsed.contains("step") || !parsed["step"].is_number_integer())
    return std::nullopt;
  return parsed["step"].get<int64_t>();
}

/// Calls `kept` for each line of a step up to last_step, with its end. Whether the file holds anything else.
template <class F>
bool for_each_kept(const std::string& path, int64_t last_step, const F& kept) {
  bool others = false, part = false;
  LineReader reader(path);
  for (std::string line; reader.next(line, kLongestLine);) {
    const bool whole = !part && !reader.within_line();
    part = reader.within_line();
    const std::optional<int64_t> step = whole ? step_of(line) : std::nullopt;
    if (step && *step <= last_step) {
      if (!line.ends_with('\n')) {  // the write that was cut short wrote all but this
        line += '\n';
        others = true;
      }
      kept(*step, line);
    } else {
      others = true;
    }
  }
  return others;
}

}  // namespace

JsonLines::JsonLines(std::string path, int64_t last_step) : path_(std::move(path)) {
  const bool there = io::exists(path_);
  const auto open = [&] { file_ = std::make_unique<io::OutputFile>(path_, io::OutputFile::Mode::append); };
  open();  // refuses what is not a plain file before it is read
  if (!there) return;
  const bool others = for_each_kept(
      path_, last_step, [&](int64_t step, const std::string&) { last_step_ = std::max(last_step_, step); });
  if (!others) return;
  io::NewFile rest(path_);
  for_each_kept(path_, last_step, [&](int64_t, const std::string& line) { rest.write(line); });
  rest.complete();
  rest.publish();
  open();
}

void JsonLines::append(const nlohmann::ordered_json& line) {
  last_step_ = std::max(last_step_, line.at("step").get<int64_t>());
  try {
    // After a failure the last line may be torn; a newline ends it.
    file_->write((failing_ ? "\n" : "") + line.dump() + "\n");
    failing_ = false;
    warning_.over();
  } catch (const std::exception& error) {  // of files, or of text that JSON cannot hold
    warning_.warn(fmt::format("{}: {}; training goes on, lines are missing", path_, error.what()));
    failing_ = true;
  }
}

}  // namespace sluice
