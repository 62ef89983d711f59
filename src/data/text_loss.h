#pragma once
// Text that a tokenizer cannot give back: what its normaliser takes out or replaces, and characters that it
// does not know.
#include <string>
#include <vector>

#include "data/token_file.h"

namespace sluice {

/// Of one or several token files, by their PREFIX.json; files without one, or with one of before these
/// counts, add nothing.
struct TextLoss {
  int64_t text_bytes = 0;   // read
  int64_t token_bytes = 0;  // that the tokens stand for, as Tokenizer::token_bytes counts
  int64_t lost_bytes = 0;   // of the text's, that are not among those

  void add(const TokenFileInfo& info);
  /// Bytes read for each byte that tokens stand for; exactly 1 where nothing is lost.
  double bytes_per_token_byte() const;
  double share() const;
  /// `before` and "tokenizer drops 17.0% of the text's bytes"; empty where it drops none.
  std::string describe(const char* before = "") const;
};

/// Of the token files with these prefixes.
TextLoss text_loss(const std::vector<std::string>& prefixes);

}  // namespace sluice
