#include "train/trainer.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <malloc.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <limits>
#include <string_view>

#include "config/load.h"
#include "core/parallel_for.h"
#include "support/model.h"
#include "support/tiny_training.h"

// Counts heap allocations while enabled, except those within libraries: oneDNN allocates for bookkeeping
// whenever a primitive runs, and the OpenMP runtime when a team changes size. They free this memory, as
// mallinfo2 shows. Sanitizers have their own allocator.
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define SLUICE_COUNTS_ALLOCATIONS 1
namespace {
std::atomic<bool> counting{false};
std::atomic<int64_t> allocations{0};
thread_local bool looking = false;

bool from_a_library() {
  void* frames[48];
  const int depth = backtrace(frames, 48);
  for (int i = 0; i < depth; ++i) {
    Dl_info info;
    if (!dladdr(frames[i], &info) || !info.dli_fname) continue;
    const std::string_view file = info.dli_fname;
    for (const char* library : {"libdnnl", "libgomp", "libopenblas"})
      if (file.find(library) != std::string_view::npos) return true;
  }
  return false;
}

void count() {
  if (!counting.load(std::memory_order_relaxed) || looking) return;
  looking = true;
  if (!from_a_library()) allocations.fetch_add(1, std::memory_order_relaxed);
  looking = false;
}
}  // namespace
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void* malloc(size_t n) { return count(), __libc_malloc(n); }
void* calloc(size_t n, size_t size) { return count(), __libc_calloc(n, size); }
void* realloc(void* p, size_t n) { return count(), __libc_realloc(p, n); }
void* aligned_alloc(size_t alignment, size_t n) { return count(), __libc_memalign(alignment, n); }
void* memalign(size_t alignment, size_t n) { return count(), __libc_memalign(alignment, n); }
int posix_memalign(void** p, size_t alignment, size_t n) {
  count();
  *p = __libc_memalign(alignment, n);
  return *p ? 0 : 12;
}
}
#endif

namespace sluice {
namespace {

using test::all_bits;
using test::TinyTraining;

struct Threads {
  int before = num_threads();
  explicit Threads(int n) { set_num_threads(n); }
  ~Threads() { set_num_threads(before); }
};

std::vector<double> losses_of(Trainer& trainer, int64_t steps) {
  std::vector<double> losses;
  for (int64_t i = 0; i < steps; ++i) {
    const StepMetrics m = trainer.step();
    losses.push_back(m.loss);
    losses.push_back(m.grad_norm);
  }
  return losses;
}

std::vector<double> fresh_losses(const TinyTraining& t, int64_t steps) {
  const Blend data = t.blend();
  Trainer trainer(t.config, data);
  trainer.initialize();
  return losses_of(trainer, steps);
}

ParamStore::Id id_of(const ParamStore& store, const std::string& name) {
  for (size_t i = 0; i < store.specs().size(); ++i)
    if (store.specs()[i].name == name) return static_cast<ParamStore::Id>(i);
  FAIL("no parameter " << name);
  return 0;
}

void set_first(const Tensor& t, double x) { test::Pool::set(t, 0, x); }

}  // namespace

TEST_CASE("20 steps equal 10 steps, a checkpoint and 10 more, bit for bit", "[trainer]") {
  const auto precision = GENERATE(Precision::f32, Precision::bf16);
  const int threads = GENERATE(1, 2);
  const std::string variant = GENERATE("dense", "experts", "nanochat");
  INFO("precision " << static_cast<int>(precision) << ", threads " << threads << ", " << variant);
  const Threads use(threads);
  TinyTraining t(precision);
  if (variant == "experts") t.add_experts();
  if (variant == "nanochat") t.make_nanochat();
  const Blend data = t.blend();

  Trainer straight(t.config, data);
  straight.initialize();
  std::vector<double> first = losses_of(straight, 10);
  const std::vector<double> expected = losses_of(straight, 10);

  {
    Trainer half(t.config, data);
    half.initialize();
    CHECK(losses_of(half, 10) == first);
    CheckpointContent content = half.content();
    content.config_yaml = to_yaml(t.config);
    CheckpointStore store(t.folder / "ckpt", t.config.checkpoint, content);
    store.save(content);
    REQUIRE(store.wait());
  }
  Trainer resumed(t.config, data);
  const CheckpointInfo info = newest_valid_checkpoint(t.folder / "ckpt");
  REQUIRE(info.step == 10);
  resumed.restore(info);
  CHECK(resumed.next_step() == 10);
  CHECK(losses_of(resumed, 10) == expected);
  CHECK(all_bits(resumed) == all_bits(straight));
  CHECK(resumed.content().state == straight.content().state);
  CHECK(resumed.policy().state() == straight.policy().state());  // its windows hold twenty values, not ten
}

TEST_CASE("the loss falls, in every precision", "[trainer]") {
  const auto precision = GENERATE(Precision::f32, Precision::bf16, Precision::f64);
  const bool experts = GENERATE(false, true);
  TinyTraining t(precision);
  if (experts) t.add_experts();
  t.config.train.max_steps = 60;
  const auto losses = fresh_losses(t, 60);
  CHECK(losses[0] == Approx(std::log(32)).margin(0.2));
  CHECK(losses[losses.size() - 2] < 0.75 * losses[0]);
}

TEST_CASE("nanochat's model learns with Muon, starting at a loss of ln V", "[trainer][muon]") {
  const auto precision = GENERATE(Precision::f32, Precision::bf16);
  TinyTraining t(precision);
  t.make_nanochat();
  const auto losses = fresh_losses(t, 10);
  CHECK(losses[0] == Approx(std::log(32)).epsilon(1e-6));  // an output head of zeros
  CHECK(losses[18] < 0.75 * losses[0]);
}

TEST_CASE("Muon updates experts one by one, and leaves routers to AdamW", "[trainer][muon]") {
  TinyTraining t;
  t.add_experts();
  t.config.optimizer.type = OptimizerType::muon;
  const Blend data = t.blend();
  Trainer trainer(t.config, data);
  trainer.initialize();
  CHECK(losses_of(trainer, 10)[18] < 3.2);
  const auto second = [&](const char* name) {
    return trainer.optimizer().state(id_of(trainer.store(), name), ".v");
  };
  CHECK(second("model.layers.1.mlp.experts.3.up_proj.weight").empty());
  CHECK(second("model.layers.0.self_attn.gate_proj.weight").empty());
  CHECK(!second("model.layers.1.mlp.gate.weight").empty());
  CHECK(!second("model.embed_tokens.weight").empty());
}

TEST_CASE("training overfits one batch to below 0.01 nats", "[trainer]") {
  TinyTraining t;
  // As many samples as one step uses, so that every step sees all of them.
  test::write_tokens(t.folder / "one", {test::random_tokens(4 * 32 + 1, 31, 3)}, 32);
  t.config.data.train = {{"one", t.folder / "one", 1.0}};
  t.config.train.max_steps = 300;
  t.config.optimizer.weight_decay = 0;
  t.config.optimizer.lr = 1e-2;
  const auto losses = fresh_losses(t, 300);
  CHECK(losses[losses.size() - 2] < 0.01);
}

TEST_CASE("recomputation gives the same bits as stored activations", "[trainer]") {
  const bool experts = GENERATE(false, true);
  TinyTraining t;
  t.config.model.num_hidden_layers = 4;
  if (experts) t.add_experts();
  if (experts) t.config.model.moe.mlp_only_layers = {0, 2};
  const auto kept = fresh_losses(t, 5);
  for (const Recompute recompute : {Recompute::mlp, Recompute::block}) {
    t.config.train.recompute = recompute;
    CHECK(fresh_losses(t, 5) == kept);
  }
}

TEST_CASE("micro-batches add up to the global batch", "[trainer]") {
  const bool experts = GENERATE(false, true);
  TinyTraining t(Precision::f64);
  if (experts) t.add_experts();
  // Token fractions counted over the step so far depend on the micro-batches; apart from this loss nothing
  // does.
  t.config.model.moe.load_balance.coefficient = 0;
  t.config.train.micro_batch_size = 4;
  const auto whole = fresh_losses(t, 5);
  for (const int64_t micro : {1, 2}) {
    t.config.train.micro_batch_size = micro;
    const auto parts = fresh_losses(t, 5);
    for (size_t i = 0; i < whole.size(); ++i) CHECK(parts[i] == Approx(whole[i]).epsilon(1e-10));
  }
}

TEST_CASE("losses do not depend on the number of threads", "[trainer]") {
  const std::string variant = GENERATE("dense", "experts", "nanochat");
  TinyTraining t(Precision::f64);
  if (variant == "experts") t.add_experts();
  if (variant == "nanochat") t.make_nanochat();
  std::vector<double> one, two;
  {
    const Threads use(1);
    one = fresh_losses(t, 5);
  }
  const Threads use(2);
  two = fresh_losses(t, 5);
  for (size_t i = 0; i < one.size(); ++i) CHECK(two[i] == Approx(one[i]).epsilon(1e-10));
}

#ifdef SLUICE_COUNTS_ALLOCATIONS
TEST_CASE("after two steps, a step allocates nothing", "[trainer]") {
  const auto precision = GENERATE(Precision::f32, Precision::bf16, Precision::f64);
  const auto recompute = GENERATE(Recompute::none, Recompute::mlp, Recompute::block);
  INFO("precision " << static_cast<int>(precision) << ", recompute " << static_cast<int>(recompute));
  TinyTraining t(precision);
  t.config.train.recompute = recompute;
  if (recompute == Recompute::mlp)
    t.make_nanochat();
  else
    t.add_experts();
  t.config.model.attention.gates.push_back(
      {.position = GatePosition::value, .granularity = GateGranularity::headwise});
  t.config.model.norm_placement = NormPlacement::sandwich;
  t.config.model.attention.head_balance = {.coefficient = 1e-2, .scope = HeadBalanceScope::previous_step};
  const Blend data = t.blend();
  Trainer trainer(t.config, data);
  trainer.initialize();
  trainer.step();
  trainer.step();
  allocations = 0;
  // Memory that a C library allocates and frees stays in malloc's thread cache the first time and is counted;
  // allocations of every step would show each time.
  bool even = false;
  for (int pair = 0; pair < 3 && !even; ++pair) {
    const auto before = mallinfo2();
    counting = true;
    trainer.step();
    trainer.step();
    counting = false;
    const auto after = mallinfo2();
    even = after.uordblks + after.hblkhd == before.uordblks + before.hblkhd;
  }
  CHECK(allocations.load() == 0);
  CHECK(even);
}
#endif

TEST_CASE("a non-finite step reports its origin, and does not change weights, moments and Adam's step count",
          "[trainer]") {
  TinyTraining t;
  const Blend data = t.blend();
  Trainer trainer(t.config, data);
  trainer.initialize();
  trainer.step();
  const std::string name = "model.layers.1.mlp.down_proj.weight";
  const Tensor weight = trainer.store().value(id_of(trainer.store(), name));
  const double x = test::Pool::get(weight, 0);
  set_first(weight, std::numeric_limits<double>::quiet_NaN());
  trainer.store().pack(trainer.context());
  const std::string before = all_bits(trainer);
  const StepMetrics m = trainer.step();
  CHECK(m.skipped);
  CHECK_THAT(trainer.problem(), Catch::Contains("not finite") && Catch::Contains("the weight " + name));
  CHECK(all_bits(trainer) == before);
  CHECK(trainer.optimizer().steps_applied() == 1);
  CHECK(trainer.next_step() == 2);  // data and learning rate continue

  set_first(weight, x);
  trainer.store().pack(trainer.context());
  CHECK_FALSE(trainer.step().skipped);
  CHECK(trainer.optimizer().steps_applied() == 2);
}

TEST_CASE("an overflowing activation is reported where it first appears", "[trainer]") {
  TinyTraining t;
  const Blend data = t.blend();
  Trainer trainer(t.config, data);
  trainer.initialize();
  // Finite weights whose product is not.
  const Tensor up = trainer.store().value(id_of(trainer.store(), "model.layers.1.mlp.up_proj.weight"));
  const Tensor down = trainer.store().value(id_of(trainer.store(), "model.layers.1.mlp.down_proj.weight"));
  for (const Tensor& w : {up, down})
    for (int64_t i = 0; i < w.numel(); ++i) test::Pool::set(w, i, 1e30);
  trainer.store().pack(trainer.context());
  CHECK(trainer.step().skipped);
  CHECK_THAT(trainer.problem(), Catch::Contains("the activation layers.1.mlp"));
}

TEST_CASE("too many bad steps in a row end a run with the documented exit code", "[trainer]") {
  TinyTraining t;
  t.config.optimizer.lr = 1e30;
  t.config.optimizer.warmup_steps = 0;
  const Blend data = t.blend();
  Trainer trainer(t.config, data);
  trainer.initialize();
  test::expect_error(ExitCode::numeric, {"not finite", "more than 10 of the last 1000"}, [&] {
    for (int i = 0; i < 20; ++i) trainer.step();
  });
  t.config.train.on_nonfinite = BadStepPolicy::stop;
  Trainer strict(t.config, data);
  strict.initialize();
  test::expect_error(ExitCode::numeric, {"not finite"}, [&] {
    for (int i = 0; i < 20; ++i) strict.step();
  });
}

TEST_CASE("gradients are clipped to the global norm", "[trainer]") {
  // With Adam a uniform scale of the gradients changes almost nothing, so look at the first moment.
  TinyTraining t;
  t.config.train.max_grad_norm = 0.01;
  const Blend data = t.blend();
  Trainer trainer(t.config, data);
  trainer.initialize();
  const StepMetrics m = trainer.step();
  REQUIRE(m.grad_norm > 0.01);
  double squares = 0;
  for (int id = 0; id < static_cast<int>(trainer.store().specs().size()); ++id) {
    const Tensor first_moment = trainer.optimizer().state(id, ".m");
    for (int64_t i = 0; i < first_moment.numel(); ++i)
      squares += std::pow(test::Pool::get(first_moment, i), 2);
  }
  CHECK(std::sqrt(squares) == Approx((1 - t.config.optimizer.beta1) * 0.01).epsilon(1e-3));
}

}  // namespace sluice
