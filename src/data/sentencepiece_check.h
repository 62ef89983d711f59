#pragma once
// SentencePiece models may be untrusted, but the library does not check all of them: it follows the automaton
// that normalises text without bounds checks. The automaton is checked here first.
#include <string>
#include <string_view>

namespace sluice {

/// How a model normalises text before segmentation.
struct SentencePieceSpec {
  std::string normalizer;  // name given when the model was trained: "nmt_nfkc", "identity", ...
  bool adds_space = true, removes_extra_whitespace = true;
};

/// Checks what the library does not, and throws Error(data) with `path` wherever it would read out of bounds:
/// message and field structure, empty or repeated pieces, and the normalisation automata (every reachable
/// state, the text it inserts, and the number of rules with a common prefix).
SentencePieceSpec check_sentencepiece_model(std::string_view model, const std::string& path);

}  // namespace sluice
