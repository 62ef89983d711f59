#pragma once
// MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss stores its experts: blocks of 32 values of 4 bits (E2M1)
// that share a scale of 8 bits (E8M0).
#include <cstdint>

namespace sluice {

constexpr int64_t kMxfp4Block = 32;

/// out (count) f32 = the values of count / 32 blocks of 16 bytes each, the low half of a byte first, times
/// 2^(scale - 127) of the block. Exact also in bf16 for scales from 3 to 252.
void mxfp4_values(const unsigned char* blocks, const unsigned char* scales, int64_t count, float* out);

}  // namespace sluice
