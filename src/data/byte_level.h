#pragma once
// The alphabet of byte-level BPE: one printable character for each of the 256 bytes, so that a vocabulary of
// any bytes can be written as text (Radford et al. 2019, GPT-2). Bytes 0x21-0x7E, 0xA1-0xAC and 0xAE-0xFF
// stand for the character of the same number; the other 68, in order, for U+0100 to U+0143.
#include <optional>
#include <string>
#include <string_view>

namespace sluice {

/// UTF-8 of the character that stands for a byte.
const std::string& byte_character(unsigned char byte);

/// The characters that stand for some bytes, in UTF-8.
std::string byte_characters(std::string_view bytes);

/// The bytes that some characters stand for; nothing where one of them is not of the alphabet.
std::optional<std::string> bytes_of_characters(std::string_view characters);

}  // namespace sluice
