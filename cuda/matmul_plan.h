#pragma once
// A product as cuBLASLt describes it, and the algorithms that it proposes.
#include <cublasLt.h>

#include <compare>
#include <vector>

#include "ops/product_algorithms.h"

namespace sluice::cuda {

/// Of operands, in bytes: powers of two up to 256. An algorithm with 16-byte loads must not get a pointer
/// with smaller alignment.
struct Alignments {
  int a = 0, b = 0, c = 0;

  static int of(const void* p);
  int least() const;
  auto operator<=>(const Alignments&) const = default;
};

/// What operands of a product must have so that a timed algorithm computes it: no algorithm asks for more.
constexpr int kTimedAlignment = 16;

/// As cuBLASLt describes an algorithm; nvcc 13.0 fails with an internal error at containers of its own type.
using AlgorithmWords = decltype(ProductAlgorithm::words);

/// Created on first use.
class LtHandle {
 public:
  LtHandle() = default;
  ~LtHandle();
  LtHandle(const LtHandle&) = delete;
  LtHandle& operator=(const LtHandle&) = delete;
  cublasLtHandle_t get();

 private:
  cublasLtHandle_t handle_ = nullptr;
};

class MatmulPlan {
 public:
  explicit MatmulPlan(const GpuProduct& product);
  ~MatmulPlan();
  MatmulPlan(const MatmulPlan&) = delete;
  MatmulPlan& operator=(const MatmulPlan&) = delete;

  static constexpr int kMostAlgorithms = 16;
  /// At most `most` of these, at least one, the one that the heuristic expects to be fastest first;
  /// Error(internal) where there is none.
  std::vector<AlgorithmWords> algorithms(cublasLtHandle_t handle, const Alignments& alignments,
                                         int most) const;
  /// Whether cuBLASLt takes an algorithm, with our workspace.
  bool takes(cublasLtHandle_t handle, const AlgorithmWords& algorithm) const;
  cublasStatus_t run(cublasLtHandle_t handle, const AlgorithmWords& algorithm, const void* a, const void* b,
                     void* c, void* workspace, cudaStream_t stream) const;
  void check(cublasStatus_t status, const char* call) const;

 private:
  void release();
  cublasLtMatrixLayout_t layout(DType type, int64_t rows, int64_t columns, int64_t stride) const;

  GpuProduct product_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, c_ = nullptr;  // in cuBLASLt's order: its a is our b
};

}  // namespace sluice::cuda
