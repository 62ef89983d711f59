#include "params/layout.h"

#include <algorithm>

namespace sluice {
namespace {

constexpr int64_t kAlignElements = ParamSpec::kAlignElements;

int64_t aligned(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

FlatLayout::FlatLayout(const std::vector<ParamSpec>& specs, const StoreLayout& layout) : layout_(layout) {
  offsets_.assign(specs.size(), 0);
  for (size_t i = 0; i < specs.size(); ++i) {
    const ParamSpec& spec = specs[i];
    counts_.push_back(spec.numel());
    if (static_cast<size_t>(spec.unit) >= units_.size()) units_.resize(static_cast<size_t>(spec.unit) + 1);
    (spec.trainable ? units_[static_cast<size_t>(spec.unit)] : frozen_)
        .ids.push_back(static_cast<ParamId>(i));
  }
  const auto place = [&](ParamId id, int64_t end) {
    const auto i = static_cast<size_t>(id);
    offsets_[i] = specs[i].joined ? end : aligned(end, kAlignElements);
    return offsets_[i] + counts_[i];
  };
  for (const ParamId id : frozen_.ids) frozen_.end = place(id, frozen_.end);
  int64_t end = 0;
  for (size_t u = 0; u < units_.size(); ++u) {
    Unit& unit = units_[u];
    unit.begin = end;
    for (const SplitAxis axis : {SplitAxis::none, SplitAxis::expert}) {
      const int64_t begin = end;
      if (axis == SplitAxis::expert) unit.expert_begin = begin;
      for (const ParamId id : unit.ids)
        if (specs[static_cast<size_t>(id)].split.axis == axis) end = place(id, end);
      end = begin + aligned(end - begin, kAlignElements * layout.ranks_sharing(axis));
      if (end > begin) buckets_.push_back({static_cast<int>(u), axis, begin, end});
    }
    unit.end = end;
  }
}

std::vector<BucketPiece> FlatLayout::pieces(int dense_rank, int expert_rank) const {
  std::vector<BucketPiece> pieces;
  int64_t at = 0;
  for (const Bucket& b : buckets_) {
    const int64_t count = (b.end - b.begin) / layout_.ranks_sharing(b.split);
    pieces.push_back(
        {b, b.begin + (b.split == SplitAxis::expert ? expert_rank : dense_rank) * count, count, at});
    at += count;
  }
  return pieces;
}

std::vector<PieceSlice> FlatLayout::slices(const BucketPiece& piece) const {
  std::vector<PieceSlice> slices;
  for (const ParamId id : unit(piece.of.unit).ids) {
    const int64_t first = std::max(piece.begin, offset(id)),
                  end = std::min(piece.begin + piece.count, offset(id) + counts_[static_cast<size_t>(id)]);
    if (first < end) slices.push_back({id, first - offset(id), end - first, first - piece.begin});
  }
  return slices;
}

}  // namespace sluice
