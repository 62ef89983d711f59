#pragma once
// What the indexer is trained towards, on tensor cores (index_target.cu).
#include "attention/visible_keys.cuh"
#include "ops/indexer.h"

namespace sluice::cuda {

/// Whether the kernels support these tensors: bf16, head_dim 64 or 128, 16-byte alignment and a group of 1,
/// 2, 4, ... 32 query heads.
bool target_on_tensor_cores(const IndexTarget& target);

/// Attention of queries [t0, t0 + count) on their scored blocks: out[((t - t0) G + set) row + e] is the mean
/// over the set's heads of the sum of exp(z_ts - lse_t) over the tokens s of the e-th one. Queries whose
/// target is negative may be left out. t0 is a multiple of 32. visible: of `in`.
void attention_targets(Context& ctx, float* out, int64_t row, int64_t t0, int64_t count,
                       const IndexInputs& in, const VisibleKeys& visible, const IndexTarget& target,
                       const Selection* selection);

}  // namespace sluice::cuda
