#pragma once
// Between the two parts of Hopper's backward.
#include "attention/kernels.h"

namespace sluice::cuda {

constexpr int kDqTile = 64;  // queries

/// a.dq, or with a.made its dx, from the sums of dq without the scale: (H, tiles of queries, kDqTile D) f32,
/// each tile in the order of the registers of hopper_backward.cu. Allocates its scratch memory first and
/// returns in a dry run.
void attention_hopper_dq(Context& ctx, const AttentionBackward& a, const float* sums);

}  // namespace sluice::cuda
