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

/// The copies of a store's matrices. They are kept each by itself or, where values are brought unit by unit,
/// in the place of the unit that is used.
class PackedCopies {
 public:
  struct Shape {
    DType dtype = DType::f32;
    int64_t rows = 0;         // of a product, about
    bool transposed = false;  // for backward as well
    bool move_with_unit = false;
  };
  /// The weights of a store, by parameter.
  struct Weights {
    std::vector<LinearWeight>&values, &joined;  // each by itself; its group, if it is the first
  };
  /// Gives every weight its copies: allocated from `arena`, or without memory until `place` where a trained
  /// one's move with its unit. Those of a joined group are its first's, except that forward's are each
  /// matrix's own with joined_in_backward.
  void allocate(Context& ctx, const std::vector<ParamSpec>& specs, const Shape& shape, Arena& arena,
                Weights weights);
  /// Whether forward has copies of this parameter by itself although it belongs to a joined group.
  bool forward_alone(ParamId id) const { return forward_alone_[static_cast<size_t>(id)]; }
  /// Bytes of the copies that move with a unit.
  int64_t unit_bytes(int unit) const {
    return static_cast<size_t>(unit) < unit_bytes_.size() ? unit_bytes_[static_cast<size_t>(unit)] : 0;
  }
  /// Moves a unit's copies to `at`. ids: its parameters.
  void place(const std::vector<ParamId>& ids, void* at, Weights weights) const;

 private:
  std::vector<int64_t> offsets_, transposed_offsets_;  // by parameter, within its unit's copies; -1: none
  std::vector<int64_t> unit_bytes_;
  std::vector<bool> forward_alone_;  // by parameter
};

}  // namespace sluice
