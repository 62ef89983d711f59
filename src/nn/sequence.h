#pragma once
// Inputs of attention besides the hidden states: positions, first visible keys, KV cache, value zeroing.
#include <optional>
#include <vector>

#include "core/context.h"
#include "nn/head_balance.h"

namespace sluice {

/// KV cache of one sequence, for generation. Keys and values are gated, normalised and rotated, as attention
/// reads them.
struct KeyValueCache {
  std::vector<Tensor> keys, values;  // per layer (max_tokens, Hkv, D)
  int64_t length = 0;                // number of tokens; Transformer::forward advances it

  /// Appends k and v (T, Hkv, D) of one layer, and sets both to views of all tokens, (length + T, Hkv, D).
  void append(Context& ctx, int64_t layer, Tensor& k, Tensor& v) const;
};

/// Evaluation with the value of every sequence's first token zeroed (ops/value_zeroing.h): for all heads, or
/// for those whose attention on it, averaged over the tokens of the forward pass, exceeds this threshold.
struct ValueZeroing {
  std::optional<double> sinks_above;
};

/// Inputs of attention about the tokens besides their hidden states.
struct Sequence {
  Tensor positions;           // (T) i32
  Tensor first_key;           // (T) i32, see ops/attention.h
  Tensor rope_cos, rope_sin;  // (positions, D/2)
  KeyValueCache* cache = nullptr;
  const ValueZeroing* zeroing = nullptr;  // forward only, without a cache
  const HeadLoad* heads =
      nullptr;  // where forward adds the heads' importance, and backward reads its gradient
};

}  // namespace sluice
