// A cuBLASLt for emulation: the calls of cuda/matmul.cu, which check their arguments as strictly as the
// documents allow and compute in f32, one element at a time. Every refusal prints its reason on stderr. A
// product is launched as a kernel with one thread, so that it can be captured in a graph. Who asks for
// several algorithms gets those of `kKinds`.
#include "fake_cublaslt.h"

#include <cublasLt.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "emulation.h"
#include "fake_runtime.h"

namespace {
std::atomic<int64_t> asked_for_one = 0, asked_for_several = 0;
}  // namespace

namespace emu {
HeuristicCalls heuristic_calls() { return {asked_for_one, asked_for_several}; }
}  // namespace emu

struct cublasLtContext {
  uint32_t alive = 0xc0b1a5;
};

namespace {

cublasStatus_t refuse(const char* why) {
  std::fprintf(stderr, "emulated cuBLASLt: %s\n", why);
  return CUBLAS_STATUS_INVALID_VALUE;
}
#define REQUIRE(condition, why) \
  if (!(condition)) return refuse(why)

struct Operation {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  cublasOperation_t transpose_a, transpose_b;
};
struct Layout {
  cudaDataType_t type;
  uint64_t rows, columns;
  int64_t stride;
};
struct Preference {
  uint64_t workspace;
  uint32_t alignment[4];  // a, b, c, d
  uint32_t reductions;    // allowed, as bits
};
/// Algorithms as the heuristic lists them. The second and the third are those that timing must not choose:
/// one that does not run, and the fastest, whose results differ from run to run. The fourth adds up in
/// another order than the first, so that bits show which of them computed.
struct Kind {
  double
      seconds;  // added to the time of its events, for products are computed in no time that means anything
  int lanes;    // partial sums
  bool runs = true, repeats = true;
};
constexpr Kind kKinds[] = {{0.3, 16}, {0, 16, /*runs=*/false}, {0.1, 16, true, /*repeats=*/false}, {0.2, 8}};

/// The problem for which an algorithm was chosen.
struct Algorithm {
  uint64_t problem;
  uint64_t workspace;
  uint32_t alignment[4];
  uint32_t kind;  // in kKinds
};
static_assert(sizeof(Operation) <= sizeof(cublasLtMatmulDescOpaque_t));
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t));
static_assert(sizeof(Preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t));
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

template <class T, class Opaque>
T get(const Opaque* opaque) {
  T t;
  std::memcpy(&t, opaque, sizeof t);
  return t;
}
template <class T, class Opaque>
void put(Opaque* opaque, const T& t) {
  std::memset(opaque, 0, sizeof *opaque);
  std::memcpy(opaque, &t, sizeof t);
}

/// c (m, n) column-major = op(a) op(b).
struct Problem {
  Operation operation;
  Layout a, b, c;
  int64_t m() const { return static_cast<int64_t>(c.rows); }
  int64_t n() const { return static_cast<int64_t>(c.columns); }
  int64_t k() const {
    return static_cast<int64_t>(operation.transpose_a == CUBLAS_OP_N ? a.columns : a.rows);
  }
  bool narrow_result() const { return c.type == CUDA_R_16BF; }
  uint64_t fingerprint() const {
    uint64_t h = 1469598103934665603u;
    for (const uint64_t v :
         {uint64_t(operation.compute), uint64_t(operation.transpose_a), uint64_t(operation.transpose_b),
          uint64_t(a.type), a.rows, a.columns, uint64_t(a.stride), uint64_t(b.type), b.rows, b.columns,
          uint64_t(b.stride), uint64_t(c.type), c.rows, c.columns, uint64_t(c.stride)})
      h = (h ^ v) * 1099511628211u;
    return h;
  }
};

bool stored(cudaDataType_t t) { return t == CUDA_R_32F || t == CUDA_R_16BF; }

cublasStatus_t describe(Problem& p, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                        cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d) {
  REQUIRE(operation && a && b && c && d, "a null descriptor");
  p = {get<Operation>(operation), get<Layout>(a), get<Layout>(b), get<Layout>(c)};
  const Layout& out = get<Layout>(d);
  REQUIRE(
      out.type == p.c.type && out.rows == p.c.rows && out.columns == p.c.columns && out.stride == p.c.stride,
      "C and D differ");
  REQUIRE(p.operation.compute == CUBLAS_COMPUTE_32F && p.operation.scale == CUDA_R_32F,
          "an unsupported compute type");
  REQUIRE(p.a.type == p.b.type && stored(p.a.type) && (p.c.type == p.a.type || p.c.type == CUDA_R_32F),
          "inconsistent types of A, B and C");
  const bool ta = p.operation.transpose_a == CUBLAS_OP_T, tb = p.operation.transpose_b == CUBLAS_OP_T;
  const uint64_t rows = ta ? p.a.columns : p.a.rows, ka = ta ? p.a.rows : p.a.columns;
  const uint64_t kb = tb ? p.b.columns : p.b.rows, columns = tb ? p.b.rows : p.b.columns;
  REQUIRE(rows == p.c.rows && columns == p.c.columns && ka == kb, "inconsistent sizes of A, B and C");
  return CUBLAS_STATUS_SUCCESS;
}

bool aligned(const void* p, uint32_t bytes) {
  return bytes == 0 || reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

float load(const void* p, cudaDataType_t type, int64_t i) {
  return type == CUDA_R_32F ? static_cast<const float*>(p)[i]
                            : __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
}

/// Widened, k contiguous: rows of op(a), columns of op(b).
std::vector<float> widen(const void* p, const Layout& l, int64_t count, int64_t k, bool k_is_column) {
  std::vector<float> wide(static_cast<size_t>(count * k));
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < k; ++j)
      wide[static_cast<size_t>(i * k + j)] =
          load(p, l.type, k_is_column ? i + j * l.stride : j + i * l.stride);
  return wide;
}

template <int kLanes>  // partial sums that vectorise
float dot(const float* x, const float* y, int64_t k) {
  float lane[kLanes] = {}, sum = 0;
  int64_t l = 0;
  for (; l + kLanes <= k; l += kLanes)
    for (int64_t q = 0; q < kLanes; ++q) lane[q] += x[l + q] * y[l + q];
  for (; l < k; ++l) sum += x[l] * y[l];
  for (const float v : lane) sum += v;
  return sum;
}

void compute(Problem p, Kind kind, float alpha, const void* a, const void* b, float beta, const void* c,
             void* d, void* workspace, uint64_t workspace_bytes) {
  static std::atomic<int> runs = 0;
  const float scale = kind.repeats ? alpha : alpha * (1 + 0.125f * static_cast<float>(runs++ % 2));
  // A product overwrites its workspace.
  if (workspace) std::memset(workspace, 0xff, std::min<uint64_t>(workspace_bytes, 4096));
  const int64_t m = p.m(), n = p.n(), k = p.k();
  const std::vector<float> wa = widen(a, p.a, m, k, p.operation.transpose_a == CUBLAS_OP_N);
  const std::vector<float> wb = widen(b, p.b, n, k, p.operation.transpose_b == CUBLAS_OP_T);
  for (int64_t j = 0; j < n; ++j)
    for (int64_t i = 0; i < m; ++i) {
      const float *x = &wa[static_cast<size_t>(i * k)], *y = &wb[static_cast<size_t>(j * k)];
      const float sum = kind.lanes == 8 ? dot<8>(x, y, k) : dot<16>(x, y, k);
      const int64_t at = i + j * p.c.stride;
      const float value = scale * sum + (beta != 0 ? beta * load(c, p.c.type, at) : 0.0f);
      if (p.c.type == CUDA_R_32F)
        static_cast<float*>(d)[at] = value;
      else
        static_cast<__nv_bfloat16*>(d)[at] = __float2bfloat16_rn(value);
    }
}

}  // namespace

extern "C" {

const char* cublasLtGetStatusName(cublasStatus_t status) {
  switch (static_cast<int>(status)) {  // the library's enum: only these are ever returned
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
  }
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = new cublasLtContext;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  REQUIRE(handle && handle->alive == 0xc0b1a5, "not a handle");
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation, cublasComputeType_t compute_type,
                                        cudaDataType_t scale) {
  *operation = new cublasLtMatmulDescOpaque_t;
  put(*operation, Operation{compute_type, scale, CUBLAS_OP_N, CUBLAS_OP_N});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
  delete operation;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              size_t bytes) {
  Operation o = get<Operation>(operation);
  REQUIRE(bytes == sizeof(cublasOperation_t), "an attribute of another size");
  cublasOperation_t t;
  std::memcpy(&t, value, sizeof t);
  REQUIRE(t == CUBLAS_OP_N || t == CUBLAS_OP_T, "an unsupported transposition");
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSA)
    o.transpose_a = t;
  else if (attribute == CUBLASLT_MATMUL_DESC_TRANSB)
    o.transpose_b = t;
  else
    return refuse("an unsupported attribute of an operation");
  put(operation, o);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t stride) {
  REQUIRE(rows > 0 && columns > 0, "a layout without elements");
  REQUIRE(stride >= static_cast<int64_t>(rows), "a leading dimension below the number of rows");
  *layout = new cublasLtMatrixLayoutOpaque_t;
  put(*layout, Layout{type, rows, columns, stride});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new cublasLtMatmulPreferenceOpaque_t;
  put(*preference, Preference{0, {256, 256, 256, 256}, CUBLASLT_REDUCTION_SCHEME_MASK});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  Preference p = get<Preference>(preference);
  if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) {
    REQUIRE(bytes == sizeof p.workspace, "an attribute of another size");
    std::memcpy(&p.workspace, value, bytes);
  } else if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) {
    REQUIRE(bytes == sizeof p.reductions, "an attribute of another size");
    std::memcpy(&p.reductions, value, bytes);
  } else {
    const int i = attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES;
    REQUIRE(i >= 0 && i < 4, "an unsupported preference");
    REQUIRE(bytes == sizeof p.alignment[0], "an attribute of another size");
    std::memcpy(&p.alignment[i], value, bytes);
  }
  put(preference, p);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
  REQUIRE(handle && handle->alive == 0xc0b1a5, "not a handle");
  REQUIRE(preference && requested > 0 && results && found, "nowhere to put an algorithm");
  Problem problem;
  if (const cublasStatus_t s = describe(problem, operation, a, b, c, d); s != CUBLAS_STATUS_SUCCESS) return s;
  const Preference p = get<Preference>(preference);
  // The real one may then round partial sums to the dtype of the result.
  REQUIRE(!problem.narrow_result() || p.reductions == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE,
          "a product of bf16 whose partial sums may be added in bf16");
  ++(requested == 1 ? asked_for_one : asked_for_several);
  *found = std::min<int>(requested, std::size(kKinds));
  for (int i = 0; i < *found; ++i) {
    Algorithm algorithm{problem.fingerprint(), p.workspace, {}, static_cast<uint32_t>(i)};
    std::memcpy(algorithm.alignment, p.alignment, sizeof p.alignment);
    results[i] = {};
    put(&results[i].algo, algorithm);
    results[i].workspaceSize = p.workspace;  // the largest that is allowed
    results[i].state = CUBLAS_STATUS_SUCCESS;
  }
  return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion() { return CUBLAS_VERSION; }

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algorithm,
                                       cublasLtMatmulHeuristicResult_t* result) {
  REQUIRE(handle && handle->alive == 0xc0b1a5, "not a handle");
  REQUIRE(algorithm && result, "a null pointer");
  Problem problem;
  if (const cublasStatus_t s = describe(problem, operation, a, b, c, d); s != CUBLAS_STATUS_SUCCESS) return s;
  const Algorithm checked = get<Algorithm>(algorithm);
  if (checked.problem != problem.fingerprint() || checked.kind >= std::size(kKinds))
    return CUBLAS_STATUS_INVALID_VALUE;  // an answer, for which no reason is printed
  result->workspaceSize = checked.workspace;
  result->state = CUBLAS_STATUS_SUCCESS;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
  REQUIRE(handle && handle->alive == 0xc0b1a5, "not a handle");
  REQUIRE(alpha && beta && a && b && c && d && algorithm, "a null pointer");
  Problem problem;
  if (const cublasStatus_t s = describe(problem, operation, a_layout, b_layout, c_layout, d_layout);
      s != CUBLAS_STATUS_SUCCESS)
    return s;
  const Algorithm chosen = get<Algorithm>(algorithm);
  REQUIRE(chosen.problem == problem.fingerprint(), "an algorithm chosen for another problem");
  REQUIRE(aligned(a, chosen.alignment[0]) && aligned(b, chosen.alignment[1]) &&
              aligned(c, chosen.alignment[2]) && aligned(d, chosen.alignment[3]),
          "a pointer less aligned than the algorithm was promised");
  REQUIRE(workspace_bytes >= chosen.workspace && (chosen.workspace == 0 || workspace),
          "too little workspace");
  REQUIRE(aligned(workspace, 16), "a workspace that is not aligned to 16 bytes");
  REQUIRE(chosen.kind < std::size(kKinds), "an algorithm that no heuristic gave");
  const Kind& kind = kKinds[chosen.kind];
  if (!kind.runs) return CUBLAS_STATUS_NOT_SUPPORTED;
  float one, factor;
  std::memcpy(&one, alpha, sizeof one);
  std::memcpy(&factor, beta, sizeof factor);
  emu::LaunchParams params;
  params.grid = params.block = dim3(1);
  params.name = "cublasLtMatmul";
  params.stream = stream;
  emu::launch(params, compute, problem, kind, one, a, b, factor, c, d, workspace, chosen.workspace);
  emu::spend(kind.seconds);
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
