#pragma once
#include <string_view>

namespace sluice {

/// Prefix of the fingerprint of a tokenizer model file, followed by its XXH3-128 in hexadecimal.
constexpr std::string_view kModelFingerprint = "xxh3:";

}  // namespace sluice
