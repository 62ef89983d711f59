#pragma once
// Where the queries of an op case are among its keys: the last of them, or those of one of several ranks that
// share the sequence (own_key, ops/attention.h).
#include "comm/sequence_split.h"
#include "ops/cases.h"

namespace sluice::test {

struct QueryPlaces {
  int64_t queries, keys, ranks = 1, rank = 0;

  /// 2 to 4 ranks, which share the keys.
  static QueryPlaces random(Random& random, int64_t longest_chunk) {
    const int64_t ranks = uniform(random, 2, 4), length = 2 * uniform(random, 1, longest_chunk);
    return {length, ranks * length, ranks, uniform(random, 0, ranks - 1)};
  }
  bool shared() const { return ranks > 1; }
  int64_t own(int64_t t) const {
    if (!shared()) return t + keys - queries;
    return SequenceSplit{.ranks = ranks, .rank = rank, .seq_len = keys}.place(t);
  }
  /// first(key): the first visible key of a query whose own key this is.
  template <class First>
  Tensor first_key(CaseRun& run, First&& first) const {
    return run.input("first_key", DType::i32, {queries}, [&](int64_t t) {
      return static_cast<double>(first(own(t)) - (shared() ? own(t) - t : 0));
    });
  }
  /// Empty where the queries are the last keys.
  Tensor own_key(CaseRun& run) const {
    if (!shared()) return {};
    return run.input("own_key", DType::i32, {queries},
                     [&](int64_t t) { return static_cast<double>(own(t)); });
  }
  /// Whether backward is defined.
  bool trains() const { return shared() || queries == keys; }
};

}  // namespace sluice::test
