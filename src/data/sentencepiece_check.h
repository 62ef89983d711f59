#pragma once
// SentencePiece models come from anywhere, and the library trusts parts of them: the automaton that
// normalises text is followed without a look at its bounds. Here it is checked first.
#include <string>
#include <string_view>

namespace sluice {

/// How a model treats text before it is cut into pieces.
struct SentencePieceSpec {
  std::string normalizer;  // "nmt_nfkc", "identity"...; what training called it
  bool adds_space = true, removes_extra_whitespace = true;
};

/// Reads what the library does not check, and throws Error(data) with `path` where it would read outside of
/// its memory: message and field structure, empty or repeated pieces, and the normalisation automata (every
/// state that text can lead to, the text that it puts in, and how many rules begin alike).
SentencePieceSpec check_sentencepiece_model(std::string_view model, const std::string& path);

}  // namespace sluice
