#include "nn/sequence.h"

#include "ops/elementwise.h"

namespace sluice {

void KeyValueCache::append(Context& ctx, int64_t layer, Tensor& k, Tensor& v) const {
  const auto behind = [&](const Tensor& all, Tensor& fresh) {
    const int64_t count = fresh.dim(0);
    cast(ctx, all.rows(length, count), fresh);
    fresh = all.rows(0, length + count);
  };
  behind(keys[static_cast<size_t>(layer)], k);
  behind(values[static_cast<size_t>(layer)], v);
}

Tensor KeyValueCache::append_index_keys(Context& ctx, int64_t layer, const Tensor& k) const {
  const Tensor& all = index_keys[static_cast<size_t>(layer)];
  cast(ctx, all.rows(length, k.dim(0)), k);
  return all.rows(0, length + k.dim(0));
}

}  // namespace sluice
