#pragma once
// JSON from untrusted files: parsed strictly, with bounds, and quoted safely in messages.
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace sluice {

/// Parses one JSON document. `path` names it in errors. Throws Error(data) on syntax errors, duplicate keys,
/// NUL bytes and nesting deeper than max_depth.
nlohmann::json parse_strict_json(std::string_view text, const std::string& path, int max_depth = 32);

/// Text from a file made safe for messages: control characters and invalid UTF-8 escaped, cut after
/// max_bytes.
std::string printable(std::string_view text, size_t max_bytes = 120);

}  // namespace sluice
