#pragma once
// Rotary position embedding (Su et al. 2021), rotate-half form: pairs (i, i + D/2), with YaRN scaling (Peng
// et al. 2023; README.md). cos and sin already hold YaRN's attention factor m.
#include <optional>

#include "core/context.h"

namespace sluice {

struct RopeScaling {
  bool yarn = false;
  double factor = 1.0;                             // s
  double original_max_position_embeddings = 4096;  // positions of the unscaled model
  double beta_fast = 32.0, beta_slow = 1.0;        // rotations at the ends of the ramp
  bool truncate = true;                            // the ramp's ends are rounded outwards to whole dimensions
  std::optional<double> attention_factor = {};     // of cosines and sines; empty: 0.1 ln(factor) + 1
};

/// Fills the rotation table for positions [0, positions): cos, sin (positions, D/2) f32, or f64 for an f64
/// model; angles are computed in double. On the host, once per model.
void rope_table(Tensor cos, Tensor sin, double theta, const RopeScaling& scaling);

/// y (T, H, D) = x rotated by positions (T) i32; y may alias x. Throws Error(data) for a position outside of
/// the table.
void rope_forward(Context& ctx, Tensor y, const Tensor& x, const Tensor& positions, const Tensor& cos,
                  const Tensor& sin);

/// dx (T, H, D) = dy rotated back (the transpose of the same linear map); dx may alias dy, or be columns of
/// a matrix. Overwritten.
void rope_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& positions, const Tensor& cos,
                   const Tensor& sin);

}  // namespace sluice
