#include "params/packed.h"

#include <algorithm>

#include "ops/grouped_linear.h"

namespace sluice {

void pack_weight(Context& ctx, const LinearWeight& w) {
  if (w.packed || w.packed_transposed) w.groups > 1 ? grouped_linear_pack(ctx, w) : linear_pack(ctx, w);
}

void PackedCopies::allocate(Context& ctx, const std::vector<ParamSpec>& specs, const Shape& shape,
                            Arena& arena, Weights weights) {
  offsets_.assign(specs.size(), -1);
  transposed_offsets_.assign(specs.size(), -1);
  forward_alone_.assign(specs.size(), false);
  unit_bytes_.clear();
  const auto bytes_of = [&](const LinearWeight& w, const ParamSpec& spec) {
    const int64_t out_features = w.value.dim(0) / w.groups, in_features = w.value.dim(1);
    SLUICE_CHECK(out_features * w.groups == w.value.dim(0), "parameter {}: {} rows are not {} equal groups",
                 spec.name, w.value.dim(0), w.groups);
    return w.groups > 1 ? grouped_linear_packed_bytes(ctx, shape.dtype, w.groups, out_features, in_features)
                        : linear_packed_bytes(ctx, shape.dtype, out_features, in_features, shape.rows);
  };
  for (size_t i = 0; i < specs.size(); ++i) {
    const ParamSpec& spec = specs[i];
    if (!spec.packed) continue;
    const bool in_group = spec.joined || (i + 1 < specs.size() && specs[i + 1].joined);
    forward_alone_[i] = spec.joined_in_backward && in_group;
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
    if (forward_alone_[i] || !spec.joined) {
      LinearWeight& forward = forward_alone_[i] ? weights.values[i] : weights.joined[i];
      take(bytes_of(forward, spec).forward, forward.packed, offsets_[i], ".packed");
    }
    if (!spec.joined && shape.transposed) {
      LinearWeight& whole = weights.joined[i];
      take(bytes_of(whole, spec).transposed, whole.packed_transposed, transposed_offsets_[i],
           ".packed_transposed");
    }
  }
}

void PackedCopies::place(const std::vector<ParamId>& ids, void* at, Weights weights) const {
  if (!at) return;
  for (const ParamId id : ids) {
    const auto i = static_cast<size_t>(id);
    LinearWeight& forward = forward_alone_[i] ? weights.values[i] : weights.joined[i];
    if (offsets_[i] >= 0) forward.packed.data = static_cast<char*>(at) + offsets_[i];
    if (transposed_offsets_[i] >= 0)
      weights.joined[i].packed_transposed.data = static_cast<char*>(at) + transposed_offsets_[i];
  }
}

}  // namespace sluice
