#pragma once
#include "core/tensor.h"

namespace sluice {

/// T = samples x seq_len tokens of one micro-batch.
struct Batch {
  Tensor tokens;     // (T) i32
  Tensor targets;    // (T) i32: the next token; -1 where there is none
  Tensor positions;  // (T) i32: place in the sample, for RoPE
  Tensor first_key;  // (T) i32: first token (index in this batch) each token sees
};

}  // namespace sluice
