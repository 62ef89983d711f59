#include "core/strict_json.h"

#include <algorithm>
#include <set>
#include <vector>

#include "core/error.h"

namespace sluice {

std::string printable(std::string_view text, size_t max_bytes) {
  std::string shown;
  for (const char c : text.substr(0, max_bytes)) {
    const auto byte = static_cast<unsigned char>(c);
    // Also non-ASCII bytes: they may be truncated, invalid, or control a terminal.
    if (byte < 0x20 || byte >= 0x7f) {
      shown += fmt::format("\\x{:02x}", byte);
    } else {
      shown += c;
    }
  }
  if (text.size() > max_bytes) shown += "...";
  return shown;
}

nlohmann::json parse_strict_json(std::string_view text, const std::string& path, int max_depth) {
  using nlohmann::json;
  // The parser treats a NUL byte as the end of input.
  if (text.find('\0') != std::string_view::npos)
    fail(ExitCode::data, "{}: not JSON: it contains a NUL byte", path);
  std::vector<std::set<std::string>> keys;  // of the open objects
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > max_depth) fail(ExitCode::data, "{}: nested deeper than {}", path, max_depth);
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second)
      fail(ExitCode::data, "{}: duplicate key '{}'", path, printable(parsed.get<std::string>()));
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), watch);
  } catch (const json::exception& error) {
    std::string_view what = error.what();  // "[json.exception.parse_error.101] parse error at line 1, ..."
    what.remove_prefix(what.starts_with("[json.exception") ? std::min(what.find("] ") + 2, what.size()) : 0);
    fail(ExitCode::data, "{}: not JSON: {}", path, printable(what, 300));
  }
}

}  // namespace sluice
