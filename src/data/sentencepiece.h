#pragma once
#include "data/tokenizer.h"

namespace sluice {

/// A SentencePiece .model file. end_of_document is its end-of-sentence piece, or a piece called
/// <|endoftext|>; Error(data) when it has neither or is damaged, Error(no_input) when it is absent.
std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(const std::string& path);

}  // namespace sluice
