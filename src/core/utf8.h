#pragma once
#include <string_view>

namespace sluice {

/// Position of the first byte that is not part of valid UTF-8 (no overlong forms, no surrogates); npos if all
/// bytes are valid.
constexpr size_t find_invalid_utf8(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  for (size_t i = 0; i < text.size();) {
    const unsigned c = byte(i);
    const size_t length = c < 0x80                ? 1
                          : c >= 0xc2 && c < 0xe0 ? 2
                          : c >= 0xe0 && c < 0xf0 ? 3
                          : c >= 0xf0 && c < 0xf5 ? 4
                                                  : 0;
    if (length == 0) return i;
    const unsigned low = c == 0xe0   ? 0xa0
                         : c == 0xf0 ? 0x90
                                     : 0x80,
                   high = c == 0xed   ? 0x9f
                          : c == 0xf4 ? 0x8f
                                      : 0xbf;
    if (length > 1 && (byte(i + 1) < low || byte(i + 1) > high)) return i;
    for (size_t k = 2; k < length; ++k)
      if ((byte(i + k) & 0xc0) != 0x80) return i;
    i += length;
  }
  return std::string_view::npos;
}

}  // namespace sluice
