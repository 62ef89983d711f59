#pragma once
#include "nn/transformer.h"

namespace sluice {

/// What a forward pass with losses needs: one micro-batch, its activations and losses.
struct ForwardBuffers {
  Batch batch;
  Transformer::Saved saved;
  Tensor losses;  // (T)
};

}  // namespace sluice
