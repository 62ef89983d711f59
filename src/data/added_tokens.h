#pragma once
// Tokens of a tokenizer.json that are found in the text before it is cut into pieces ("added_tokens").
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace sluice {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;                 // stands for no text
  bool normalized = false;              // looked for behind the normaliser, and normalised itself
  bool single_word = false;             // only where no letter, digit or mark touches it
  bool lstrip = false, rstrip = false;  // takes the white space before it, or behind it
};

/// Finds tokens: at each place the longest, places from left to right, without overlap.
class AddedTokens {
 public:
  void add(const AddedToken& token, std::string_view looked_for);
  bool empty() const { return tokens_.empty(); }

  /// Calls on_text for what lies between tokens, never empty, and on_token, in order. with_special: special
  /// tokens are found; otherwise they are text.
  void split(std::string_view text, bool with_special, const std::function<void(std::string_view)>& on_text,
             const std::function<void(int32_t)>& on_token) const;

 private:
  /// The longest token that begins at a position; -1: none.
  int64_t longest(std::string_view text, size_t at, size_t& length) const;

  std::vector<AddedToken> tokens_;
  std::unordered_map<uint64_t, int32_t> next_;  // trie: node and byte to node
  std::vector<int32_t> token_of_ = {-1};        // node to token
  std::array<bool, 256> first_{};
};

}  // namespace sluice
