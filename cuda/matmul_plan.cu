// cuBLASLt is column-major. A row-major matrix is the column-major matrix of its transpose, so c = a b is
// computed as c^T = b^T a^T: b comes first, and no operand is copied. Not yet run on a GPU: in emulation a
// fake cuBLASLt (tests/emulation) checks the descriptors and computes.
#include <algorithm>
#include <cstring>

#include "common/launch.h"
#include "matmul.h"
#include "matmul_plan.h"

namespace sluice::cuda {
namespace {

cudaDataType_t cuda_type(DType t) { return t == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

cublasLtMatmulAlgo_t described(const AlgorithmWords& words) {
  cublasLtMatmulAlgo_t algorithm{};
  static_assert(sizeof algorithm.data == sizeof words);
  std::memcpy(algorithm.data, words.data(), sizeof words);
  return algorithm;
}

}  // namespace

int Alignments::of(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  return static_cast<int>(std::min<uintptr_t>(address & (~address + 1), 256));
}

int Alignments::least() const { return std::min({a, b, c}); }

LtHandle::~LtHandle() {
  if (handle_) cublasLtDestroy(handle_);
}

cublasLtHandle_t LtHandle::get() {
  if (handle_) return handle_;
  if (const cublasStatus_t status = cublasLtCreate(&handle_); status != CUBLAS_STATUS_SUCCESS)
    fail(ExitCode::internal, "cublasLtCreate: {}", cublasLtGetStatusName(status));
  return handle_;
}

void MatmulPlan::check(cublasStatus_t status, const char* call) const {
  const GpuProduct& p = product_;
  if (status != CUBLAS_STATUS_SUCCESS)
    fail(ExitCode::internal, "{}({} x {} x {}, {} to {}): {}", call, p.m, p.n, p.k, dtype_name(p.in),
         dtype_name(p.out), cublasLtGetStatusName(status));
}

/// A stored row-major matrix of `rows` rows, as cuBLASLt sees it.
cublasLtMatrixLayout_t MatmulPlan::layout(DType type, int64_t rows, int64_t columns, int64_t stride) const {
  cublasLtMatrixLayout_t l = nullptr;
  check(cublasLtMatrixLayoutCreate(&l, cuda_type(type), static_cast<uint64_t>(columns),
                                   static_cast<uint64_t>(rows), stride > 0 ? stride : columns),
        "cublasLtMatrixLayoutCreate");
  return l;
}

MatmulPlan::MatmulPlan(const GpuProduct& product) : product_(product) {
  const GpuProduct& p = product_;
  try {
    check(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, cublasOperation_t value) {
      check(cublasLtMatmulDescSetAttribute(operation_, attribute, &value, sizeof value),
            "cublasLtMatmulDescSetAttribute");
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    a_ = p.b_transposed ? layout(p.in, p.n, p.k, p.b_stride) : layout(p.in, p.k, p.n, p.b_stride);
    b_ = p.a_transposed ? layout(p.in, p.k, p.m, p.a_stride) : layout(p.in, p.m, p.k, p.a_stride);
    c_ = layout(p.out, p.m, p.n, p.c_stride);
  } catch (...) {
    release();
    throw;
  }
}

MatmulPlan::~MatmulPlan() { release(); }

void MatmulPlan::release() {
  for (cublasLtMatrixLayout_t layout : {a_, b_, c_})
    if (layout) cublasLtMatrixLayoutDestroy(layout);
  if (operation_) cublasLtMatmulDescDestroy(operation_);
}

std::vector<AlgorithmWords> MatmulPlan::algorithms(cublasLtHandle_t handle, const Alignments& alignments,
                                                   int most) const {
  struct Preference {
    cublasLtMatmulPreference_t handle = nullptr;
    ~Preference() {
      if (handle) cublasLtMatmulPreferenceDestroy(handle);
    }
  } preference;
  check(cublasLtMatmulPreferenceCreate(&preference.handle), "cublasLtMatmulPreferenceCreate");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(cublasLtMatmulPreferenceSetAttribute(preference.handle, attribute, &value, sizeof value),
          "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kWorkspaceBytes));
  // A product that is split along k is summed in f32, never in the dtype of its result.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(alignments.b));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(alignments.a));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(alignments.c));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(alignments.c));

  cublasLtMatmulHeuristicResult_t results[kMostAlgorithms] = {};
  int found = 0;
  check(cublasLtMatmulAlgoGetHeuristic(handle, operation_, a_, b_, c_, c_, preference.handle, most, results,
                                       &found),
        "cublasLtMatmulAlgoGetHeuristic");
  std::vector<AlgorithmWords> out;
  for (int i = 0; i < found; ++i)
    if (results[i].state == CUBLAS_STATUS_SUCCESS)
      std::memcpy(out.emplace_back().data(), results[i].algo.data, sizeof results[i].algo.data);
  if (out.empty())
    check(found == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : results[0].state, "cublasLtMatmulAlgoGetHeuristic");
  return out;
}

bool MatmulPlan::takes(cublasLtHandle_t handle, const AlgorithmWords& algorithm) const {
  const cublasLtMatmulAlgo_t checked = described(algorithm);
  cublasLtMatmulHeuristicResult_t result{};
  return cublasLtMatmulAlgoCheck(handle, operation_, a_, b_, c_, c_, &checked, &result) ==
             CUBLAS_STATUS_SUCCESS &&
         result.workspaceSize <= static_cast<size_t>(kWorkspaceBytes);
}

cublasStatus_t MatmulPlan::run(cublasLtHandle_t handle, const AlgorithmWords& algorithm, const void* a,
                               const void* b, void* c, void* workspace, cudaStream_t stream) const {
  const float one = 1, beta = product_.accumulate ? 1.0f : 0.0f;
  const cublasLtMatmulAlgo_t chosen = described(algorithm);
  return cublasLtMatmul(handle, operation_, &one, b, a_, a, b_, &beta, c, c_, c, c_, &chosen, workspace,
                        static_cast<size_t>(kWorkspaceBytes), stream);
}

}  // namespace sluice::cuda
