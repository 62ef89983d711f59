#include "data/unicode_form.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <vector>

#include "core/error.h"

namespace sluice {
namespace {

struct Range {
  char32_t first, last;
};
// Characters that NFC leaves as they are and that combine with none before them: most of what text is made
// of.
constexpr std::array<Range, 9> kPlain = {{{0x0000, 0x02ff},
                                          {0x0388, 0x03ff},
                                          {0x0400, 0x0482},
                                          {0x05d0, 0x05ea},
                                          {0x2010, 0x2027},
                                          {0x3000, 0x3029},
                                          {0x3041, 0x3096},
                                          {0x30a1, 0x30fa},
                                          {0x4e00, 0x9fff}}};

bool plain(char32_t c) {
  if (c < 0x300) return true;
  for (const Range& range : kPlain)
    if (c <= range.last) return c >= range.first;
  return (c >= 0xac00 && c <= 0xd7a3) || (c >= 0xff01 && c <= 0xff60) || (c >= 0x1f300 && c <= 0x1faff);
}

// What was assigned after Unicode 9.0, up to 18.0, and moves, combines or has a decomposition. Hugging Face's
// tokenizers (0.23) normalises by the tables of 9.0, in which these are characters that neither move nor
// change; so they are here.
constexpr std::array<Range, 86> kLater = {
    {{0x0558, 0x0558},   {0x058b, 0x058c},   {0x05c8, 0x05c9},   {0x07fd, 0x07fd},   {0x0897, 0x089f},
     {0x08ca, 0x08d3},   {0x09fe, 0x09fe},   {0x0c3c, 0x0c3c},   {0x0d3b, 0x0d3c},   {0x0eba, 0x0eba},
     {0x1715, 0x1715},   {0x1abf, 0x1af0},   {0x1df6, 0x1dfa},   {0x209d, 0x209f},   {0x32ff, 0x32ff},
     {0xa7f1, 0xa7f4},   {0xa82c, 0xa82c},   {0xab69, 0xab69},   {0x105c9, 0x105c9}, {0x105d2, 0x105d2},
     {0x105da, 0x105da}, {0x105e4, 0x105e4}, {0x10781, 0x10785}, {0x10787, 0x107b0}, {0x107b2, 0x107bf},
     {0x10d24, 0x10d27}, {0x10d69, 0x10d6d}, {0x10eab, 0x10eac}, {0x10ecb, 0x10ecf}, {0x10ef0, 0x10efb},
     {0x10efd, 0x10eff}, {0x10f46, 0x10f50}, {0x10f82, 0x10f85}, {0x11070, 0x11070}, {0x1133b, 0x1133b},
     {0x11382, 0x11385}, {0x1138b, 0x1138b}, {0x1138e, 0x1138e}, {0x11390, 0x11391}, {0x113c2, 0x113c2},
     {0x113c5, 0x113c5}, {0x113c7, 0x113c8}, {0x113ce, 0x113d0}, {0x1145e, 0x1145e}, {0x11839, 0x1183a},
     {0x11935, 0x11935}, {0x11938, 0x11938}, {0x1193d, 0x1193e}, {0x11943, 0x11943}, {0x119e0, 0x119e0},
     {0x11a34, 0x11a34}, {0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11d42, 0x11d42}, {0x11d44, 0x11d45},
     {0x11d97, 0x11d97}, {0x11f41, 0x11f42}, {0x1611e, 0x1611e}, {0x16121, 0x16129}, {0x1612f, 0x1612f},
     {0x16d63, 0x16d63}, {0x16d67, 0x16d6a}, {0x16ff0, 0x16ff1}, {0x1b123, 0x1b126}, {0x1ccd6, 0x1ccf9},
     {0x1d127, 0x1d128}, {0x1d250, 0x1d252}, {0x1d25b, 0x1d25c}, {0x1d25f, 0x1d25f}, {0x1d280, 0x1d281},
     {0x1d6a6, 0x1d6a6}, {0x1df95, 0x1df95}, {0x1dfcd, 0x1dfff}, {0x1e030, 0x1e06d}, {0x1e08f, 0x1e08f},
     {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef}, {0x1e4ec, 0x1e4ef}, {0x1e5ee, 0x1e5ef},
     {0x1e6e3, 0x1e6e3}, {0x1e6e6, 0x1e6e6}, {0x1e6ee, 0x1e6ef}, {0x1e6f5, 0x1e6f5}, {0x1f16c, 0x1f16c},
     {0x1fbf0, 0x1fbf9}}};

/// Whether a character neither moves nor changes where utf8proc thinks that it does: those above; and U+11A7,
/// which stands before the final consonants of Hangul and is none, but which utf8proc 2.8 drops behind a
/// syllable.
bool later(char32_t c) {
  if (c == 0x11a7) return true;
  const auto range = std::partition_point(kLater.begin(), kLater.end(), [&](Range r) { return r.last < c; });
  return range != kLater.end() && c >= range->first;
}

int order_of(int32_t c) { return utf8proc_get_property(c)->combining_class; }

/// Decomposition, canonical order (a stable sort of each run of marks), and composition, of text without
/// later characters.
void append_known(std::string& out, std::string_view text, UnicodeForm form) {
  const bool compatible = form == UnicodeForm::nfkc || form == UnicodeForm::nfkd;
  const bool composes = form == UnicodeForm::nfc || form == UnicodeForm::nfkc;
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE |
                                                      (compatible ? UTF8PROC_COMPAT : 0));
  std::vector<int32_t> characters;
  std::array<int32_t, 32> parts{};
  for (size_t at = 0; at < text.size();) {
    const auto c = static_cast<int32_t>(next_character(text, at));
    int boundary = 0;
    const auto count = utf8proc_decompose_char(c, parts.data(), std::ssize(parts), options, &boundary);
    SLUICE_CHECK(count >= 0 && count <= std::ssize(parts), "utf8proc decomposes U+{:04X} into {} parts", c,
                 count);
    characters.insert(characters.end(), parts.begin(), parts.begin() + count);
  }
  for (auto begin = characters.begin(); begin != characters.end();) {
    const auto end = std::find_if(begin + 1, characters.end(), [](int32_t c) { return order_of(c) == 0; });
    std::stable_sort(begin + (order_of(*begin) == 0 ? 1 : 0), end,
                     [](int32_t a, int32_t b) { return order_of(a) < order_of(b); });
    begin = end;
  }
  auto length = std::ssize(characters);
  if (composes && length > 0) {
    length = utf8proc_normalize_utf32(characters.data(), length,
                                      static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    SLUICE_CHECK(length >= 0, "utf8proc does not compose {} characters", characters.size());
  }
  for (int64_t i = 0; i < length; ++i)
    append_utf8(out, static_cast<char32_t>(characters[static_cast<size_t>(i)]));
}

void append_form(std::string& out, std::string_view text, UnicodeForm form) {
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    if (!later(next_character(text, at))) continue;
    append_known(out, text.substr(done, begin - done), form);
    out += text.substr(begin, at - begin);
    done = at;
  }
  append_known(out, text.substr(done), form);
}

}  // namespace

char32_t next_character(std::string_view text, size_t& at) {
  const auto byte = [&](size_t i) { return static_cast<char32_t>(static_cast<unsigned char>(text[i])); };
  const char32_t first = byte(at);
  const size_t length = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  char32_t c = length == 1 ? first : first & (0x7fu >> length);
  for (size_t k = 1; k < length; ++k) c = c << 6 | (byte(at + k) & 0x3f);
  at += length;
  return c;
}

void append_utf8(std::string& text, char32_t c) {
  const auto put = [&](char32_t byte) { text += static_cast<char>(byte); };
  if (c < 0x80) return put(c);
  if (c < 0x800) {
    put(0xc0 | c >> 6);
  } else if (c < 0x10000) {
    put(0xe0 | c >> 12), put(0x80 | (c >> 6 & 0x3f));
  } else {
    put(0xf0 | c >> 18), put(0x80 | (c >> 12 & 0x3f)), put(0x80 | (c >> 6 & 0x3f));
  }
  put(0x80 | (c & 0x3f));
}

bool plainly_nfc(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    if (static_cast<unsigned char>(text[at]) < 0xcc) {  // up to U+02FF
      ++at;
    } else if (!plain(next_character(text, at))) {
      return false;
    }
  }
  return true;
}

std::string to_unicode_form(std::string_view text, UnicodeForm form) {
  std::string out;
  if (form == UnicodeForm::none) return out = text;
  out.reserve(text.size());
  if (form != UnicodeForm::nfc) return append_form(out, text, form), out;
  // Spans from the plain character before one that is not plain to the next plain one; the rest is copied.
  size_t copied = 0, last_plain = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    if (plain(next_character(text, at))) {
      last_plain = begin;
      continue;
    }
    size_t end = at;
    while (end < text.size()) {
      size_t next = end;
      if (plain(next_character(text, next))) break;
      end = next;
    }
    out.append(text, copied, last_plain - copied);
    append_form(out, text.substr(last_plain, end - last_plain), form);
    copied = last_plain = at = end;
  }
  return out.append(text, copied, text.size() - copied);
}

}  // namespace sluice
