#pragma once
// The tokenizer's part of a Hugging Face folder.
#include <map>
#include <string>

#include "config/config.h"
#include "data/tokenizer.h"

namespace sluice {

/// Files by name. Of the byte tokenizer: a tokenizer.json with the 256 bytes and <|endoftext|>, which
/// transformers loads, and which gives the same ids. Of SentencePiece: its tokenizer.model. Of byte-level
/// BPE: its tokenizer.json. Each with tokenizer_config.json, where transformers needs one.
std::map<std::string, std::string> tokenizer_files(const Tokenizer& tokenizer, TokenizerType type,
                                                   int64_t max_length);

}  // namespace sluice
