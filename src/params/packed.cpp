#include "params/packed.h"

#include <algorithm>

#include "ops/grouped_linear.h"

namespace sluice {

void pack_weight(Context& ctx, const LinearWeight& w) {
  if (w.packed || w.packed_transposed) w.groups > 1 ? grouped_linear_pack(ctx, w) : linear_pack(ctx, w);
}

void PackedCopies::allocate(Context& ctx, const std::vector<ParamSpec>& specs, const Shape& shape,
                            Arena& arena, std::vector<LinearWeight>& weights) {
  offsets_.assign(specs.size(), -1);
  transposed_offsets_.assign(specs.size(), -1);
  unit_bytes_.clear();
  for (size_t i = 0; i < specs.size(); ++i) {
    const ParamSpec& spec = specs[i];
    LinearWeight& whole = weights[i];
    if (spec.joined || !spec.packed) continue;
    const int64_t out_features = whole.value.dim(0) / whole.groups, in_features = whole.value.dim(1);
    SLUICE_CHECK(out_features * whole.groups == whole.value.dim(0),
                 "parameter {}: {} rows are not {} equal groups", spec.name, whole.value.dim(0),
                 whole.groups);
    const LinearPackedBytes bytes =
        whole.groups > 1
            ? grouped_linear_packed_bytes(ctx, shape.dtype, whole.groups, out_features, in_features)
            : linear_packed_bytes(ctx, shape.dtype, out_features, in_features, shape.rows);
    const auto take = [&](int64_t size, Tensor& packed, int64_t& offset, const char* suffix) {
      if (size == 0) return;
      if (!shape.move_with_unit || !spec.trainable) {
        packed = arena.alloc(spec.name + suffix, DType::u8, {size});
        return;
      }
      const auto unit = static_cast<size_t>(spec.unit);
      unit_bytes_.resize(std::max(unit_bytes_.size(), unit + 1), 0);
      packed = Tensor(nullptr, DType::u8, {size}, spec.name.c_str(), arena.device());
      offset = unit_bytes_[unit];
      unit_bytes_[unit] += (size + 63) / 64 * 64;
    };
    take(bytes.forward, whole.packed, offsets_[i], ".packed");
    if (shape.transposed)
      take(bytes.transposed, whole.packed_transposed, transposed_offsets_[i], ".packed_transposed");
  }
}

void PackedCopies::place(const std::vector<ParamId>& ids, void* at,
                         std::vector<LinearWeight>& weights) const {
  if (!at) return;
  for (const ParamId id : ids) {
    const auto i = static_cast<size_t>(id);
    if (offsets_[i] >= 0) weights[i].packed.data = static_cast<char*>(at) + offsets_[i];
    if (transposed_offsets_[i] >= 0)
      weights[i].packed_transposed.data = static_cast<char*>(at) + transposed_offsets_[i];
  }
}

}  // namespace sluice
