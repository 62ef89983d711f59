#include "ops/product_algorithms.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "ops/dispatch.h"

SLUICE_DECLARE_CUDA(product_card)
SLUICE_DECLARE_CUDA(fastest_algorithm)
SLUICE_DECLARE_CUDA(computes)

namespace sluice {

#if defined(SLUICE_HAS_CUDA)
ProductCard product_card(Context& ctx) { return cuda::product_card(ctx); }
ProductAlgorithm fastest_algorithm(Context& ctx, const GpuProduct& product) {
  return cuda::fastest_algorithm(ctx, product);
}
bool computes(Context& ctx, const ProductAlgorithm& algorithm, const GpuProduct& product) {
  return cuda::computes(ctx, algorithm, product);
}
#else
ProductCard product_card(Context&) { fail(ExitCode::internal, "product_card: only on a GPU"); }
ProductAlgorithm fastest_algorithm(Context&, const GpuProduct&) {
  fail(ExitCode::internal, "fastest_algorithm: only on a GPU");
}
bool computes(Context&, const ProductAlgorithm&, const GpuProduct&) {
  fail(ExitCode::internal, "computes: only on a GPU");
}
#endif

std::string ProductCard::text() const {
  return fmt::format("{}, compute capability {}.{}, {} multiprocessors, cuBLASLt {}", name,
                     compute_capability / 10, compute_capability % 10, multiprocessors, library);
}

ProductAlgorithms time_products(const std::set<GpuProduct>& products, bool deterministic) {
  ProductAlgorithms out;
  if (products.empty()) return out;
  Context dry(0, Device::cuda);
  for (const GpuProduct& product : products) fastest_algorithm(dry, product);
  Context ctx(dry.scratch.high_water(), Device::cuda);
  ctx.deterministic = deterministic;
  for (const GpuProduct& product : products) out.by_product[product] = fastest_algorithm(ctx, product);
  return out;
}

}  // namespace sluice
