#include "data/document_reader.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/line_reader.h"
#include "core/strict_json.h"

namespace sluice {
namespace {

constexpr size_t kPart = size_t{1} << 20, kLongestLine = size_t{64} << 20;

bool begins_with_letter(std::string_view line) {
  return !line.empty() && ((line[0] >= 'a' && line[0] <= 'z') || (line[0] >= 'A' && line[0] <= 'Z'));
}

void read_text(LineReader& reader, const std::function<void(std::string)>& on_text) {
  std::string line, text;
  const auto pass = [&] {
    if (!text.empty()) on_text(std::move(text));
    text.clear();
  };
  for (bool continued = false; reader.next(line, kPart); continued = reader.within_line()) {
    if (!continued && is_document_separator(line)) {
      pass();
      continue;
    }
    // A text without line ends is cut anywhere in the end: memory is bounded.
    const bool long_enough = text.size() >= kPart && !continued && begins_with_letter(line);
    if (long_enough || text.size() >= kLongestLine) pass();
    text += line;
  }
  pass();
}

/// The reason in an error message of nlohmann::json, without its names.
std::string json_problem(std::string_view what) {
  what.remove_prefix(std::min(what.find("] ") + 2, what.size()));
  if (const size_t colon = what.find(": ", what.find("column")); colon != std::string_view::npos)
    what.remove_prefix(colon + 2);
  if (const size_t dash = what.find(" - "); dash != std::string_view::npos) what.remove_prefix(dash + 3);
  return printable(what.substr(0, what.find("; last read")), 200);
}

/// Whether an object has a key twice, of whose values the parser keeps the last. Looked into only where the
/// line shows the key twice, since it takes as long as reading the line; spelled with escapes it goes unseen.
bool has_twice(std::string_view line, const std::string& key) {
  const std::string quoted = fmt::format("\"{}\"", key);
  const size_t first = line.find(quoted);
  if (first == std::string_view::npos || line.find(quoted, first + 1) == std::string_view::npos) return false;
  int64_t count = 0;
  const auto watch = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
    count += depth == 1 && event == nlohmann::json::parse_event_t::key && parsed == key;
    return true;
  };
  [[maybe_unused]] const auto unused = nlohmann::json::parse(line, watch);
  return count > 1;
}

}  // namespace

std::string text_of_json_line(std::string_view line, const std::string& key, const std::string& where,
                              std::string_view hint) {
  nlohmann::json object;
  try {
    object = nlohmann::json::parse(line);
  } catch (const nlohmann::json::parse_error& error) {
    fail(ExitCode::data, "{}: not a JSON object in UTF-8: byte {}: {}{}", where, error.byte,
         json_problem(error.what()), hint);
  } catch (const nlohmann::json::exception& error) {  // a number outside the range of f64
    fail(ExitCode::data, "{}: not JSON that can be held: {}{}", where, json_problem(error.what()), hint);
  }
  if (!object.is_object())
    fail(ExitCode::data, "{}: not a JSON object, but {}{}", where, object.type_name(), hint);
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string())
    fail(ExitCode::data, "{}: has no text under the key \"{}\" (--key selects another){}", where, key, hint);
  if (has_twice(line, key)) fail(ExitCode::data, "{}: has the key \"{}\" twice{}", where, key, hint);
  return std::move(found->get_ref<std::string&>());
}

bool is_jsonl_file(std::string name, const std::string& format) {
  if (name.ends_with(".zst"))
    fail(ExitCode::usage, "{}: zstd is not supported; use zstd -dc {} | and - for standard input", name,
         name);
  if (format != "auto") return format == "jsonl";
  if (name.ends_with(".gz")) name.resize(name.size() - 3);
  return name.ends_with(".jsonl") || name.ends_with(".ndjson") || name.ends_with(".json");
}

bool is_document_separator(std::string_view line) {
  while (line.ends_with('\n') || line.ends_with('\r')) line.remove_suffix(1);
  return line == "<|endoftext|>";
}

void read_documents(const std::string& input, const DocumentFormat& format,
                    const std::function<void(std::string)>& on_text) {
  const bool jsonl = is_jsonl_file(input, format.format);
  LineReader reader(input);
  if (!jsonl) return read_text(reader, on_text);
  for (std::string line; reader.next(line, kLongestLine); line.clear()) {
    const std::string where = fmt::format("{}:{}", reader.path(), reader.line_number());
    if (reader.within_line()) fail(ExitCode::data, "{}: the line has more than 64 MiB", where);
    if (line.find_first_not_of(" \t\r\n") == std::string::npos) continue;
    if (std::string text = text_of_json_line(line, format.key, where); !text.empty())
      on_text(std::move(text));
  }
}

}  // namespace sluice
