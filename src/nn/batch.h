#pragma once
#include "core/tensor.h"

namespace sluice {

/// T = samples x seq_len tokens of one micro-batch; where ranks share sequences, this rank's part of them
/// (nn/sequence_ranks.h).
struct Batch {
  Tensor tokens;     // (T) i32
  Tensor targets;    // (T) i32: the next token; kNoTarget or kPadding (core/targets.h): none
  Tensor positions;  // (T) i32: position in the sample, for RoPE
  Tensor
      first_key;  // (T) i32: first visible token of each token (index in this batch). Where ranks share
                  // sequences: as far before this token as it is in the sequence, so that it may be below 0
};

}  // namespace sluice
