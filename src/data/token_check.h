#pragma once
// What can be said about token files before the first step: were they made with this tokenizer, do their
// tokens fit the model, are they held out at all.
#include <memory>
#include <string>
#include <vector>

#include "config/config.h"
#include "data/loader.h"
#include "data/tokenizer.h"

namespace sluice {

/// "byte", "sentencepiece english.model": for people; the fingerprint identifies.
std::string tokenizer_name(const TokenizerConfig& config);

/// Compares every file of every source with the tokenizer and the model, by its PREFIX.json where there is
/// one. The largest token is that of PREFIX.json for files above kScannedBytes, and read from the file for
/// all others. Error(data): another tokenizer, a token outside [0, model.vocab_size), a PREFIX.json that does
/// not belong to its file.
void check_tokens(const Blend& blend, const Tokenizer& tokenizer, const Config& config);
constexpr int64_t kScannedBytes = int64_t{1} << 30;

/// All that training checks before it begins: both kinds of data, and, unless data.allow_overlap, that no
/// validation set shares a file with the training data or has a file of the same contents (Error(data)).
void check_data(const Blend& training, const std::vector<std::unique_ptr<Blend>>& validation,
                const Tokenizer& tokenizer, const Config& config);

/// Whether every file of a source has a PREFIX.json.
bool tokenizer_known(const Blend& blend, size_t source);

}  // namespace sluice
