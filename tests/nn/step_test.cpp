// One whole training step: independence of threads, and no allocations.
#include <atomic>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <cstring>
#include <new>

#include "comm/threads.h"
#include "core/parallel_for.h"
#include "optim/optimizer.h"
#include "support/model.h"
#include "support/products.h"

namespace {

std::atomic<int64_t> allocations{0}, alive{0};

}  // namespace

// Counts every operator new of this program, including the libraries it calls. Not inlined: GCC 12 would
// report a mismatch of new and free.
[[gnu::noinline]] void* operator new(size_t bytes) {
  ++allocations;
  ++alive;
  if (void* p = std::malloc(bytes ? bytes : 1)) return p;
  throw std::bad_alloc();
}
// The address sanitizer's own nothrow form would not match our delete.
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  ++allocations;
  ++alive;
  return std::malloc(bytes ? bytes : 1);
}
[[gnu::noinline]] void operator delete(void* p) noexcept {
  if (p) --alive;
  std::free(p);
}
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { operator delete(p); }

namespace sluice {
namespace {

using test::TestModel;

/// Large enough that every op divides its work.
ModelConfig middling() {
  ModelConfig c;
  c.vocab_size = 300;
  c.hidden_size = 96;
  c.num_hidden_layers = 2;
  c.num_attention_heads = 4;
  c.num_key_value_heads = 2;
  c.head_dim = 24;
  c.intermediate_size = 160;
  c.branch_clip = 1.0;
  c.norm_placement = NormPlacement::sandwich;
  c.attention.kind = AttentionKind::sink;
  c.attention.output_norm = OutputNorm::rmsnorm;
  GateConfig value, constant;
  value.position = GatePosition::value;
  value.heads = GateSharing::shared;
  value.granularity = GateGranularity::headwise;
  constant.input = GateInput::none;
  c.attention.gates = {GateConfig{}, value, constant};
  return c;
}

test::TokenBatch middling_batch() {
  test::TokenBatch batch;
  batch.add(test::random_tokens(400, 300, 1));
  batch.add(test::random_tokens(201, 300, 2));
  return batch;
}

struct Training {
  explicit Training(DType dtype) : m(middling(), middling_batch(), dtype), optimizer({}, m.store) {
    optimizer.allocate(*m.context, moments);
    optimizer.sync_master(*m.context);
  }
  double step() {
    const double loss = m.loss_and_gradient();
    optimizer.step(*m.context, 1e-3, 1.0);
    return loss;
  }
  TestModel m;
  Optimizer optimizer;
  Arena moments{"optimizer", 16 << 20};
};

}  // namespace

TEST_CASE("training gives the same bits with one thread and with several", "[step][threads]") {
  const int threads = num_threads();
  const bool same_products = test::products_keep_bits_over_threads();
  if (!same_products) WARN("the matrix library's bits depend on the number of threads on this processor");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    INFO(dtype_name(dtype));
    set_num_threads(1);  // before anything is measured: scratch memory may grow with the threads
    Training one(dtype);
    set_num_threads(3);
    Training several(dtype);
    for (int step = 0; step < 3; ++step) {
      set_num_threads(1);
      const double loss = one.step();
      set_num_threads(3);
      const double other = several.step();
      CHECK(other == Approx(loss).epsilon(1e-4));
      if (same_products) CHECK(other == loss);
    }
    if (!same_products) continue;
    const Tensor a = one.m.store.flat_values(), b = several.m.store.flat_values();
    CHECK(std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0);
  }
  set_num_threads(threads);
}

TEST_CASE("a step allocates no memory after the first one", "[step][memory]") {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    Training t(dtype);
    t.step();
    const int64_t before = allocations, alive_before = alive;
    t.step();
    const int64_t made = allocations - before, kept = alive - alive_before;
    INFO(dtype_name(dtype));
    // oneDNN, which is not used for f64, allocates and frees small host objects in every call.
    if (dtype == DType::f64) CHECK(made == 0);
    CHECK(kept == 0);
    CHECK(t.m.context->scratch.used() == 0);
  }
}

TEST_CASE("a step with expert parallelism allocates no memory either, for any number of rounds",
          "[step][memory][ranks]") {
  ModelConfig c = test::tiny_config();
  c.moe.num_experts = 6;
  c.moe.num_experts_per_tok = 2;
  c.moe.moe_intermediate_size = 4;
  std::atomic<int64_t> made{-1};
  run_thread_ranks(2, [&](Communicator& comm) {
    set_num_threads(1);
    TestModel m(c, test::tiny_batch(), DType::f64, Recompute::none, {&comm, 0.5});
    m.loss_and_gradient();
    comm.barrier();
    const int64_t before = allocations;
    comm.barrier();
    m.loss_and_gradient();
    comm.barrier();
    if (comm.rank() == 0) made = allocations - before;
    comm.barrier();
  });
  CHECK(made == 0);
}

}  // namespace sluice
