#pragma once
#include "core/tensor.h"

namespace sluice {

/// T = samples x seq_len tokens of one micro-batch.
struct Batch {
  Tensor tokens;     // (T) i32
  Tensor targets;    // (T) i32: the next token; -1 for no target
  Tensor positions;  // (T) i32: position in the sample, for RoPE
  Tensor first_key;  // (T) i32: first visible token of each token (index in this batch)
};

}  // namespace sluice
