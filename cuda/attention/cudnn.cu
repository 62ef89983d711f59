// cuDNN's attention as an operation graph: the pattern its flash kernels are recognised by, of cuDNN's
// documentation of fused attention. Causal, grouped heads, the softmax's statistics as lse; no documents, no
// sink, no lse gradient. The order of dq's sums varies from run to run regardless of Context::deterministic:
// it serves only as a comparison. Not yet run on a GPU (without one, the heuristics of cuDNN 9.19 return
// sm_90 kernels for both graphs, head_dim 64, 128 and 256, with and without grouped heads); in emulation, and
// without cuDNN's headers, selecting it is an error.
#include "attention/cudnn.h"

#if !defined(SLUICE_EMULATION) && __has_include(<cudnn.h>)
#define SLUICE_HAS_CUDNN
#endif

#if !defined(SLUICE_HAS_CUDNN)
namespace sluice::cuda {
namespace {
[[noreturn]] void absent() { fail(ExitCode::usage, "attention.kernel cudnn: this build has no cuDNN"); }
}  // namespace

void attention_cudnn_forward(Context&, const AttentionForward&) { absent(); }
void attention_cudnn_backward(Context&, const AttentionBackward&) { absent(); }

}  // namespace sluice::cuda
#else
#include <limits>
#include <map>
#include <memory>

#include "attention/cudnn_graph.h"
#include "common/state.h"

namespace sluice::cuda {
namespace {

using cudnn::Descriptor;
using cudnn::Dims;
using cudnn::GraphBuilder;

struct Plan {
  std::unique_ptr<GraphBuilder> graph;  // the plan's tensors live as long as it
  std::vector<Descriptor> plan;         // one
  int64_t workspace = 0;
};

/// Of one direction, by shape.
using Key = std::array<int64_t, 6>;  // backward, tokens, heads, kv_heads, head_dim, dv's row

struct Cudnn : BackendState {
  cudnn::Library library;
  cudnnHandle_t handle = nullptr;
  std::map<Key, Plan> plans;

  Cudnn() {
    library.load();
    library.check(library.create(&handle), "cudnnCreate");
  }
  ~Cudnn() override {
    plans.clear();
    if (handle) library.destroy(handle);
  }
};

Cudnn& cudnn_of(Context& ctx) {
  State& s = state(ctx);
  if (!s.cudnn) s.cudnn = std::make_unique<Cudnn>();
  return static_cast<Cudnn&>(*s.cudnn);
}

/// (T, H, D) as cuDNN sees it: (1, H, T, D), and transposed (1, H, D, T).
struct Rows {
  Dims dims, strides;
};
Rows rows(int64_t tokens, int64_t heads, int64_t depth) {
  return {{1, heads, tokens, depth}, {tokens * heads * depth, depth, heads * depth, 1}};
}
Rows columns(int64_t tokens, int64_t heads, int64_t depth) {
  return {{1, heads, depth, tokens}, {tokens * heads * depth, depth, 1, heads * depth}};
}

// What is bound, in the order in which the graphs make it.
enum Forward : int64_t { kQ, kK, kV, kO, kLse, kScale, kMinusInfinity, kForwardBound };
enum Backward : int64_t {
  bQ,
  bK,
  bV,
  bO,
  bDo,
  bLse,
  bDq,
  bDk,
  bDv,
  bSum,
  bDqSum,
  bScale,
  bMinusInfinity,
  bOne,
  kBackwardBound
};

/// S = scale Q K^T, causal; lse; O = softmax(S) V.
void build_forward(GraphBuilder& g, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t depth) {
  const auto bind = [&](const Rows& r, cudnnDataType_t type) { return g.bound(type, r.dims, r.strides); };
  const auto q = bind(rows(tokens, heads, depth), CUDNN_DATA_BFLOAT16);
  const auto k = bind(columns(tokens, kv_heads, depth), CUDNN_DATA_BFLOAT16);
  const auto v = bind(rows(tokens, kv_heads, depth), CUDNN_DATA_BFLOAT16);
  const auto o = bind(rows(tokens, heads, depth), CUDNN_DATA_BFLOAT16);
  const Dims square = {1, heads, tokens, tokens}, column = {1, heads, tokens, 1};
  const auto lse = g.bound(CUDNN_DATA_FLOAT, column, {heads * tokens, tokens, 1, 1});
  const auto scale = g.scalar(), minus_infinity = g.scalar();

  const auto f = [&](Dims d) { return g.inner(CUDNN_DATA_FLOAT, d); };
  const auto s = f(square), scaled = f(square);
  g.matmul(q, k, s);
  g.pointwise(CUDNN_POINTWISE_MUL, scaled, s, scale);
  const auto masked = g.causal(scaled, square, minus_infinity);
  const auto maximum = f(column), shifted = f(square), e = f(square), sum = f(column), log_sum = f(column);
  g.reduce(CUDNN_REDUCE_TENSOR_MAX, maximum, masked);
  g.pointwise(CUDNN_POINTWISE_SUB, shifted, masked, maximum);
  g.pointwise(CUDNN_POINTWISE_EXP, e, shifted);
  g.reduce(CUDNN_REDUCE_TENSOR_ADD, sum, e);
  g.pointwise(CUDNN_POINTWISE_LOG, log_sum, sum);
  g.pointwise(CUDNN_POINTWISE_ADD, lse, maximum, log_sum);
  const auto p = g.inner(CUDNN_DATA_BFLOAT16, square);
  g.pointwise(CUDNN_POINTWISE_DIV, p, e, sum);
  g.matmul(p, v, o);
}

/// sum = <dO, O>;  P = exp(scale Q K^T - lse), causal;  dV = P^T dO;  dS = scale P (dO V^T - sum);  dK = dS^T
/// Q;  dQ = dS K.
/// dv_row: elements from one token's dv to the next's.
void build_backward(GraphBuilder& g, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t depth,
                    int64_t dv_row) {
  const auto bind = [&](const Rows& r, cudnnDataType_t type) { return g.bound(type, r.dims, r.strides); };
  const Rows wide = rows(tokens, heads, depth), narrow = rows(tokens, kv_heads, depth),
             apart = {narrow.dims, {tokens * dv_row, depth, dv_row, 1}},
             transposed = columns(tokens, kv_heads, depth);
  const Dims square = {1, heads, tokens, tokens}, column = {1, heads, tokens, 1},
             full = {1, heads, tokens, depth};
  const Dims column_strides = {heads * tokens, tokens, 1, 1};
  const auto q = bind(wide, CUDNN_DATA_BFLOAT16), k = bind(transposed, CUDNN_DATA_BFLOAT16),
             v = bind(transposed, CUDNN_DATA_BFLOAT16), o = bind(wide, CUDNN_DATA_BFLOAT16),
             d_o = bind(wide, CUDNN_DATA_BFLOAT16);
  const auto lse = g.bound(CUDNN_DATA_FLOAT, column, column_strides);
  const auto dq = bind(wide, CUDNN_DATA_BFLOAT16), dk = bind(narrow, CUDNN_DATA_BFLOAT16),
             dv = bind(apart, CUDNN_DATA_BFLOAT16);
  const auto sum = g.bound(CUDNN_DATA_FLOAT, column, column_strides);
  const auto dq_sum = g.bound(CUDNN_DATA_FLOAT, full, {heads * tokens * depth, tokens * depth, depth, 1});
  const auto scale = g.scalar(), minus_infinity = g.scalar(), one = g.scalar();

  const auto f = [&](Dims d) { return g.inner(CUDNN_DATA_FLOAT, d); };
  const auto product = g.inner(CUDNN_DATA_FLOAT, full, wide.strides), reduced = f(column);
  g.pointwise(CUDNN_POINTWISE_MUL, product, d_o, o);
  g.reduce(CUDNN_REDUCE_TENSOR_ADD, reduced, product);
  g.pointwise(CUDNN_POINTWISE_MUL, sum, reduced, one);

  const auto s = f(square), scaled = f(square), shifted = f(square), p = f(square);
  g.matmul(q, k, s);
  g.pointwise(CUDNN_POINTWISE_MUL, scaled, s, scale);
  g.pointwise(CUDNN_POINTWISE_SUB, shifted, scaled, lse);
  const auto masked = g.causal(shifted, square, minus_infinity);
  g.pointwise(CUDNN_POINTWISE_EXP, p, masked);

  const Dims turned = {heads * tokens * tokens, tokens * tokens, 1, tokens};
  const auto reduce_heads = [&](GraphBuilder::Id left, GraphBuilder::Id right, GraphBuilder::Id out) {
    if (heads == kv_heads) return g.matmul(left, right, out);
    const auto all = g.inner(CUDNN_DATA_BFLOAT16, full);
    g.matmul(left, right, all);
    g.reduce(CUDNN_REDUCE_TENSOR_ADD, out, all);
  };
  const auto p_turned = g.inner(CUDNN_DATA_BFLOAT16, square, turned);
  g.reshape(p_turned, p);
  reduce_heads(p_turned, d_o, dv);

  const auto dp = f(square), centred = f(square), weighted = f(square);
  const auto ds = f(square);
  g.matmul(d_o, v, dp);
  g.pointwise(CUDNN_POINTWISE_SUB, centred, dp, sum);
  g.pointwise(CUDNN_POINTWISE_MUL, weighted, centred, p);
  g.pointwise(CUDNN_POINTWISE_MUL, ds, weighted, scale);
  const auto ds_turned = g.inner(CUDNN_DATA_BFLOAT16, square, turned);
  g.reshape(ds_turned, ds);
  reduce_heads(ds_turned, q, dk);

  const auto k_rows = g.inner(CUDNN_DATA_BFLOAT16, narrow.dims, narrow.strides);
  g.reshape(k_rows, k);
  g.matmul(ds, k_rows, dq_sum);
  g.pointwise(CUDNN_POINTWISE_IDENTITY, dq, dq_sum);
}

/// Upper bound on the workspace of cuDNN's plans beside the sums above; computed from shapes, because a dry
/// run has no cuDNN. A plan that wants more is refused, and cuDNN is there to be raced against: so it has a
/// gigabyte.
int64_t workspace_bytes(bool backward, int64_t tokens, int64_t heads, int64_t depth) {
  return (int64_t{1} << 30) + (backward ? 2 * tokens * heads * depth * 4 : 0);
}

const Plan& plan_for(Cudnn& c, const Key& key) {
  const auto found = c.plans.find(key);
  if (found != c.plans.end()) return found->second;
  const auto [backward, tokens, heads, kv_heads, depth, dv_row] = key;
  Plan plan;
  plan.graph = std::make_unique<GraphBuilder>(c.library);
  if (backward)
    build_backward(*plan.graph, tokens, heads, kv_heads, depth, dv_row);
  else
    build_forward(*plan.graph, tokens, heads, kv_heads, depth);
  plan.plan = plan.graph->plan(c.handle);
  if (plan.plan.empty())
    fail(ExitCode::usage,
         "attention.kernel cudnn: cuDNN has no {} for {} tokens, {} and {} heads of {} on this card",
         backward ? "backward" : "forward", tokens, heads, kv_heads, depth);
  int64_t count = 0;
  c.library.check(c.library.get_attribute(plan.plan[0].raw(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                          CUDNN_TYPE_INT64, 1, &count, &plan.workspace),
                  "cudnnBackendGetAttribute");
  if (plan.workspace > workspace_bytes(backward != 0, tokens, heads, depth))
    fail(ExitCode::usage, "attention.kernel cudnn: cuDNN asks for {} bytes of workspace", plan.workspace);
  return c.plans.emplace(key, std::move(plan)).first->second;
}

/// The first N tensors are bound to `pointers`: scalars to host memory.
template <size_t N>
void execute(Context& ctx, Cudnn& c, const Plan& plan, std::array<void*, N> pointers, void* workspace) {
  std::array<int64_t, N> ids;
  for (size_t i = 0; i < N; ++i) ids[i] = GraphBuilder::unique_id(static_cast<int64_t>(i));
  Descriptor pack(c.library, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, ids.data(), static_cast<int64_t>(N))
      .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, pointers.data(),
           static_cast<int64_t>(N))
      .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace)
      .finalize("cudnn variant pack");
  c.library.check(c.library.set_stream(c.handle, stream(ctx)), "cudnnSetStream");
  c.library.check(c.library.execute(c.handle, plan.plan[0].raw(), pack.raw()), "cudnnBackendExecute");
}

/// z0 = scale <q_t, k_0>, where asked for, and the report of a first key other than 0. One warp per (head,
/// token); bound by memory.
constexpr int kWarps = 8;
__global__ void __launch_bounds__(32 * kWarps)
    first_logit(float* z0, const nv_bf16* q, const nv_bf16* k, const int* first_key, int64_t tokens,
                int heads, int group, int kv_heads, int depth, float scale, KernelStatus* status) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= tokens * heads) return;
  const int head = static_cast<int>(row / tokens), lane = static_cast<int>(threadIdx.x % 32);
  const int64_t token = row % tokens;
  if (lane == 0 && head == 0 && first_key[token] != 0)
    report(status, KernelStatus::documents_in_cudnn, first_key[token]);
  if (!z0) return;
  const nv_bf16 *x = q + (token * heads + head) * depth, *y = k + head / group * depth;
  float sum = 0;
  for (int d = lane; d < depth; d += 32) sum += to_float(x[d]) * to_float(y[d]);
  sum = warp_sum(sum);
  if (lane == 0) z0[row] = scale * sum;
}

void* writable(const void* p) { return const_cast<void*>(p); }

}  // namespace

void attention_cudnn_forward(Context& ctx, const AttentionForward& a) {
  if (a.queries != a.keys)
    fail(ExitCode::usage,
         "attention.kernel cudnn: not with a cache of earlier keys, nor with parallel.context above 1");
  SLUICE_CHECK(!a.y, "attention_cudnn_forward: fuses no gate");
  ScratchScope t(ctx.scratch);
  const Tensor workspace =
      t.alloc("cudnn workspace", DType::u8, {workspace_bytes(false, a.queries, a.heads, a.head_dim)});
  if (ctx.dry_run || a.queries == 0) return;
  Cudnn& c = cudnn_of(ctx);
  const Plan& plan = plan_for(c, {0, a.queries, a.heads, a.kv_heads, a.head_dim, 0});
  launch(ctx, "attention_first_logit",
         {dim3(blocks_for(a.queries * (a.z0 ? a.heads : 1), kWarps)), dim3(32 * kWarps)}, first_logit, a.z0,
         a.q, a.k, a.visible.first, a.queries, a.heads, a.heads / a.kv_heads, a.kv_heads, a.head_dim, a.scale,
         kernel_status(ctx));
  float scale = a.scale, minus_infinity = -std::numeric_limits<float>::infinity();
  std::array<void*, kForwardBound> pointers{};
  pointers[kQ] = writable(a.q), pointers[kK] = writable(a.k), pointers[kV] = writable(a.v),
  pointers[kO] = a.o;
  pointers[kLse] = a.lse, pointers[kScale] = &scale, pointers[kMinusInfinity] = &minus_infinity;
  execute(ctx, c, plan, pointers, workspace.data);
}

void attention_cudnn_backward(Context& ctx, const AttentionBackward& a) {
  if (a.coef0) fail(ExitCode::usage, "attention.kernel cudnn: no coefficient of the first key");
  if (a.has_dlse) fail(ExitCode::usage, "attention.kernel cudnn: no gradient of lse (sinks, head balance)");
  ScratchScope t(ctx.scratch);
  const Tensor sum = t.alloc("cudnn <dO, O>", DType::f32, {a.heads, a.queries});
  const Tensor dq_sum = t.alloc("cudnn dq in f32", DType::f32, {a.queries, a.heads, a.head_dim});
  const Tensor workspace =
      t.alloc("cudnn workspace", DType::u8, {workspace_bytes(true, a.queries, a.heads, a.head_dim)});
  if (ctx.dry_run || a.queries == 0) return;
  Cudnn& c = cudnn_of(ctx);
  const Plan& plan = plan_for(c, {1, a.queries, a.heads, a.kv_heads, a.head_dim, a.dv_row});
  if (c.library.version() < 90600)  // later ones do it themselves
    check(cudaMemsetAsync(dq_sum.data, 0, static_cast<size_t>(dq_sum.bytes()), stream(ctx)),
          "cudaMemsetAsync");
  float scale = a.scale, minus_infinity = -std::numeric_limits<float>::infinity(), one = 1;
  std::array<void*, kBackwardBound> pointers{};
  pointers[bQ] = writable(a.q), pointers[bK] = writable(a.k), pointers[bV] = writable(a.v),
  pointers[bO] = writable(a.o);
  pointers[bDo] = writable(a.d_o), pointers[bLse] = writable(a.lse);
  pointers[bDq] = a.dq, pointers[bDk] = a.dk, pointers[bDv] = a.dv;
  pointers[bSum] = sum.data, pointers[bDqSum] = dq_sum.data;
  pointers[bScale] = &scale, pointers[bMinusInfinity] = &minus_infinity, pointers[bOne] = &one;
  execute(ctx, c, plan, pointers, workspace.data);
}

}  // namespace sluice::cuda
#endif
