#pragma once
// Attention on the first token by head, by the class of the query's token, and the share of heads that are
// attention sinks (README.md). For evaluation and `sluice analyze` alike.
#include <cstdint>
#include <optional>
#include <vector>

#include "analysis/queries.h"
#include "analysis/reading.h"
#include "analysis/sums.h"
#include "config/config.h"

namespace sluice {

/// Numbers of queries, common to all layers. "Later" queries are not the first token of their sequence
/// themselves; the first token can attend to nothing else.
struct QueryCounts {
  double all = 0, later = 0;
  std::vector<double> by_class;  // of the later queries
  double leading = 0;            // the first analysis.sink_length queries of each sequence

  void add_parts(Parts& parts);
};

/// Sums of one layer, by head.
struct FirstTokenSums {
  std::vector<double> all, later;  // (H): attention on the first token
  std::vector<double> by_class;    // (classes, H): of the later queries
  /// (H): the number of queries of the sequences in which the head is a sink: in which its mean attention on
  /// the first token, over all queries of the sequence or over the leading ones, exceeds
  /// analysis.sink_threshold.
  std::vector<double> sink, leading_sink;

  void add_parts(Parts& parts);
};

/// Means of one layer, by head. NaN where no query was counted.
struct HeadAttention {
  std::vector<double> all, later;             // (H)
  std::vector<std::vector<double>> by_class;  // (classes, H); empty without analysis.query_classes
  std::vector<double> sink, leading_sink;     // (H): share of the sequences in which the head is a sink
};

/// Sinks of a model.
struct SinkSummary {
  /// Sink^eps (Gu et al. 2024, arXiv 2410.10781): the mean over sequences, layers and heads of
  /// [mean over the sequence's queries of the attention on the first token > eps]. Sequences weigh by their
  /// number of queries. leading: the same over the first analysis.sink_length queries of each sequence.
  double share = 0, leading_share = 0;
  int64_t heads = 0, of = 0;   // heads whose mean over the later queries exceeds the threshold; all heads
  size_t layer = 0, head = 0;  // the head with the largest mean over the later queries
  double strongest = 0;        // that mean
  std::vector<double> strongest_by_class;
};

class FirstTokenMeasure {
 public:
  explicit FirstTokenMeasure(const AnalysisConfig& config)
      : classes_(config.query_classes), threshold_(config.sink_threshold), length_(config.sink_length) {}

  const QueryClasses& classes() const { return classes_; }
  double threshold() const { return threshold_; }
  int64_t length() const { return length_; }

  QueryCounts no_queries() const;
  FirstTokenSums no_sums(int64_t heads) const;
  void count(QueryCounts& counts, const Queries& queries) const;
  /// One sequence after the other, query by query, so that the sums do not depend on how sequences are
  /// divided into batches.
  void add(FirstTokenSums& sums, const FirstKey& first_key, const Queries& queries) const;

  HeadAttention means(const FirstTokenSums& sums, const QueryCounts& counts) const;
  SinkSummary summary(const std::vector<HeadAttention>& layers) const;

 private:
  QueryClasses classes_;
  double threshold_;
  int64_t length_;
};

}  // namespace sluice
