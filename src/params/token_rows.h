#pragma once
#include "core/arena.h"
#include "core/context.h"

namespace sluice {

/// Ranks that share sequences, as the gradients of parameters see them. Such a gradient is a sum over tokens,
/// and has the bits that one rank alone would give it only as one sum over the same tokens in the same order
/// (parallel.determinism: exact). So every rank gathers what the sum is made of, and computes all of it.
class TokenRows {
 public:
  virtual ~TokenRows() = default;
  /// Room for the rows of all ranks' tokens, (N T, ...) in t, where this rank's are (T, ...).
  virtual Tensor room(ScratchScope& t, const Tensor& rows) const = 0;
  /// Collective. These rows, in the order of the sequences.
  virtual Tensor whole(Context& ctx, ScratchScope& t, const Tensor& rows) const = 0;
  /// rows (T, ...) = those of this rank's tokens among whole (N T, ...).
  virtual void take_own(Context& ctx, Tensor rows, const Tensor& whole) const = 0;
};

}  // namespace sluice
