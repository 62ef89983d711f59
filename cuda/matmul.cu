// Plans by product and alignment. Not yet run on a GPU.
#include <map>
#include <memory>
#include <tuple>

#include "common/launch.h"
#include "common/state.h"
#include "matmul.h"
#include "matmul_plan.h"

namespace sluice::cuda {
namespace {

/// The words of a timed algorithm, which a context may be given at any time; 0: the heuristic's first.
using Key = std::tuple<GpuProduct, Alignments, AlgorithmWords>;

struct Plans : BackendState {
  struct Chosen {
    explicit Chosen(const GpuProduct& product) : plan(product) {}
    MatmulPlan plan;
    AlgorithmWords algorithm{};
  };
  LtHandle handle;
  std::map<Key, std::unique_ptr<Chosen>> by_key;
};

const Plans::Chosen& plan_for(Plans& plans, const Key& key) {
  std::unique_ptr<Plans::Chosen>& kept = plans.by_key[key];
  if (kept) return *kept;
  const auto& [product, alignments, words] = key;
  auto chosen = std::make_unique<Plans::Chosen>(product);
  chosen->algorithm =
      words != AlgorithmWords{} ? words : chosen->plan.algorithms(plans.handle.get(), alignments, 1).front();
  kept = std::move(chosen);
  return *kept;
}

}  // namespace

void multiply(Context& ctx, const GpuProduct& p, const void* a, const void* b, void* c) {
  SLUICE_CHECK(p.in == p.out || (p.in == DType::bf16 && p.out == DType::f32),
               "multiply: {} to {} is not computed", dtype_name(p.in), dtype_name(p.out));
  SLUICE_CHECK(p.in == DType::f32 || p.in == DType::bf16, "multiply: {} runs on the CPU only",
               dtype_name(p.in));
  ScratchScope t(ctx.scratch);
  const Tensor workspace = t.alloc("cublasLt workspace", DType::u8, {kWorkspaceBytes});
  if (p.m == 0 || p.n == 0) return;
  if (ctx.dry_run) {
    if (ctx.products && p.k > 0) ctx.products->insert(p);
    return;
  }
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
  const Alignments alignments = {Alignments::of(a), Alignments::of(b), Alignments::of(c)};
  const ProductAlgorithm* algorithm =
      ctx.algorithms && alignments.least() >= kTimedAlignment ? ctx.algorithms->find(p) : nullptr;
  const Plans::Chosen& chosen =
      plan_for(plans, {p, alignments, algorithm ? algorithm->words : AlgorithmWords{}});
  chosen.plan.check(
      chosen.plan.run(plans.handle.get(), chosen.algorithm, a, b, c, workspace.data, stream(ctx)),
      "cublasLtMatmul");
}

}  // namespace sluice::cuda
