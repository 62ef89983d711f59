#pragma once
// Inputs of attention besides the hidden states: positions, first visible keys, KV cache, value zeroing.
#include <optional>
#include <span>
#include <vector>

#include "core/context.h"
#include "nn/head_balance.h"

namespace sluice {

struct IndexerLoad;   // nn/indexer_loss.h
class SequenceRanks;  // nn/sequence_ranks.h

/// KV cache of one sequence, for generation. Keys and values are gated, normalised and rotated, as attention
/// reads them. Where ranks share the sequence, each has all of them.
struct KeyValueCache {
  std::vector<Tensor> keys, values;     // per layer (max_tokens, Hkv, D)
  std::vector<Tensor> index_keys = {};  // sparse attention: the indexer's, per layer (max_tokens, d)
  Tensor first_key = {};                // sparse attention: (max_tokens) i32, of every token
  int64_t length = 0;                   // number of tokens; Transformer::forward advances it

  /// Appends k and v (T, Hkv, D) of one layer, and sets both to views of all tokens, (length + T, Hkv, D).
  void append(Context& ctx, int64_t layer, Tensor& k, Tensor& v) const;
  /// Appends the indexer's keys k (T, d) of one layer, and returns those of all tokens.
  Tensor append_index_keys(Context& ctx, int64_t layer, const Tensor& k) const;
};

/// Evaluation with the value of every sequence's first token zeroed (ops/value_zeroing.h): for all heads, or,
/// in each sequence, for those whose attention on it, averaged over the sequence, exceeds this threshold.
struct ValueZeroing {
  std::optional<double> sinks_above = {};
};

/// Inputs of attention about the tokens besides their hidden states.
struct Sequence {
  Tensor positions;           // (T) i32
  Tensor first_key;           // (T) i32, see ops/attention.h
  Tensor rope_cos, rope_sin;  // (positions, D/2)
  KeyValueCache* cache = nullptr;
  std::span<KeyValueCache* const> caches = {};  // one token of each of several sequences, instead of cache
  const ValueZeroing* zeroing = nullptr;        // forward only, without a cache
  const SequenceRanks* ranks = nullptr;         // those that share the sequences; not with caches
  /// With ranks: where the queries' own keys lie among the keys of all ranks, (T) i32 (ops/attention.h).
  Tensor own_key = {};
  /// With parallel.determinism: exact, where ranks share sequences: the same of their tokens together, as one
  /// rank has it, where sums over tokens need it. Otherwise nullptr.
  const Sequence* whole = nullptr;
  const HeadLoad* heads =
      nullptr;  // where forward adds the heads' importance, and backward reads its gradient

  /// (T) i32, of Batch: what sparse attention's backward and value zeroing do not count follows from it.
  Tensor targets = {};

  // Of sparse attention.
  Tensor index_cos = {}, index_sin = {};  // (positions, d / 2): the rotation of the indexer, with rope
  bool dense_warm_up = false;             // attention sees all keys
  const IndexerLoad* indexers = nullptr;  // where forward adds what was selected, and backward the loss
};

}  // namespace sluice
