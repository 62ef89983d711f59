#pragma once
// Checks of token files before the first step: whether they were made with this tokenizer, whether their
// tokens fit the model, and whether validation sets are held out.
#include <memory>
#include <string>
#include <vector>

#include "config/config.h"
#include "data/loader.h"
#include "data/tokenizer.h"

namespace sluice {

/// "byte", "sentencepiece english.model": for messages only; tokenizers are compared by fingerprint.
std::string tokenizer_name(const TokenizerConfig& config);

/// Compares every file of every source with the tokenizer and the model, by its PREFIX.json if it has one.
/// For files above kScannedBytes the largest token is taken from PREFIX.json; other files are scanned.
/// Error(data): another tokenizer, documents that end with another token, a token outside [0,
/// model.vocab_size), or a PREFIX.json that does not belong to its file.
void check_tokens(const Blend& blend, const Tokenizer& tokenizer, const Config& config);
constexpr int64_t kScannedBytes = int64_t{1} << 30;

/// All data checks of training: training and validation files, and, unless data.allow_overlap is set, that no
/// validation set shares a file with the training data or has a file with the same contents (Error(data)).
void check_data(const Blend& training, const std::vector<std::unique_ptr<Blend>>& validation,
                const Tokenizer& tokenizer, const Config& config);

/// Whether every file of a source has a PREFIX.json.
bool tokenizer_known(const Blend& blend, size_t source);

}  // namespace sluice
