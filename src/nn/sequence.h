#pragma once
// What attention reads besides the hidden states: positions, first visible keys, a cache, what is left out.
#include <optional>
#include <vector>

#include "core/context.h"
#include "nn/head_balance.h"

namespace sluice {

/// Keys and values of earlier tokens of one sequence, for generation: gated, normalised and rotated, as
/// attention reads them.
struct KeyValueCache {
  std::vector<Tensor> keys, values;  // per layer (max_tokens, Hkv, D)
  int64_t length = 0;                // tokens held; Transformer::forward advances it

  /// Copies k and v (T, Hkv, D) of one layer behind the tokens held, and lets both stand for all of them,
  /// (length + T, Hkv, D).
  void append(Context& ctx, int64_t layer, Tensor& k, Tensor& v) const;
};

/// Evaluation without the values of every sequence's first token (ops/value_zeroing.h): for all heads, or for
/// those that spend more than this share of their attention on it, on average over the tokens of the forward
/// pass.
struct ValueZeroing {
  std::optional<double> sinks_above;
};

/// What attention knows of the tokens besides their hidden states.
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
