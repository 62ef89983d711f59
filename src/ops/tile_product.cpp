#include "ops/tile_product.h"

#include "ops/dispatch.h"

SLUICE_DECLARE_CPU(tile_product)
SLUICE_DECLARE_CPU(tile_pack)

namespace sluice {

void tile_product(Context& ctx, const cpu::Product& p, const void* a, const void* b, void* c) {
  SLUICE_CHECK(p.in == DType::bf16 && (p.out == DType::bf16 || p.out == DType::f32),
               "tile_product: operands are bf16 and results bf16 or f32, got {} and {}", dtype_name(p.in),
               dtype_name(p.out));
  SLUICE_DISPATCH_CPU(tile_product, ctx, p, a, b, c);
}

int64_t tile_packed_bytes(int64_t k, int64_t n) {
  const auto padded = [](int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; };
  return padded(k, kTileDepth) * padded(n, kTileStrip) * static_cast<int64_t>(sizeof(bf16));
}

void tile_pack(Context& ctx, int64_t k, int64_t n, bool transposed, const bf16* b, float* packed) {
  SLUICE_DISPATCH_CPU(tile_pack, ctx, k, n, transposed, b, packed);
}

}  // namespace sluice
