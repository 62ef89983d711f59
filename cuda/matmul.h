#pragma once
// Matrix products of the CUDA backend through cuBLASLt, used by linear, cross-entropy, the router and Muon.
// Descriptors and algorithm of a product are kept in the Context from its first use, so that later steps
// allocate nothing. The algorithm is that of Context::algorithms, or else the first of cuBLASLt's heuristic.
// A product is one call on the context's stream, may be captured in a graph, and is bitwise reproducible on
// one GPU model.
#include "ops/product_algorithms.h"

namespace sluice::cuda {

/// Computes one product. A dry run only allocates its scratch memory, kWorkspaceBytes for any shape, and
/// notes the product in Context::products. Error(internal) "cublasLtMatmul(1024 x 384 x 384, bf16 to f32):
/// CUBLAS_STATUS_...".
void multiply(Context& ctx, const GpuProduct& product, const void* a, const void* b, void* c);

/// Workspace of a product: NVIDIA's recommendation for sm_90, used on every GPU.
constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

}  // namespace sluice::cuda
