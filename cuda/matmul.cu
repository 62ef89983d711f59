// cuBLASLt is column-major. A row-major matrix is the column-major matrix of its transpose, so c = a b is
// computed as c^T = b^T a^T: b comes first, and no operand is copied. Not yet run on a GPU: in emulation a
// fake cuBLASLt (tests/emulation) checks the descriptors and computes.
#include <cublasLt.h>

#include <algorithm>
#include <map>
#include <memory>
#include <tuple>

#include "common/launch.h"
#include "common/state.h"
#include "matmul.h"

namespace sluice::cuda {
namespace {

struct Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;  // in cuBLASLt's order: its a is our b
  cublasLtMatmulAlgo_t algorithm{};

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    for (cublasLtMatrixLayout_t layout : {a, b, c})
      if (layout) cublasLtMatrixLayoutDestroy(layout);
    if (operation) cublasLtMatmulDescDestroy(operation);
  }
};

/// The key of a plan: the product and the alignment of its three pointers (an algorithm with 16-byte loads
/// must not get a pointer with smaller alignment).
struct Key {
  Product p;
  int a_alignment, b_alignment, c_alignment;  // bytes, a power of two up to 256

  auto fields() const {
    return std::tuple(p.in, p.out, p.m, p.n, p.k, p.a_transposed, p.b_transposed, p.accumulate, p.a_stride,
                      p.b_stride, p.c_stride, a_alignment, b_alignment, c_alignment);
  }
  bool operator<(const Key& other) const { return fields() < other.fields(); }
};

struct Plans : BackendState {
  cublasLtHandle_t handle = nullptr;
  std::map<Key, Plan> by_product;

  ~Plans() override {
    by_product.clear();
    if (handle) cublasLtDestroy(handle);
  }
};

int alignment_of(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  return static_cast<int>(std::min<uintptr_t>(address & (~address + 1), 256));
}

cudaDataType_t cuda_type(DType t) { return t == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

void check(cublasStatus_t status, const char* call, const Product& p) {
  if (status != CUBLAS_STATUS_SUCCESS)
    fail(ExitCode::internal, "{}({} x {} x {}, {} to {}): {}", call, p.m, p.n, p.k, dtype_name(p.in),
         dtype_name(p.out), cublasLtGetStatusName(status));
}

/// A stored row-major matrix of `rows` rows, as cuBLASLt sees it.
cublasLtMatrixLayout_t layout(const Product& p, DType type, int64_t rows, int64_t columns, int64_t stride) {
  cublasLtMatrixLayout_t l = nullptr;
  check(cublasLtMatrixLayoutCreate(&l, cuda_type(type), static_cast<uint64_t>(columns),
                                   static_cast<uint64_t>(rows), stride > 0 ? stride : columns),
        "cublasLtMatrixLayoutCreate", p);
  return l;
}

void build(Plan& plan, cublasLtHandle_t handle, const Key& key) {
  const Product& p = key.p;
  check(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate",
        p);
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, cublasOperation_t value) {
    check(cublasLtMatmulDescSetAttribute(plan.operation, attribute, &value, sizeof value),
          "cublasLtMatmulDescSetAttribute", p);
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_TRANSB, p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  plan.a = p.b_transposed ? layout(p, p.in, p.n, p.k, p.b_stride) : layout(p, p.in, p.k, p.n, p.b_stride);
  plan.b = p.a_transposed ? layout(p, p.in, p.k, p.m, p.a_stride) : layout(p, p.in, p.m, p.k, p.a_stride);
  plan.c = layout(p, p.out, p.m, p.n, p.c_stride);

  struct Preference {
    cublasLtMatmulPreference_t handle = nullptr;
    ~Preference() {
      if (handle) cublasLtMatmulPreferenceDestroy(handle);
    }
  } preference;
  check(cublasLtMatmulPreferenceCreate(&preference.handle), "cublasLtMatmulPreferenceCreate", p);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(cublasLtMatmulPreferenceSetAttribute(preference.handle, attribute, &value, sizeof value),
          "cublasLtMatmulPreferenceSetAttribute", p);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kWorkspaceBytes));
  // A product that is split along k is summed in f32, never in the dtype of its result.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key.b_alignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key.a_alignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(key.c_alignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(key.c_alignment));

  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  check(cublasLtMatmulAlgoGetHeuristic(handle, plan.operation, plan.a, plan.b, plan.c, plan.c,
                                       preference.handle, 1, &result, &found),
        "cublasLtMatmulAlgoGetHeuristic", p);
  check(found > 0 ? result.state : CUBLAS_STATUS_NOT_SUPPORTED, "cublasLtMatmulAlgoGetHeuristic", p);
  plan.algorithm = result.algo;
}

const Plan& plan_for(Plans& plans, const Key& key) {
  const auto found = plans.by_product.find(key);
  if (found != plans.by_product.end()) return found->second;
  Plan& plan = plans.by_product[key];
  try {
    build(plan, plans.handle, key);
  } catch (...) {
    plans.by_product.erase(key);
    throw;
  }
  return plan;
}

}  // namespace

void multiply(Context& ctx, const Product& p, const void* a, const void* b, void* c) {
  SLUICE_CHECK(p.in == p.out || (p.in == DType::bf16 && p.out == DType::f32),
               "multiply: {} to {} is not computed", dtype_name(p.in), dtype_name(p.out));
  SLUICE_CHECK(p.in == DType::f32 || p.in == DType::bf16, "multiply: {} runs on the CPU only",
               dtype_name(p.in));
  ScratchScope t(ctx.scratch);
  const Tensor workspace = t.alloc("cublasLt workspace", DType::u8, {kWorkspaceBytes});
  if (ctx.dry_run || p.m == 0 || p.n == 0) return;
  if (p.k == 0) {  // an empty sum
    SLUICE_CHECK(p.c_stride == 0 || p.c_stride == p.n, "multiply: an empty sum with a gap between rows");
    if (!p.accumulate)
      check(cudaMemsetAsync(c, 0, static_cast<size_t>(p.m * p.n * dtype_size(p.out)), stream(ctx)),
            "cudaMemsetAsync");
    return;
  }

  State& backend = state(ctx);
  if (!backend.matmul) backend.matmul = std::make_unique<Plans>();
  Plans& plans = static_cast<Plans&>(*backend.matmul);
  if (!plans.handle) check(cublasLtCreate(&plans.handle), "cublasLtCreate", p);
  const Plan& plan = plan_for(plans, {p, alignment_of(a), alignment_of(b), alignment_of(c)});
  const float one = 1, beta = p.accumulate ? 1.0f : 0.0f;
  check(cublasLtMatmul(plans.handle, plan.operation, &one, b, plan.a, a, plan.b, &beta, c, plan.c, c, plan.c,
                       &plan.algorithm, workspace.data, static_cast<size_t>(kWorkspaceBytes), stream(ctx)),
        "cublasLtMatmul", p);
}

}  // namespace sluice::cuda
