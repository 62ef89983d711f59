#pragma once
// What `sluice --version` prints and run.json keeps: the program's version, where it is from, what it was
// built with and what it computes with.
#include <nlohmann/json.hpp>
#include <string>

namespace sluice {

/// "sluice 0.2.0" and a line for each fact.
std::string program_text();
/// The same facts by name, without the version.
nlohmann::ordered_json program_json();

}  // namespace sluice
