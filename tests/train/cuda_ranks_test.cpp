// Training on several GPU ranks agrees with CPUs: every ZeRO stage, through pinned memory and over NCCL. The
// ranks are threads that share one GPU; NCCL is the emulator's fake.
#include <catch2/catch.hpp>
#include <cmath>
#include <mutex>
#include <tuple>

#include "checkpoint/state_hash.h"
#include "checkpoint/store.h"
#include "comm/device.h"
#include "comm/threads.h"
#include "core/parallel_for.h"
#include "eval/evaluate.h"
#include "support/enums.h"
#include "support/gpu.h"
#include "support/ragged_training.h"
#include "support/steps.h"
#include "support/tiny_training.h"

namespace sluice::test {
namespace {

std::vector<Transport> transports() {
  if (threads_have_nccl()) return {Transport::host, Transport::nccl};
  return {Transport::host};
}

struct Outcome {
  std::vector<double> losses, norms;
  uint64_t bits = 0;
  std::string transport;
};

struct Shape {
  int ranks = 2;
  int64_t zero_stage = 0, expert = 1, context = 1;
  Determinism determinism = Determinism::same_layout;
  DeviceChoice device = DeviceChoice::cuda;
  Transport transport = Transport::host;
};

/// Trains, and saves to `folder` if it is given.
template <class T>
Outcome train(const T& t, const Shape& shape, int64_t steps, const std::string& folder = "") {
  Outcome outcome;
  std::mutex mutex;
  Config config = t.config;
  config.train.device = shape.device;
  config.parallel.zero_stage = shape.zero_stage;
  config.parallel.expert = shape.expert;
  config.parallel.context = shape.context;
  config.parallel.determinism = shape.determinism;
  config.parallel.transport = shape.transport;
  run_thread_ranks(shape.ranks, [&](Communicator& c) {
    set_num_threads(1);
    const Blend data = t.blend();
    Trainer trainer(config, data, &c);
    trainer.initialize();
    Outcome mine;
    std::tie(mine.losses, mine.norms) = take_steps(trainer, steps);
    mine.bits = state_hash(trainer.context(), trainer.content(), trainer.ranks());
    mine.transport = trainer.communication().transport();
    if (!folder.empty()) {
      CheckpointStore store(folder, config.checkpoint, trainer.content(), &trainer.context(),
                            &trainer.ranks());
      store.save(trainer.content());
      if (!store.wait()) throw std::runtime_error("not saved");
    }
    const std::scoped_lock lock(mutex);
    outcome.bits += mine.bits;  // only rank 0 has them
    mine.bits = outcome.bits;
    if (outcome.losses.empty()) outcome = mine;
    if (outcome.losses != mine.losses || outcome.norms != mine.norms)
      throw std::runtime_error("ranks disagree");
  });
  return outcome;
}

struct Training : TinyTraining {
  explicit Training(Precision precision = Precision::f32) : TinyTraining(precision) {
    config.train.micro_batch_size = 1;
    config.train.global_batch_size = 6;
    config.data.validation.clear();
    if (precision == Precision::bf16) config.model.head_dim = 64;
  }
};

void check_close(const Outcome& gpu, const Outcome& cpu, double tolerance) {
  REQUIRE(gpu.losses.size() == cpu.losses.size());
  for (size_t i = 0; i < cpu.losses.size(); ++i) {
    INFO("step " << i << ": CPU " << cpu.losses[i] << ", GPU " << gpu.losses[i]);
    CHECK(std::abs(gpu.losses[i] - cpu.losses[i]) <= tolerance);
    CHECK(gpu.norms[i] == Approx(cpu.norms[i]).epsilon(20 * tolerance));
  }
}

}  // namespace

TEST_CASE(
    "two and three ranks on GPUs train as on CPUs at every ZeRO stage, and bitwise equal over every "
    "transport",
    "[device_ranks]") {
  if (no_device()) return;
  const Training t;
  for (const int ranks : {2, 3})
    for (const int64_t stage : {0, 1, 2, 3}) {
      if (ranks == 3 && stage == 1) continue;
      INFO(ranks << " ranks, ZeRO " << stage);
      const Outcome cpu = train(t, {.ranks = ranks, .zero_stage = stage, .device = DeviceChoice::cpu}, 4);
      uint64_t bits = 0;
      for (const Transport transport : transports()) {
        const Shape shape{.ranks = ranks, .zero_stage = stage, .transport = transport};
        const Outcome gpu = train(t, shape, 4);
        INFO(gpu.transport);
        CHECK(gpu.transport == (transport == Transport::nccl ? "nccl" : "host threads"));
        check_close(gpu, cpu, 1e-4);
        CHECK((bits == 0 || bits == gpu.bits));
        bits = gpu.bits;
      }
      CHECK(train(t, {.ranks = ranks, .zero_stage = stage}, 4).bits == bits);
    }
}

TEST_CASE(
    "ranks on GPUs: bf16, gradients sent in bf16, experts balanced over the global batch, recomputed blocks",
    "[device_ranks]") {
  if (no_device()) return;
  Training t(Precision::bf16);
  t.add_experts();
  t.config.model.moe.moe_intermediate_size = 24;
  t.config.train.recompute = Recompute::block;
  t.config.parallel.gradient_dtype = GradientDtype::bf16;
  for (const int64_t stage : {0, 2, 3}) {
    INFO("ZeRO " << stage);
    const Outcome cpu = train(t, {.zero_stage = stage, .device = DeviceChoice::cpu}, 3);
    const Outcome gpu = train(t, {.zero_stage = stage}, 3);
    check_close(gpu, cpu, 3e-2);
    CHECK(train(t, {.zero_stage = stage}, 3).bits == gpu.bits);
  }
}

TEST_CASE("expert parallelism on GPUs agrees with CPUs, in one round and in several, at every ZeRO stage",
          "[device_ranks]") {
  if (no_device()) return;
  struct Variant {
    Precision precision;
    double capacity;
    int ranks;
    int64_t stage;
  };
  for (const Variant& v :
       {Variant{Precision::f32, 2.0, 4, 3}, {Precision::f32, 0.3, 2, 0}, {Precision::bf16, 0.3, 2, 2}}) {
    INFO(v.ranks << " ranks, capacity " << v.capacity << ", ZeRO " << v.stage);
    Training t(v.precision);
    t.add_experts();
    t.config.train.global_batch_size = 2 * v.ranks;
    t.config.model.moe.moe_intermediate_size = 24;
    t.config.parallel.expert_capacity = v.capacity;
    if (v.stage == 0) t.config.train.recompute = Recompute::block;
    const double tolerance = v.precision == Precision::f32 ? 1e-4 : 3e-2;
    const Outcome cpu =
        train(t, {.ranks = v.ranks, .zero_stage = v.stage, .expert = 2, .device = DeviceChoice::cpu}, 3);
    uint64_t bits = 0;
    for (const Transport transport : transports()) {
      const Outcome gpu =
          train(t, {.ranks = v.ranks, .zero_stage = v.stage, .expert = 2, .transport = transport}, 3);
      check_close(gpu, cpu, tolerance);
      CHECK((bits == 0 || bits == gpu.bits));
      bits = gpu.bits;
    }
  }
}

TEST_CASE("exact training on GPUs is bitwise independent of the layout, through host memory and over NCCL",
          "[device_ranks]") {
  if (no_device()) return;
  struct Variant {
    Precision precision;
    bool experts;
    ExactSum sum;
    std::vector<Shape> shapes;
  };
  const auto exact = [](int ranks, int64_t stage, int64_t expert = 1, Transport transport = Transport::host) {
    return Shape{.ranks = ranks,
                 .zero_stage = stage,
                 .expert = expert,
                 .determinism = Determinism::exact,
                 .transport = transport};
  };
  const Transport other = transports().back();
  for (const Variant& v :
       {Variant{Precision::f32, false, ExactSum::tree, {exact(2, 0), exact(1, 2), exact(4, 3, 1, other)}},
        Variant{
            Precision::f32, true, ExactSum::fixed64, {exact(2, 1, 2), exact(2, 2, 2, other), exact(4, 3, 2)}},
        Variant{Precision::bf16, true, ExactSum::tree, {exact(2, 1, 2), exact(4, 0, 2), exact(2, 3)}}}) {
    INFO("precision " << static_cast<int>(v.precision) << ", experts " << v.experts << ", sum "
                      << static_cast<int>(v.sum));
    Training t(v.precision);
    t.config.train.global_batch_size = 4;
    t.config.parallel.exact_sum = v.sum;
    if (v.experts) {
      t.add_experts();
      t.config.model.moe.moe_intermediate_size = 32;
      t.config.model.moe.load_balance = {
          .coefficient = 0.1,
          .scope = v.sum == ExactSum::tree ? BalanceScope::micro_batch : BalanceScope::previous_step};
    } else {
      t.config.model.attention.head_balance = {.coefficient = 1e-2, .scope = HeadBalanceScope::previous_step};
    }
    const Outcome one = train(t, exact(1, 0), 3);
    check_close(one,
                train(t, {.ranks = 1, .determinism = Determinism::exact, .device = DeviceChoice::cpu}, 3),
                v.precision == Precision::f32 ? 1e-4 : 3e-2);
    for (const Shape& shape : v.shapes) {
      INFO(shape.ranks << " ranks, ZeRO " << shape.zero_stage << ", experts on " << shape.expert);
      const Outcome several = train(t, shape, 3);
      CHECK(several.losses == one.losses);
      CHECK(several.norms == one.norms);
      CHECK((several.bits == one.bits));
    }
    // Otherwise the comparison would prove nothing.
    if (v.precision == Precision::f32) CHECK((train(t, {.ranks = 2}, 3).bits != one.bits));
  }
}

TEST_CASE("GPUs that share sequences train as one CPU does, with every kind of attention", "[device_ranks]") {
  if (no_device()) return;
  for_each_value<AttentionKind>([&](AttentionKind kind) {
    INFO(name_of(kind));
    RaggedTraining t(Precision::f32);
    t.config.model.attention.kind = kind;
    if (kind == AttentionKind::sparse) use_sparse_attention(t.config);
    check_close(train(t, {.context = 2}, 3), train(t, {.ranks = 1, .device = DeviceChoice::cpu}, 3), 1e-4);
  });
}

TEST_CASE("GPUs that share sequences: ZeRO, experts, data parallelism, transports and bf16",
          "[device_ranks]") {
  if (no_device()) return;
  struct Variant {
    Precision precision;
    Shape shape;
  };
  for (const Variant& v : {Variant{Precision::f32, {.ranks = 4, .zero_stage = 3, .context = 2}},
                           {Precision::f32, {.ranks = 4, .zero_stage = 0, .expert = 2, .context = 4}},
                           {Precision::bf16, {.ranks = 2, .zero_stage = 2, .context = 2}}}) {
    INFO(v.shape.ranks << " ranks, context " << v.shape.context << ", ZeRO " << v.shape.zero_stage
                       << ", experts on " << v.shape.expert);
    RaggedTraining t(v.precision);
    if (v.precision == Precision::bf16) t.config.model.head_dim = 64;
    if (v.shape.expert > 1) t.add_experts();
    t.config.model.attention.kind = AttentionKind::sink;
    t.config.model.attention.head_balance = {.coefficient = 1e-2};
    const double tolerance = v.precision == Precision::f32 ? 1e-4 : 3e-2;
    const Outcome cpu = train(t, {.ranks = 1, .device = DeviceChoice::cpu}, 3);
    uint64_t bits = 0;
    for (const Transport transport : transports()) {
      Shape shape = v.shape;
      shape.transport = transport;
      const Outcome gpu = train(t, shape, 3);
      check_close(gpu, cpu, tolerance);
      CHECK((bits == 0 || bits == gpu.bits));
      bits = gpu.bits;
    }
  }
}

TEST_CASE("an evaluation by GPUs that share sequences finds what one CPU finds", "[device_ranks]") {
  if (no_device()) return;
  const bool sparse = GENERATE(false, true);
  Training t;
  t.config.model.vocab_size = 257;
  t.config.model.initializer_range = 0.3;
  t.config.model.attention.kind = AttentionKind::sink;
  if (sparse) use_sparse_attention(t.config);
  t.config.data.document_mask = true;
  t.config.data.validation = {{"held_out", t.folder / "held_out", 1.0}};
  t.config.eval.max_tokens = 700;
  t.config.eval.prompts = {"ab", "the question"};
  t.config.eval.prompt_tokens = 4;
  t.config.train.global_batch_size = 2;
  const auto tokenizer = make_tokenizer({});
  const auto evaluate = [&](int ranks, DeviceChoice device) {
    EvalResult result;
    std::mutex mutex;
    Config config = t.config;
    config.parallel.context = ranks;
    config.train.device = device;
    run_thread_ranks(ranks, [&](Communicator& c) {
      set_num_threads(1);
      const Blend data = t.blend();
      Trainer trainer(config, data, &c);
      trainer.initialize();
      trainer.step();
      trainer.wait_for_weights();
      Evaluator evaluator(config.data.validation, config, *tokenizer, 0);
      evaluator.also({}, config, *tokenizer);
      const EvalResult mine = *evaluator.run(
          trainer.context(), trainer.model(), trainer.store(), trainer.micro_batch(), trainer.analysed(),
          [] { return false; }, nullptr, ranks == 1);
      const std::scoped_lock lock(mutex);
      if (c.rank() == ranks - 1) result = mine;  // all have it
    });
    return result;
  };
  const EvalResult one = evaluate(1, DeviceChoice::cpu);
  REQUIRE(one.samples.size() == 2);
  for (const int ranks : {2, 4}) {
    INFO(ranks << " ranks");
    const EvalResult gpu = evaluate(ranks, DeviceChoice::cuda);
    CHECK(gpu.sets[0].tokens == one.sets[0].tokens);
    CHECK(gpu.sets[0].loss == Approx(one.sets[0].loss).epsilon(1e-4));
    for (size_t i = 0; i < 2; ++i) CHECK(gpu.samples[i].text == one.samples[i].text);
    REQUIRE(gpu.analysis.layers.size() == one.analysis.layers.size());
    for (size_t l = 0; l < one.analysis.layers.size(); ++l) {
      const LayerSummary &a = gpu.analysis.layers[l], &b = one.analysis.layers[l];
      const auto near = [](double x) { return Approx(x).epsilon(1e-3).margin(1e-6); };
      CHECK(a.first_token_attention == near(b.first_token_attention));
      CHECK(a.residual_max.first == near(b.residual_max.first));
      CHECK(a.residual_max.rest == near(b.residual_max.rest));
      CHECK(a.value_norm.first == near(b.value_norm.first));
      CHECK(a.value_norm.rest == near(b.value_norm.rest));
      REQUIRE(a.selection.has_value() == sparse);
      if (sparse) CHECK(a.selection->mass == near(b.selection->mass));
      if (sparse) CHECK(a.selection->keys == near(b.selection->keys));
    }
  }
}

TEST_CASE("exact sums over shared sequences are refused on a GPU", "[device_ranks]") {
  if (no_device()) return;
  const RaggedTraining t(Precision::f32);
  CHECK_THROWS_WITH(train(t, {.context = 2, .determinism = Determinism::exact}, 1),
                    Catch::Contains("needs train.device: cpu"));
}

TEST_CASE("a single GPU with sharded optimizer state trains as without", "[device_ranks]") {
  if (no_device()) return;
  const Training t;
  const Outcome whole = train(t, {.ranks = 1, .zero_stage = 0}, 3);
  for (const int64_t stage : {1, 2, 3})
    check_close(train(t, {.ranks = 1, .zero_stage = stage}, 3), whole, 1e-5);
}

TEST_CASE("a sharded checkpoint of GPU ranks resumes on one CPU, and vice versa", "[device_ranks]") {
  if (no_device()) return;
  Training t;
  const std::string folder = t.folder / "ckpt";
  const auto next_loss = [&](const Shape& shape) {
    double loss = 0;
    Config config = t.config;
    config.train.device = shape.device;
    config.parallel.zero_stage = shape.zero_stage;
    run_thread_ranks(shape.ranks, [&](Communicator& c) {
      set_num_threads(1);
      const Blend data = t.blend();
      Trainer trainer(config, data, &c);
      trainer.restore(newest_valid_checkpoint(folder));
      if (trainer.next_step() != 3) throw std::runtime_error("not the step that was saved");
      const double mine = trainer.step().loss;
      if (c.rank() == 0) loss = mine;
    });
    return loss;
  };
  train(t, {.ranks = 2, .zero_stage = 3}, 3, folder);
  const double cpu = next_loss({.ranks = 1, .device = DeviceChoice::cpu});
  CHECK(next_loss({.ranks = 2, .zero_stage = 2}) == Approx(cpu).epsilon(1e-5));
  CHECK(next_loss({.ranks = 3, .zero_stage = 3}) == Approx(cpu).epsilon(1e-5));
  CHECK(next_loss({.ranks = 1, .zero_stage = 1}) == Approx(cpu).epsilon(1e-5));
}

}  // namespace sluice::test
