#pragma once
// Pre-tokenizers of byte-level BPE: how text is cut into pieces, within which alone tokens are merged.
#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "data/pattern.h"

namespace sluice {

/// Patterns of well-known tokenizers, for files that are made here.
std::string_view known_pattern(std::string_view name);  // gpt2, llama3, qwen2, o200k; empty: unknown
std::vector<std::string> known_pattern_names();

class Pretokenizer {
 public:
  using OnPiece = std::function<void(std::string_view)>;

  /// The value of "pre_tokenizer" in a tokenizer.json: ByteLevel; Split, Digits and ByteLevel in a Sequence
  /// that ends with ByteLevel. `where` names the file. Error(data) for anything else, by name.
  Pretokenizer(const nlohmann::json& description, const std::string& where);

  /// Cuts valid UTF-8. Pieces are valid until on_piece returns; none is empty. The pieces are bytes of the
  /// text, not yet characters of the alphabet of bytes. Returns the number of spaces that were put in front
  /// of pieces.
  int64_t cut(std::string_view text, Pattern::Memory& memory, const OnPiece& on_piece) const;

  bool adds_space() const;
  /// Whether there is text that becomes part of no piece.
  bool drops_text() const;

 private:
  enum class Behavior { isolated, removed, merged_with_previous, merged_with_next, contiguous };
  struct Step {
    std::vector<Pattern> pattern;  // one or none
    Behavior behavior = Behavior::isolated;
    bool invert = false;
    bool adds_space = false;  // in front of a piece that does not begin with one
  };
  struct Cut {  // of one text
    Pattern::Memory& memory;
    const OnPiece& on_piece;
    int64_t added_spaces = 0;
  };
  struct Span {
    size_t begin = 0, end = 0;
    bool match = false;
  };

  void add_step(const nlohmann::json& description, const std::string& where, bool last);
  void add_split(const nlohmann::json& description, const std::string& where);
  void apply(size_t step, std::string_view text, Cut& cut) const;
  void split(size_t step, std::string_view text, Cut& cut) const;

  std::vector<Step> steps_;
};

}  // namespace sluice
