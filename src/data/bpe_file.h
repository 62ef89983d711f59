#pragma once
// The parts of a tokenizer.json, checked.
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/added_tokens.h"
#include "data/bpe_merges.h"
#include "data/pretokenizer.h"
#include "data/unicode_form.h"

namespace sluice {

struct BpeFile {
  std::vector<UnicodeForm> normalizers;  // applied in order
  std::vector<AddedToken> added;
  std::optional<Pretokenizer> pretokenizer;
  std::unordered_map<std::string, int32_t> vocabulary;  // as written
  std::vector<BpeMerge> merges;
  BpeUnknown unknown;
  bool ignore_merges = false;
  int64_t vocab_size = 0;  // largest id + 1, of vocabulary and added tokens
};

/// text: the content of the file, `path` its name in errors. Error(data).
BpeFile read_bpe_file(std::string_view text, const std::string& path);

constexpr int32_t kLargestTokenId = 9'999'999;
constexpr size_t kLongestToken = 100'000;     // bytes, of a token of the vocabulary as it is written
constexpr size_t kLongestAddedToken = 1'000;  // bytes

}  // namespace sluice
