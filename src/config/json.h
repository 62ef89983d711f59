#pragma once
// Configurations as JSON, for programs in other languages: `sluice config show --json` and `sluice config
// json`.
#include <string>

#include "config/config.h"

namespace sluice {

/// The resolved configuration as one JSON object on one line: every key, in the order of the reference, with
/// paths as to_yaml writes them.
std::string to_json(const Config& config);

/// A YAML file as JSON on one line, whatever it describes, read as strictly as a configuration. Scalars that
/// are not in quotes become null, true, false or numbers where they are written so, and text elsewhere.
/// With `places` each value is an object that keeps what was written and where, counted from 1:
///   {"kind": "scalar", "line": 1, "column": 4, "text": "1e-3", "quoted": false}
///   {"kind": "list", "line": 1, "column": 4, "items": [...]}
///   {"kind": "map", "line": 1, "column": 4, "keys": ["a", ...], "items": [...]}
///   {"kind": "null", "line": 1, "column": 4}
/// Throws Error(usage) that lists every problem by file:line:column, Error(no_input) without the file.
std::string yaml_file_to_json(const std::string& path, bool places);

}  // namespace sluice
