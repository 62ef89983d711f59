#pragma once
// Positions of the parameters in the flat buffers, and sharding of these over ranks (ZeRO, Rajbhandari et al.
// 2020). Only positions, no memory.
#include <vector>

#include "params/spec.h"

namespace sluice {

/// How a store's flat buffers are sharded and which parts are kept.
struct StoreLayout {
  /// Ranks that share the elements of every bucket in equal parts: of what all ranks hold alike, and of
  /// experts.
  int dense_ranks = 1, expert_ranks = 1;
  int grad_sources = 1;  // ParamStore::grad_sources
  /// false: of the blocks no values (gradients) are kept but those of two, which a UnitUser brings and takes
  /// (params/param_store.h).
  bool whole_values = true, whole_grads = true;

  int ranks_sharing(SplitAxis axis) const { return axis == SplitAxis::expert ? expert_ranks : dense_ranks; }
};

/// A range of the flat buffers that is gathered and reduced as one: what a unit holds of one Split::axis.
struct Bucket {
  int unit = 0;
  SplitAxis split = SplitAxis::none;
  int64_t begin = 0, end = 0;  // elements; padded to a multiple of 32 times its ranks
};

/// One rank's part of a bucket, and where it lies in a buffer of all its parts.
struct BucketPiece {
  Bucket of;
  int64_t begin = 0, count = 0, at = 0;
};

/// The part of a parameter in a piece.
struct PieceSlice {
  ParamId id = 0;
  int64_t begin = 0, count = 0;  // of the parameter's elements
  int64_t at = 0;                // in the piece
};

/// Units ascend, each with what all ranks hold alike before its experts; parameters that are joined lie
/// directly behind each other, others at multiples of 32 elements. Frozen parameters lie in a buffer of their
/// own: buckets, gradients and moments are of what is trained.
class FlatLayout {
 public:
  struct Unit {
    std::vector<ParamId> ids;                      // trained
    int64_t begin = 0, end = 0, expert_begin = 0;  // elements; experts behind expert_begin
    int64_t experts() const { return end - expert_begin; }
  };

  FlatLayout() = default;
  FlatLayout(const std::vector<ParamSpec>& specs, const StoreLayout& layout);

  const std::vector<Unit>& units() const { return units_; }
  const Unit& unit(int u) const { return units_[static_cast<size_t>(u)]; }
  /// The frozen parameters of all units.
  const Unit& frozen() const { return frozen_; }
  /// Where a parameter begins: in the flat buffers, or in that of what is frozen.
  int64_t offset(ParamId id) const { return offsets_[static_cast<size_t>(id)]; }

  const std::vector<Bucket>& buckets() const { return buckets_; }
  int64_t size() const { return buckets_.empty() ? 0 : buckets_.back().end; }
  /// The part of every bucket that falls to a rank, in the buckets' order.
  std::vector<BucketPiece> pieces(int dense_rank, int expert_rank) const;
  std::vector<PieceSlice> slices(const BucketPiece& piece) const;

 private:
  StoreLayout layout_;
  std::vector<int64_t> offsets_, counts_;  // by parameter
  std::vector<Unit> units_;
  Unit frozen_;
  std::vector<Bucket> buckets_;
};

}  // namespace sluice
