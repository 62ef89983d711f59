#pragma once
// A softmax over tiles of keys multiplies what it has summed by a factor for every tile, 1 while the largest
// score stays: an error of the factor multiplies over the tiles.
#include "ops/attention.h"
#include "ops/cases.h"
#include "ops/query_places.h"

namespace sluice::test {

/// Scores that are alike within a row, and so large that those of a row, times log2(e), are rounded by up to
/// some hundredths. Values are 1 for the first half of the keys, 0 for the others.
inline AttentionInputs level_scores(CaseRun& r, const QueryPlaces& places, int64_t heads, int64_t kv_heads,
                                    int64_t depth) {
  AttentionInputs in;
  in.q = r.input("q", r.dtype, {places.queries, heads, depth},
                 [=](int64_t i) { return 128.0 + static_cast<double>(i / (heads * depth) % 128); });
  in.k = r.input("k", r.dtype, {places.keys, kv_heads, depth}, [](int64_t) { return 128.0; });
  const int64_t half = places.keys / 2 * kv_heads * depth;
  in.v =
      r.input("v", r.dtype, {places.keys, kv_heads, depth}, [=](int64_t i) { return i < half ? 1.0 : 0.0; });
  in.first_key = places.first_key(r, [](int64_t) { return 0; });
  in.own_key = places.own_key(r);
  in.scale = 64.0 / static_cast<double>(depth);
  return in;
}

}  // namespace sluice::test
