#pragma once
// Matrix products of the CUDA backend through cuBLASLt, used by linear and cross-entropy.
// Plans (descriptors and the first algorithm of cuBLASLt's heuristic) are built on the first use of a shape
// and kept in the Context, so that later steps allocate nothing. A product is one call on the context's
// stream, may be captured in a graph, and is bitwise reproducible on one GPU model.
#include "core/context.h"

namespace sluice::cuda {

/// c (m, n) = a (m, k) b (k, n), or c += with `accumulate`. Row-major; `transposed` says that the operand is
/// stored as its transpose. in and out: f32 and f32 (full f32 arithmetic, no TF32), bf16 and bf16, or bf16
/// and f32; sums in f32.
struct Product {
  DType in = DType::f32, out = DType::f32;  // of a and b; of c
  int64_t m = 0, n = 0, k = 0;
  bool a_transposed = false, b_transposed = false, accumulate = false;
  /// Elements from one stored row to the next; 0: rows follow each other without a gap.
  int64_t a_stride = 0, b_stride = 0, c_stride = 0;
};

/// Computes one product. A dry run only allocates its scratch memory: kWorkspaceBytes for any shape.
/// Error(internal) "cublasLtMatmul(1024 x 384 x 384, bf16 to f32): CUBLAS_STATUS_...".
void multiply(Context& ctx, const Product& product, const void* a, const void* b, void* c);

/// Workspace of a product: NVIDIA's recommendation for sm_90, used on every GPU.
constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

}  // namespace sluice::cuda
