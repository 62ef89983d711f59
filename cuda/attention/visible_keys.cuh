#pragma once
// Which keys a query sees on a GPU (ops/attention.h): from the first of its sequence or document to its own.
#include "common/launch.h"

namespace sluice::cuda {

/// Each query's own key, the last one that it sees.
struct OwnKeys {
  const int* key;  // (Tq), ascending; null: the queries are the last of the keys
  int queries, keys;

  DEVICE_INLINE int of(int64_t query) const {
    return key ? key[query] : static_cast<int>(query) + keys - queries;
  }
  /// The first query that sees key k or a later one; `queries` if none does.
  DEVICE_INLINE int first_query(int k) const {
    if (!key) return max(k - (keys - queries), 0);
    int low = 0, high = queries;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (key[middle] < k)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
};

struct VisibleKeys {
  const int* first;  // (Tq): counted among the keys, whatever first_key is relative to
  OwnKeys own;
};

/// (window.cu.) Memory for `first`, where it is not first_key itself, comes from `scratch`. own_key may be
/// empty.
VisibleKeys visible_keys(Context& ctx, ScratchScope& scratch, const Tensor& first_key, const Tensor& own_key,
                         int64_t keys);

}  // namespace sluice::cuda
