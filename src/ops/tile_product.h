#pragma once
// Products of bf16 matrices by AVX512-BF16, AMX or AMX's emulation (Bf16Unit in core/cpu_features.h). The
// sum of each result runs along the depth in one order, whatever the sizes, the blocks and the number of
// threads, so that its bits depend on its row of a and its column of b alone.
#include "core/dtype.h"
#include "ops/matmul.h"

namespace sluice {

/// Columns of a strip of a packed operand, and the depth of a step; both are padded with zeros.
constexpr int64_t kTileStrip = 32, kTileDepth = 32;

/// As cpu::multiply, for p.in == bf16 and sums in f32. A packed b is what tile_pack wrote.
void tile_product(Context& ctx, const cpu::Product& p, const void* a, const void* b, void* c);

/// Bytes of the packed form of b (k, n): pairs of bf16, in strips of 32 columns.
int64_t tile_packed_bytes(int64_t k, int64_t n);

/// Writes the packed form of b (k, n); `transposed`: it is stored as (n, k).
void tile_pack(Context& ctx, int64_t k, int64_t n, bool transposed, const bf16* b, float* packed);

}  // namespace sluice
