#pragma once
// Text that a tokenizer loses: what its normaliser removes or replaces, and unknown characters.
#include <string>
#include <vector>

#include "data/token_file.h"

namespace sluice {

/// Counts over one or several token files, from their PREFIX.json. Files without one, or with an old one that
/// lacks these counts, add nothing.
struct TextLoss {
  int64_t text_bytes = 0;   // read
  int64_t token_bytes = 0;  // represented by the tokens, as counted by Tokenizer::token_bytes
  int64_t lost_bytes = 0;   // of the text, not represented by the tokens

  void add(const TokenFileInfo& info);
  /// Bytes of text per byte represented by tokens; exactly 1 if these are equally many. More are represented
  /// than were read where a tokenizer puts a space in front of every document.
  double bytes_per_token_byte() const;
  double share() const;
  /// `before` followed by "tokenizer drops 17.0% of the text's bytes"; empty if it drops none.
  std::string describe(const char* before = "") const;
};

/// The sum over the token files with these prefixes.
TextLoss text_loss(const std::vector<std::string>& prefixes);

}  // namespace sluice
