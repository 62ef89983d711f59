#pragma once
// Packed copies of matrices (ops/linear.h, ops/grouped_linear.h): their memory and positions.
#include <vector>

#include "core/arena.h"
#include "core/context.h"
#include "ops/linear.h"
#include "params/spec.h"

namespace sluice {

/// Updates the packed copies of a weight, if it has any.
void pack_weight(Context& ctx, const LinearWeight& weight);

/// The copies of a store's matrices; those of a joined group belong to its first. They are kept each by
/// itself or, where values are brought unit by unit, in the place of the unit that is used.
class PackedCopies {
 public:
  struct Shape {
    DType dtype = DType::f32;
    int64_t rows = 0;         // of a product, about
    bool transposed = false;  // for backward as well
    bool move_with_unit = false;
  };
  /// Gives every weight of `weights` (by parameter) its copies: allocated from `arena`, or without memory
  /// until `place` where a trained one's move with its unit.
  void allocate(Context& ctx, const std::vector<ParamSpec>& specs, const Shape& shape, Arena& arena,
                std::vector<LinearWeight>& weights);
  /// Bytes of the copies that move with a unit.
  int64_t unit_bytes(int unit) const {
    return static_cast<size_t>(unit) < unit_bytes_.size() ? unit_bytes_[static_cast<size_t>(unit)] : 0;
  }
  /// Moves a unit's copies to `at`. ids: its parameters.
  void place(const std::vector<ParamId>& ids, void* at, std::vector<LinearWeight>& weights) const;

 private:
  std::vector<int64_t> offsets_, transposed_offsets_;  // by parameter, within its unit's copies; -1: none
  std::vector<int64_t> unit_bytes_;
};

}  // namespace sluice
