#pragma once
// The tokenizer's part of a Hugging Face folder.
#include <map>
#include <string>

#include "config/config.h"
#include "data/tokenizer.h"

namespace sluice {

/// Files by name. Of the byte tokenizer: a tokenizer.json with the 256 bytes and <|endoftext|>, which
/// transformers loads, and which gives the same ids. Of SentencePiece: its tokenizer.model. Of byte-level
/// BPE: its tokenizer.json. Each with tokenizer_config.json, where transformers needs one; it names the token
/// that ends documents and, as add_bos_token and bos_token, the one in front of each text (data.begin_token).
std::map<std::string, std::string> tokenizer_files(const Tokenizer& tokenizer, const Config& model);

}  // namespace sluice
