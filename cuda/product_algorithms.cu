// Algorithms of cuBLASLt timed with events around single products. A set of the second-level cache's double
// size in front of each leaves no operand in it, and keeps the GPU busy until the product is enqueued. Not
// yet run on a GPU.
#include <algorithm>
#include <optional>
#include <vector>

#include "common/launch.h"
#include "core/stopwatch.h"
#include "matmul.h"
#include "matmul_plan.h"
#include "ops/bit_sum.h"
#include "ops/product_algorithms.h"

namespace sluice::cuda {
namespace {

constexpr int kTimes = 5, kThreads = 256;
constexpr double kWorthAChange = 1.01;  // of times; less is noise, and would choose anew at every timing

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

/// Values in [-1, 1): constant ones consume less power and run faster than those of a training.
template <class T>
__global__ void __launch_bounds__(kThreads) random_values(T* x, int64_t n, uint64_t seed) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i < n)
    x[i] =
        from_float<T>(static_cast<float>(mixed_bits(seed + static_cast<uint64_t>(i)) >> 40) * 0x1p-23f - 1.f);
}

void fill_randomly(Context& ctx, const Tensor& x, uint64_t seed) {
  dispatch_storage("random_values", x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    launch(ctx, "random_values", {.grid = dim3(blocks_for(x.numel(), kThreads)), .block = dim3(kThreads)},
           random_values<T>, device_data<T>(x), x.numel(), seed << 40);
  });
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

/// One product in scratch memory, done by one algorithm after the other.
class Trial {
 public:
  Trial(Context& ctx, const GpuProduct& p)
      : ctx_(ctx),
        scratch_(ctx.scratch),
        a_(matrix("product a", p.in, p.a_transposed ? p.k : p.m, p.a_transposed ? p.m : p.k, p.a_stride)),
        b_(matrix("product b", p.in, p.b_transposed ? p.n : p.k, p.b_transposed ? p.k : p.n, p.b_stride)),
        c_(matrix("product c", p.out, p.m, p.n, p.c_stride)),
        workspace_(scratch_.alloc("cublasLt workspace", DType::u8, {kWorkspaceBytes})),
        cache_(scratch_.alloc("cache", DType::u8, {2 * int64_t{attribute(cudaDevAttrL2CacheSize)}})),
        sum_(scratch_.alloc("sum of bits", DType::i32, {2})) {
    if (ctx.dry_run) {
      bit_sum(ctx, sum_, c_, 0, 0);
      return;
    }
    fill_randomly(ctx, a_, 1);
    fill_randomly(ctx, b_, 2);
  }

  /// A hash of the result; nothing where the algorithm does not run.
  std::optional<uint64_t> bits(LtHandle& handle, const MatmulPlan& plan, const AlgorithmWords& algorithm) {
    set(c_);  // what is added to, for a product that accumulates
    if (!run(handle, plan, algorithm)) return {};
    bit_sum(ctx_, sum_, c_, 0, 0);
    uint64_t hash = 0;
    read_tensor(ctx_, &hash, sum_);
    return hash;
  }

  double seconds(LtHandle& handle, const MatmulPlan& plan, const AlgorithmWords& algorithm,
                 Stopwatch& watch) {
    set(cache_);
    watch.start();
    plan.check(plan.run(handle.get(), algorithm, a_.data, b_.data, c_.data, workspace_.data, stream(ctx_)),
               "cublasLtMatmul");
    watch.stop();
    return watch.seconds();
  }

 private:
  Tensor matrix(const char* name, DType type, int64_t rows, int64_t columns, int64_t stride) {
    return scratch_.alloc(name, type, {rows, stride > 0 ? stride : columns});
  }
  void set(const Tensor& t) {
    check(cudaMemsetAsync(t.data, 0, static_cast<size_t>(t.bytes()), stream(ctx_)), "cudaMemsetAsync");
  }
  bool run(LtHandle& handle, const MatmulPlan& plan, const AlgorithmWords& algorithm) {
    if (plan.run(handle.get(), algorithm, a_.data, b_.data, c_.data, workspace_.data, stream(ctx_)) ==
        CUBLAS_STATUS_SUCCESS)
      return true;
    cudaGetLastError();  // of a launch that was refused; an error of the GPU itself remains
    return false;
  }

  Context& ctx_;
  ScratchScope scratch_;
  Tensor a_, b_, c_, workspace_, cache_, sum_;
};

struct Candidate {
  AlgorithmWords algorithm;
  bool heuristic_first, bits_repeat;
  std::vector<double> seconds = {};
};

}  // namespace

ProductCard product_card(Context&) {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  return {.name = properties.name,
          .compute_capability = 10 * properties.major + properties.minor,
          .multiprocessors = properties.multiProcessorCount,
          .library = static_cast<int64_t>(cublasLtGetVersion())};
}

ProductAlgorithm fastest_algorithm(Context& ctx, const GpuProduct& product) {
  Trial trial(ctx, product);
  if (ctx.dry_run) return {};
  LtHandle handle;
  const MatmulPlan plan(product);
  std::vector<Candidate> candidates;
  bool first = true;
  for (const AlgorithmWords& algorithm : plan.algorithms(
           handle.get(), {kTimedAlignment, kTimedAlignment, kTimedAlignment}, MatmulPlan::kMostAlgorithms)) {
    const std::optional<uint64_t> once = trial.bits(handle, plan, algorithm);
    const bool repeats = once && once == trial.bits(handle, plan, algorithm);
    if (once && (repeats || !ctx.deterministic)) candidates.push_back({algorithm, first, repeats});
    first = false;
  }
  if (candidates.empty())
    fail(ExitCode::internal,
         "none of cuBLASLt's algorithms for {} x {} x {}, {} to {}{} runs and gives the same bits twice; "
         "train.matmul_algorithm: heuristic takes its first one without a test",
         product.m, product.n, product.k, dtype_name(product.in), dtype_name(product.out),
         product.accumulate ? ", accumulating," : "");

  Stopwatch watch(ctx);
  for (int turn = 0; turn < kTimes; ++turn)
    for (Candidate& c : candidates) c.seconds.push_back(trial.seconds(handle, plan, c.algorithm, watch));
  double best = median(candidates[0].seconds);
  for (const Candidate& c : candidates) best = std::min(best, median(c.seconds));
  const Candidate& chosen = *std::find_if(candidates.begin(), candidates.end(), [&](const Candidate& c) {
    return median(c.seconds) <= kWorthAChange * best;
  });
  return {.words = chosen.algorithm,
          .us = 1e6 * median(chosen.seconds),
          .heuristic_us = candidates[0].heuristic_first ? 1e6 * median(candidates[0].seconds) : 0,
          .bits_repeat = chosen.bits_repeat};
}

bool computes(Context&, const ProductAlgorithm& algorithm, const GpuProduct& product) {
  LtHandle handle;
  return MatmulPlan(product).takes(handle.get(), algorithm.words);
}

}  // namespace sluice::cuda
