#include "ops/strip_pack.h"

#include "ops/dispatch.h"

SLUICE_DECLARE_CPU(strip_pack)

namespace sluice {

void strip_pack(Context& ctx, int64_t k, int64_t n, bool transposed, const float* b, float* packed) {
  SLUICE_DISPATCH_CPU(strip_pack, ctx, k, n, transposed, b, packed);
}

}  // namespace sluice
