#pragma once
// Byte-level BPE from a tokenizer.json of Hugging Face's `tokenizers`, with the same tokens as that library.
#include "data/tokenizer.h"

namespace sluice {

/// path: a tokenizer.json whose model is BPE and whose pre-tokenizer ends with ByteLevel. end_of_document:
/// its token; empty: <|endoftext|>, <|end_of_text|>, </s> or <eos>, the first that the file has.
/// Error(no_input) where the file is absent; Error(data) that names the key of whatever is damaged or not
/// supported.
std::unique_ptr<Tokenizer> make_bpe_tokenizer(const std::string& path,
                                              const std::string& end_of_document = "");

/// The end_of_document with which the tokenizer of a file ends documents with this token: empty where it does
/// so by itself, and where the token is none of the file's added ones. Errors as above.
std::string bpe_end_of_document(const std::string& path, int64_t token);

}  // namespace sluice
