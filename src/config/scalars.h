#pragma once
// Strict conversion of text to numbers: what YAML 1.1 would silently read as another value is an error with a
// reason.
#include <cstdint>
#include <string>
#include <string_view>

namespace sluice {

/// Parses a whole number: 4096, 1e9, 20B, 512k, 1.5M, 64Ki (k M B T: powers of 1000; Ki Mi: powers of 1024).
/// Returns "" and sets value, or returns the reason for failure ("must be an integer, got 2.5").
std::string parse_integer(std::string_view text, int64_t& value);
std::string parse_integer(std::string_view text, uint64_t& value);
/// A finite decimal number: 3e-4, 0.1, 1000.
std::string parse_number(std::string_view text, double& value);
/// true or false, nothing else.
std::string parse_boolean(std::string_view text, bool& value);

}  // namespace sluice
