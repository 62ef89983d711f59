#pragma once
// Whole documents packed into samples (data.packing: documents).
#include <cstdint>
#include <span>
#include <vector>

#include "data/token_file.h"

namespace sluice {

/// Consecutive tokens of one document in a sample.
struct Piece {
  int64_t begin = 0, length = 0;
};

/// The samples of one file, a function of its documents and seq_len alone. A document is cut only where it is
/// longer than seq_len: into pieces of seq_len tokens and a rest. Pieces, the longest first, go into the
/// sample with the least room that is enough (best-fit decreasing; Ding et al. 2024, "Fewer Truncations
/// Improve Language Modeling", arXiv 2404.10830, section 3). Samples are in the order of their first tokens
/// in the file, and so are the pieces of a sample. A piece in which nothing is predicted (one token) is left
/// out. 16 bytes per document.
class PackedSamples {
 public:
  PackedSamples(const TokenFile& file, int64_t seq_len);
  int64_t samples() const { return static_cast<int64_t>(firsts_.size()) - 1; }
  std::span<const Piece> pieces(int64_t sample) const;
  /// Whether it has seq_len tokens, without padding.
  bool whole(int64_t sample) const;
  /// Tokens of the file in no sample, neither as input nor as target.
  int64_t unread() const { return unread_; }
  /// Positions of all samples that hold no token.
  int64_t padding() const { return padding_; }

 private:
  int64_t seq_len_, unread_ = 0, padding_ = 0;
  std::vector<Piece> pieces_;
  std::vector<int64_t> firsts_;  // of each sample, the first of its pieces; and one more
};

}  // namespace sluice
