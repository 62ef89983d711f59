#include "data/byte_level.h"

#include <array>

namespace sluice {
namespace {

struct Alphabet {
  std::array<std::string, 256> characters;
  std::array<int16_t, 0x144> byte_of;  // by the number of the character; -1: none
  Alphabet() {
    byte_of.fill(-1);
    unsigned next = 0x100;
    for (unsigned byte = 0; byte < 256; ++byte) {
      const bool itself = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae);
      const unsigned character = itself ? byte : next++;
      byte_of[character] = static_cast<int16_t>(byte);
      if (character < 0x80) {
        characters[byte] = std::string(1, static_cast<char>(character));
      } else {
        characters[byte] = {static_cast<char>(0xc0 | character >> 6),
                            static_cast<char>(0x80 | (character & 0x3f))};
      }
    }
  }
};

const Alphabet& alphabet() {
  static const Alphabet made;
  return made;
}

}  // namespace

const std::string& byte_character(unsigned char byte) { return alphabet().characters[byte]; }

std::string byte_characters(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) text += byte_character(static_cast<unsigned char>(c));
  return text;
}

std::optional<std::string> bytes_of_characters(std::string_view characters) {
  const Alphabet& known = alphabet();
  std::string bytes;
  for (size_t i = 0; i < characters.size(); ++i) {
    unsigned character = static_cast<unsigned char>(characters[i]);
    if (character >= 0x80) {
      if ((character & 0xe0) != 0xc0 || i + 1 == characters.size()) return std::nullopt;
      character = (character & 0x1f) << 6 | (static_cast<unsigned char>(characters[++i]) & 0x3f);
    }
    if (character >= known.byte_of.size() || known.byte_of[character] < 0) return std::nullopt;
    bytes += static_cast<char>(known.byte_of[character]);
  }
  return bytes;
}

}  // namespace sluice
