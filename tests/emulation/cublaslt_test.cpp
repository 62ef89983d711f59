// The fake cuBLASLt computes what it is asked for, and refuses what the real one may not do.
#include <cublasLt.h>

#include <catch2/catch.hpp>
#include <vector>

#include "emulation.h"

namespace {

/// c (2, 3) = a (2, 4) b (4, 3), column-major f32, with every wish open to change.
struct Call {
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  cublasLtMatmulHeuristicResult_t result{};
  alignas(256) float workspace[64] = {};
  alignas(256) float va[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, vb[16] = {}, vc[16] = {};

  Call() {
    cublasLtCreate(&handle);
    cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatrixLayoutCreate(&a, CUDA_R_32F, 2, 4, 2);
    cublasLtMatrixLayoutCreate(&b, CUDA_R_32F, 4, 3, 4);
    cublasLtMatrixLayoutCreate(&c, CUDA_R_32F, 2, 3, 2);
    cublasLtMatmulPreferenceCreate(&preference);
    const uint64_t bytes = sizeof workspace;
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                                         sizeof bytes);
    for (int i = 0; i < 12; ++i) vb[i] = static_cast<float>(i % 5);
  }
  ~Call() {
    for (cublasLtMatrixLayout_t l : {a, b, c}) cublasLtMatrixLayoutDestroy(l);
    cublasLtMatmulDescDestroy(operation);
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtDestroy(handle);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void relayout(cublasLtMatrixLayout_t& l, cudaDataType type, uint64_t rows, uint64_t columns,
                int64_t stride) {
    cublasLtMatrixLayoutDestroy(l);
    l = nullptr;
    cublasLtMatrixLayoutCreate(&l, type, rows, columns, stride);
  }
  cublasStatus_t choose() {
    int found = 0;
    return cublasLtMatmulAlgoGetHeuristic(handle, operation, a, b, c, c, preference, 1, &result, &found);
  }
  cublasStatus_t multiply(const float* pa, float beta, size_t workspace_bytes = sizeof(workspace)) {
    const float one = 1;
    return cublasLtMatmul(handle, operation, &one, pa, a, vb, b, &beta, vc, c, vc, c, &result.algo, workspace,
                          workspace_bytes, nullptr);
  }
};

}  // namespace

TEST_CASE("the fake cuBLASLt multiplies column-major, overwrites and accumulates", "[cublaslt]") {
  Call call;
  REQUIRE(call.choose() == CUBLAS_STATUS_SUCCESS);
  REQUIRE(call.multiply(call.va, 0) == CUBLAS_STATUS_SUCCESS);
  // Row 0 of a is 1 3 5 7; column 0 of b is 0 1 2 3.
  CHECK(call.vc[0] == 1 * 0 + 3 * 1 + 5 * 2 + 7 * 3);
  REQUIRE(call.multiply(call.va, 1) == CUBLAS_STATUS_SUCCESS);
  CHECK(call.vc[0] == 2 * 34);
}

TEST_CASE("the fake cuBLASLt refuses a product of bf16 whose partial sums may be rounded", "[cublaslt]") {
  Call call;
  call.relayout(call.a, CUDA_R_16BF, 2, 4, 2);
  call.relayout(call.b, CUDA_R_16BF, 4, 3, 4);
  call.relayout(call.c, CUDA_R_16BF, 2, 3, 2);
  CHECK(call.choose() == CUBLAS_STATUS_INVALID_VALUE);  // by default every way to add them is allowed
  const uint32_t wide = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  cublasLtMatmulPreferenceSetAttribute(call.preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &wide,
                                       sizeof wide);
  CHECK(call.choose() == CUBLAS_STATUS_SUCCESS);
}

TEST_CASE("the fake cuBLASLt refuses inconsistent descriptors", "[cublaslt]") {
  cublasLtMatrixLayout_t l = nullptr;
  CHECK(cublasLtMatrixLayoutCreate(&l, CUDA_R_32F, 8, 3, 7) ==
        CUBLAS_STATUS_INVALID_VALUE);  // leading dimension
  CHECK(cublasLtMatrixLayoutCreate(&l, CUDA_R_32F, 0, 3, 7) == CUBLAS_STATUS_INVALID_VALUE);  // no elements
  {
    Call call;
    call.relayout(call.b, CUDA_R_32F, 5, 3, 5);  // k differs
    CHECK(call.choose() == CUBLAS_STATUS_INVALID_VALUE);
  }
  {
    Call call;
    call.relayout(call.b, CUDA_R_16BF, 4, 3, 4);  // types differ
    CHECK(call.choose() == CUBLAS_STATUS_INVALID_VALUE);
  }
  {
    Call call;
    REQUIRE(call.choose() == CUBLAS_STATUS_SUCCESS);
    CHECK(call.multiply(call.va + 1, 0) == CUBLAS_STATUS_INVALID_VALUE);  // 256 bytes were promised
    CHECK(call.multiply(call.va, 0, 16) ==
          CUBLAS_STATUS_INVALID_VALUE);  // less workspace than the algorithm takes
    CHECK(call.multiply(nullptr, 0) == CUBLAS_STATUS_INVALID_VALUE);
    const cublasOperation_t transposed = CUBLAS_OP_T;
    cublasLtMatmulDescSetAttribute(call.operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                   sizeof transposed);
    call.relayout(call.a, CUDA_R_32F, 4, 2, 4);
    CHECK(call.multiply(call.va, 0) ==
          CUBLAS_STATUS_INVALID_VALUE);  // the algorithm was chosen for another problem
  }
}
