#pragma once
// The tokenizer's part of a Hugging Face folder.
#include <map>
#include <string>

#include "config/config.h"
#include "data/tokenizer.h"

namespace sluice {

/// In a folder whose tokenizer.json has another template than the one that the model was trained with: the
/// latter, whose fingerprint token files know.
constexpr const char* kOriginalTokenizerFile = "original_tokenizer.json";

/// Files by name. Of the byte tokenizer: a tokenizer.json with the 256 bytes and <|endoftext|>, which
/// transformers loads, and which gives the same ids. Of SentencePiece: its tokenizer.model. Of byte-level
/// BPE: its tokenizer.json. transformers puts in front of a text what training had there, data.begin_token or
/// nothing: a template in tokenizer.json is made or replaced accordingly, and the file as it was then stands
/// beside it. tokenizer_config.json names this token and the one that ends documents, and a class that takes
/// the files as they are; by the model's type alone transformers would take Qwen's for a tokenizer.model.
std::map<std::string, std::string> tokenizer_files(const Tokenizer& tokenizer, const Config& model);

/// Whether these files put data.begin_token in front of a text; they cannot put one that is none of the
/// tokenizer's.
bool puts_begin_token(const Tokenizer& tokenizer, const Config& model);

}  // namespace sluice
