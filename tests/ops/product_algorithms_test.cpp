// Algorithms of matrix products are timed on a GPU, real or emulated. The emulated cuBLASLt has four
// (fake_cublaslt.cpp): the heuristic's first takes 0.3 s, one does not run, one takes 0.1 s with other bits
// in every run, one 0.2 s.
#include "ops/product_algorithms.h"

#include <catch2/catch.hpp>

#include "ops/linear.h"
#include "support/gpu.h"
#include "support/gradcheck.h"
#if defined(SLUICE_EMULATION)
#include "fake_cublaslt.h"
#endif

namespace sluice::test {
namespace {

using Catch::Matchers::WithinAbs;

bool emulated() { return cuda_devices()[0].emulated; }

std::vector<GpuProduct> products() {
  std::vector<GpuProduct> all;
  for (const bool a_transposed : {false, true})
    for (const bool accumulate : {false, true}) {
      GpuProduct p{.m = 24, .n = 40, .k = 48, .a_transposed = a_transposed, .accumulate = accumulate};
      all.push_back(p);
      p.in = DType::bf16, p.b_transposed = true, p.a_stride = 64, p.c_stride = 44;
      all.push_back(p);
      p.out = DType::bf16, p.c_stride = 48;
      all.push_back(p);
    }
  return all;
}

/// A linear layer's three products on the GPU, dw added to what is there.
struct Layer {
  static constexpr int64_t kRows = 24, kIn = 48, kOut = 40;
  Context ctx{int64_t{64} << 20, Device::cuda};
  Arena memory{"test", int64_t{1} << 20, Device::cuda};
  DType type;
  Tensor x, dy, y, dx, dw;
  LinearWeight w;

  explicit Layer(DType dtype) : type(dtype) {
    Pool pool;
    const auto upload = [&](const Tensor& host) {
      const Tensor t = memory.alloc("t", host.dtype, {host.dim(0), host.dim(1)});
      write_tensor(ctx, t, host.data);
      return t;
    };
    x = upload(pool.normal(type, {kRows, kIn}));
    dy = upload(pool.normal(type, {kRows, kOut}));
    w.value = upload(pool.normal(type, {kOut, kIn}));
    dw = upload(pool.normal(DType::f32, {kOut, kIn}));
    y = memory.alloc("y", type, {kRows, kOut}), dx = memory.alloc("dx", type, {kRows, kIn});
  }
  void compute() { compute(ctx); }
  void compute(Context& c) const {
    linear_forward(c, y, x, w);
    linear_backward_input(c, dx, dy, w, Into::overwrite);
    linear_backward_weight(c, dw, dy, x, Into::add);
  }
  std::set<GpuProduct> noted() const {
    std::set<GpuProduct> products;
    Context dry(0, Device::cuda);
    dry.products = &products;
    compute(dry);
    return products;
  }
  std::string bytes(const Tensor& t) {
    std::string host(static_cast<size_t>(t.bytes()), '\0');
    read_tensor(ctx, host.data(), t);
    return host;
  }
  std::string results() { return bytes(y) + bytes(dx) + bytes(dw); }
};

/// Largest difference between two results, which are of f32.
double difference(const std::string& a, const std::string& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); i += sizeof(float)) {
    float x = 0, y = 0;
    std::memcpy(&x, &a[i], sizeof x), std::memcpy(&y, &b[i], sizeof y);
    most = std::max<double>(most, std::abs(x - y));
  }
  return most;
}

}  // namespace

TEST_CASE("the fastest algorithm that runs, and repeats its bits, is chosen", "[matmul_algorithms]") {
  if (no_device()) return;
  for (const GpuProduct& product : products())
    for (const bool deterministic : {true, false}) {
      INFO(product.m << " " << product.accumulate << " " << dtype_name(product.out) << " " << deterministic);
      const ProductAlgorithms all = time_products({product}, deterministic);
      const ProductAlgorithm* chosen = all.find(product);
      REQUIRE(chosen);
      Context ctx(64, Device::cuda);
      CHECK(computes(ctx, *chosen, product));
      CHECK(chosen->us > 0);
      if (chosen->heuristic_us > 0) CHECK(chosen->us <= chosen->heuristic_us);
      if (deterministic) CHECK(chosen->bits_repeat);
      if (!emulated()) continue;
      CHECK_THAT(chosen->us, WithinAbs(deterministic ? 200e3 : 100e3, 50e3));
      CHECK_THAT(chosen->heuristic_us, WithinAbs(300e3, 50e3));
      CHECK(chosen->bits_repeat == deterministic);
      GpuProduct other = product;
      other.m = 32;
      CHECK_FALSE(computes(ctx, *chosen, other));
      ProductAlgorithm damaged = *chosen;
      damaged.words[4] ^= 0xff00;
      CHECK_FALSE(computes(ctx, damaged, product));
    }
}

TEST_CASE("a dry run notes every product once", "[matmul_algorithms]") {
  if (no_device()) return;
  Layer layer(DType::bf16);
  const std::set<GpuProduct> noted = layer.noted();
  CHECK(noted.size() == 3);
  const GpuProduct gradient{.in = DType::bf16,
                            .m = Layer::kOut,
                            .n = Layer::kIn,
                            .k = Layer::kRows,
                            .a_transposed = true,
                            .accumulate = true};
  CHECK(noted.count(gradient) == 1);
}

TEST_CASE("timed algorithms compute what the heuristic's do, and a product that adds adds once",
          "[matmul_algorithms]") {
  if (no_device()) return;
  Layer heuristic(DType::f32), timed(DType::f32), again(DType::f32);
  heuristic.compute();
  const ProductAlgorithms algorithms = time_products(timed.noted(), true);
  for (Layer* layer : {&timed, &again}) {
    layer->ctx.algorithms = &algorithms;
    layer->compute();
  }
  CHECK(difference(timed.results(), heuristic.results()) < 1e-4);
  CHECK(timed.results() == again.results());
  if (emulated()) CHECK(timed.results() != heuristic.results());
  // Back to the heuristic, on a context that has plans of timed ones.
  again.ctx.algorithms = nullptr;
  linear_forward(again.ctx, again.y, again.x, again.w);
  CHECK(again.bytes(again.y) == heuristic.bytes(heuristic.y));
}

TEST_CASE("timed products are recorded in a graph, also where they first come there", "[matmul_algorithms]") {
  if (no_device()) return;
  Layer eager(DType::f32), recorded(DType::f32);
  const ProductAlgorithms algorithms = time_products(eager.noted(), true);
  eager.ctx.algorithms = recorded.ctx.algorithms = &algorithms;
  if (!emulated()) recorded.compute();  // a GPU loads kernels outside of captures
  eager.compute();
  if (!emulated()) eager.compute();
#if defined(SLUICE_EMULATION)
  const emu::HeuristicCalls before = emu::heuristic_calls();
#endif
  Graph graph;
  graph.record(recorded.ctx, [&] { recorded.compute(); });
  graph.launch(recorded.ctx);
  synchronize(recorded.ctx);
  CHECK(recorded.results() == eager.results());
#if defined(SLUICE_EMULATION)
  CHECK(emu::heuristic_calls().for_one == before.for_one);
  CHECK(emu::heuristic_calls().for_several == before.for_several);
#endif
}

TEST_CASE("operands that lie anywhere take the heuristic's algorithm", "[matmul_algorithms]") {
  if (no_device()) return;
  Context ctx(int64_t{64} << 20, Device::cuda);
  Arena memory("test", int64_t{1} << 20, Device::cuda);
  Pool pool;
  const Tensor x = memory.alloc("x", DType::f32, {9, 7}), y = memory.alloc("y", DType::f32, {9, 5});
  LinearWeight w;
  w.value = memory.alloc("w", DType::f32, {5, 7});
  write_tensor(ctx, x, pool.normal(DType::f32, {9, 7}).data);
  write_tensor(ctx, w.value, pool.normal(DType::f32, {5, 7}).data);
  const auto result = [&] {
    linear_forward(ctx, y.rows(1, 8), x.rows(1, 8), w);  // 28 and 20 bytes behind the start
    std::string host(static_cast<size_t>(y.bytes()), '\0');
    read_tensor(ctx, host.data(), y);
    return host;
  };
  const std::string heuristic = result();
  const ProductAlgorithms algorithms = time_products({{.m = 8, .n = 5, .k = 7, .b_transposed = true}}, true);
  ctx.algorithms = &algorithms;
  CHECK(result() == heuristic);
}

}  // namespace sluice::test
