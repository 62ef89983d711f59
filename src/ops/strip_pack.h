#pragma once
// The packed form of an f32 operand that oneDNN's products take under AVX-512, written in one pass.
#include "core/context.h"

namespace sluice {

/// Columns of a strip; its rows are padded to a multiple of kStripRows. Padding is zero.
constexpr int64_t kStripColumns = 64, kStripRows = 16;

/// Writes b (k, n) as strips of 64 columns, one behind the other, row after row (oneDNN's BA16a64b);
/// `transposed`: it is stored as (n, k). The bits of oneDNN's own reorder, which takes two to three times as
/// long where b and the strips are larger than the caches.
void strip_pack(Context& ctx, int64_t k, int64_t n, bool transposed, const float* b, float* packed);

}  // namespace sluice
