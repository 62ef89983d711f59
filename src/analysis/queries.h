#pragma once
// What the host knows of a batch's queries: the sequence that each belongs to, and the class of its token.
#include <string>
#include <vector>

#include "config/config.h"
#include "core/context.h"
#include "nn/batch.h"
#include "nn/sequence_ranks.h"

namespace sluice {

/// The classes of analysis.query_classes in their order, and as the last one "other": all other tokens.
class QueryClasses {
 public:
  explicit QueryClasses(const std::vector<QueryClassConfig>& config);

  size_t count() const { return names_.size(); }
  const std::vector<std::string>& names() const { return names_; }
  size_t of(int32_t token) const {
    const auto id = static_cast<size_t>(token);
    return id < class_of_.size() ? class_of_[id] : count() - 1;
  }

 private:
  std::vector<std::string> names_;
  std::vector<size_t> class_of_;  // by token id, up to the largest id that is listed
};

/// The queries of a batch; where ranks share its sequences, of all of them, and their tokens are numbered as
/// on one rank. A sequence is a run of tokens with the same first visible key: a sample, or with
/// data.document_mask the part of a document in a sample. Padding at its end (core/targets.h) is left out.
/// Without sequences in a dry run.
struct Queries {
  struct Sequence {
    int64_t begin, size;  // begin: the sequence's first token, which is also its first query
  };

  /// Collective where ranks share the sequences.
  Queries(Context& ctx, const Batch& batch, const QueryClasses& classes,
          const SequenceRanks* ranks = nullptr);

  std::vector<Sequence> sequences;
  std::vector<size_t> class_of;  // (T): class of each query's token

  /// Rows [begin, begin + size) of this rank's tensors, whose first dimension is its own tokens.
  struct Rows {
    int64_t begin, size;
  };
  /// The rows of the queries in order, as few ranges as there are without padding between them. In a dry run
  /// all.
  std::vector<Rows> rows;
  int64_t count = 0;  // of rows
};

}  // namespace sluice
