#include "data/added_tokens.h"

#include <utf8proc.h>

#include <algorithm>

#include "data/unicode_form.h"

namespace sluice {
namespace {

/// Letters, marks, decimal digits, connecting punctuation, joiners: \w of Unicode Technical Standard 18.
bool is_word(char32_t c) {
  constexpr std::array kCategories = {UTF8PROC_CATEGORY_LU, UTF8PROC_CATEGORY_LL, UTF8PROC_CATEGORY_LT,
                                      UTF8PROC_CATEGORY_LM, UTF8PROC_CATEGORY_LO, UTF8PROC_CATEGORY_MN,
                                      UTF8PROC_CATEGORY_MC, UTF8PROC_CATEGORY_ME, UTF8PROC_CATEGORY_ND,
                                      UTF8PROC_CATEGORY_NL, UTF8PROC_CATEGORY_PC};
  const utf8proc_category_t category = utf8proc_category(static_cast<int32_t>(c));
  return std::find(kCategories.begin(), kCategories.end(), category) != kCategories.end() || c == 0x200c ||
         c == 0x200d || (c >= 0x24b6 && c <= 0x24e9) || (c >= 0x1f130 && c <= 0x1f149) ||
         (c >= 0x1f150 && c <= 0x1f169) || (c >= 0x1f170 && c <= 0x1f189);
}

bool is_space(char32_t c) {
  return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

size_t character_before(std::string_view text, size_t at) {
  do --at;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80);
  return at;
}

char32_t at_of(std::string_view text, size_t at) { return next_character(text, at); }

}  // namespace

void AddedTokens::add(const AddedToken& token, std::string_view looked_for) {
  if (looked_for.empty()) return;
  int32_t node = 0;
  for (const char c : looked_for) {
    const uint64_t key = static_cast<uint64_t>(node) << 8 | static_cast<unsigned char>(c);
    const auto [found, added] = next_.emplace(key, static_cast<int32_t>(token_of_.size()));
    if (added) token_of_.push_back(-1);
    node = found->second;
  }
  first_[static_cast<unsigned char>(looked_for[0])] = true;
  token_of_[static_cast<size_t>(node)] = static_cast<int32_t>(tokens_.size());
  tokens_.push_back(token);
}

int64_t AddedTokens::longest(std::string_view text, size_t at, size_t& length) const {
  int64_t best = -1;
  uint64_t node = 0;
  for (size_t i = at; i < text.size(); ++i) {
    const auto found = next_.find(node << 8 | static_cast<unsigned char>(text[i]));
    if (found == next_.end()) break;
    node = static_cast<uint64_t>(found->second);
    if (token_of_[node] < 0) continue;
    best = token_of_[node];
    length = i + 1 - at;
  }
  return best;
}

void AddedTokens::split(std::string_view text, bool with_special,
                        const std::function<void(std::string_view)>& on_text,
                        const std::function<void(int32_t)>& on_token) const {
  size_t done = 0;
  for (size_t at = 0; at < text.size() && !tokens_.empty();) {
    size_t length = 0;
    const int64_t found = first_[static_cast<unsigned char>(text[at])] ? longest(text, at, length) : -1;
    if (found < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(found)];
    size_t begin = at, end = at + length;
    at = end;
    if (token.special && !with_special) continue;
    if (token.single_word && ((begin > 0 && is_word(at_of(text, character_before(text, begin)))) ||
                              (end < text.size() && is_word(at_of(text, end)))))
      continue;
    if (token.lstrip) {
      while (begin > 0 && is_space(at_of(text, character_before(text, begin))))
        begin = character_before(text, begin);
      begin = std::max(begin, done);
    }
    for (size_t next = end; token.rstrip && end < text.size(); end = next)
      if (!is_space(next_character(text, next))) break;
    if (done < begin) on_text(text.substr(done, begin - done));
    on_token(token.id);
    done = end;
  }
  if (done < text.size()) on_text(text.substr(done));
}

}  // namespace sluice
