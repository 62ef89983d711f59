#pragma once
// Unicode normalisation forms (Unicode Standard Annex 15), through utf8proc's tables.
#include <string>
#include <string_view>

namespace sluice {

enum class UnicodeForm { none, nfc, nfd, nfkc, nfkd };

/// Valid UTF-8 in a normalisation form. Linear in the length but for the sorting of combining marks, which is
/// n log n. Text that is in its form already, as far as a quick look shows, is not taken apart.
std::string to_unicode_form(std::string_view text, UnicodeForm form);

/// Whether a quick look shows that a text is in NFC: every character is one that never changes and never
/// combines with what stands before it.
bool plainly_nfc(std::string_view text);

/// The character at a position of valid UTF-8; moves the position behind it.
char32_t next_character(std::string_view text, size_t& at);
void append_utf8(std::string& text, char32_t character);

}  // namespace sluice
