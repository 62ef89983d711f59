#pragma once
#include <string_view>

namespace sluice {

/// Prefix of the fingerprint of a tokenizer's model file; its XXH3-128 in hexadecimal follows.
constexpr std::string_view kModelFingerprint = "xxh3:";

}  // namespace sluice
