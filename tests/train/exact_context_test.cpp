// parallel.determinism: exact with sequences that several ranks share: every bit is that of one rank.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <map>
#include <mutex>
#include <tuple>

#include "comm/threads.h"
#include "core/parallel_for.h"
#include "support/enums.h"
#include "support/ragged_training.h"
#include "support/steps.h"
#include "support/whole_state.h"

using namespace sluice;
using namespace sluice::test;

namespace {

struct Layout {
  int ranks = 1;
  int64_t context = 1, zero_stage = 0, expert = 1;
};
std::string describe(const Layout& l) {
  return fmt::format("{} ranks, context {}, stage {}, experts on {}", l.ranks, l.context, l.zero_stage,
                     l.expert);
}

struct Training : RaggedTraining {
  explicit Training(Precision precision = Precision::f32) : RaggedTraining(precision) {
    config.parallel.determinism = Determinism::exact;
    config.model.moe.load_balance.scope = BalanceScope::micro_batch;
    config.optimizer.warmup_steps = 1;
  }
};

Config on(const Layout& layout, Config config) {
  config.parallel.context = layout.context;
  config.parallel.zero_stage = layout.zero_stage;
  config.parallel.expert = layout.expert;
  return config;
}

struct Outcome {
  std::string bits;  // of weights and moments
  std::vector<double> losses, norms;
  std::map<std::string, double> scalars;  // of the last step: what the losses' states report
};

Outcome train(const Training& t, const Layout& layout, int64_t steps = 2) {
  Outcome outcome;
  WholeState state;
  std::mutex mutex;
  const Config config = on(layout, t.config);
  run_thread_ranks(layout.ranks, [&](Communicator& c) {
    set_num_threads(1);
    const Blend data = t.blend();
    Trainer trainer(config, data, &c);
    trainer.initialize();
    Outcome mine;
    std::tie(mine.losses, mine.norms) = take_steps(trainer, steps);
    for (const StepScalar& s : trainer.scalars()) mine.scalars[s.name + std::to_string(s.layer)] = s.value;
    state.add(trainer.content());
    const std::scoped_lock lock(mutex);
    if (outcome.losses.empty()) outcome = mine;
    const auto same = [](const std::vector<double>& a, const std::vector<double>& b) {
      return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                        [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); });
    };
    if (!same(outcome.losses, mine.losses) || !same(outcome.norms, mine.norms) ||
        outcome.scalars != mine.scalars)
      throw std::runtime_error("ranks disagree");
  });
  outcome.bits = state.bits();
  return outcome;
}

void check_equal(const Outcome& one, const Outcome& shared) {
  CHECK(shared.losses == one.losses);
  CHECK(shared.norms == one.norms);
  CHECK((shared.bits == one.bits));
  CHECK(shared.scalars == one.scalars);
}

/// On one rank, and where 2 and 4 share sequences, also beside data parallelism.
void check_exact(const Training& t, int64_t steps = 2) {
  const Outcome one = train(t, {}, steps);
  REQUIRE(one.norms[0] > 0);
  REQUIRE(std::isfinite(one.norms.back()));
  for (const Layout& layout : {Layout{2, 2, 0}, Layout{4, 4, 3}}) {
    INFO(describe(layout));
    check_equal(one, train(t, layout, steps));
  }
  INFO("data parallelism");
  check_equal(train(t, {2, 1, 1}, steps), train(t, {4, 2, 2}, steps));
}

}  // namespace

TEST_CASE("exact training has the same bits with sequences on 1, 2 and 4 ranks, at every ZeRO stage",
          "[context][exact][zero]") {
  const auto precision = GENERATE(Precision::f32, Precision::bf16, Precision::f64);
  const auto sum = GENERATE(ExactSum::tree, ExactSum::fixed64);
  const bool documents = GENERATE(true, false);
  INFO("precision " << name_of(precision) << ", sum " << name_of(sum) << ", documents " << documents);
  Training t(precision);
  t.config.parallel.exact_sum = sum;
  t.config.data.document_mask = documents;
  const Outcome one = train(t, {}, 3);
  for (const int64_t stage : {0, 1, 2, 3})
    for (const Layout& layout : {Layout{2, 2, stage}, Layout{4, 4, stage}, Layout{4, 2, stage}}) {
      INFO(describe(layout));
      check_equal(one, train(t, layout, 3));
    }
  t.config.parallel.determinism = Determinism::same_layout;  // otherwise nothing would be proven
  CHECK((train(t, {2, 2, 0}, 3).bits != train(t, {}, 3).bits));
}

TEST_CASE("exact training with sequences longer than the blocks of queries and keys", "[context][exact]") {
  // Chunks of 80 tokens, of which neither blocks of keys (96) nor rows of products are a part.
  const auto precision = GENERATE(Precision::f32, Precision::bf16);
  Training t(precision);
  t.config.data.seq_len = 640;
  t.config.model.hidden_size = 72;
  t.config.model.num_attention_heads = 6;
  t.config.model.num_key_value_heads = 2;
  t.config.model.head_dim = 32;
  t.config.model.intermediate_size = 100;
  SECTION("documents, sinks") { t.config.model.attention.kind = AttentionKind::sink; }
  SECTION("no documents, balance of heads") {
    t.config.data.document_mask = false;
    t.config.model.attention.head_balance.coefficient = 0.5;
    t.config.model.attention.head_balance.scope = HeadBalanceScope::micro_batch;
  }
  SECTION("a window, experts") {
    t.config.model.attention.window = 200;
    t.config.data.document_mask = false;
    t.add_experts();
  }
  SECTION("selected keys, several samples") {
    use_sparse_attention(t.config);
    t.config.model.attention.sparse.k.max = 40;
    t.config.model.attention.sparse.k.base = 30;
    t.config.data.document_mask = false;
  }
  check_exact(t);
}

TEST_CASE("exact training with fixed-point sums, of three ranks too", "[context][exact]") {
  Training t;
  t.config.data.seq_len = 48;
  t.config.parallel.exact_sum = ExactSum::fixed64;
  t.config.train.global_batch_size = 12;
  const Outcome one = train(t, {});
  for (const Layout& layout : {Layout{3, 3, 1}, Layout{6, 2, 2}, Layout{6, 3, 0}}) {
    INFO(describe(layout));
    check_equal(one, train(t, layout));
  }
}

TEST_CASE("fixed-point sums of shared sequences hold what those of one rank hold", "[context][exact]") {
  Training t;
  t.config.parallel.exact_sum = ExactSum::fixed64;
  // Gradients grow with the coefficient, until an element is beyond the limit.
  const auto skipped = [&](double coefficient, const Layout& layout) {
    t.config.model.logit_z_loss_coefficient = coefficient;
    return std::isnan(train(t, layout, 1).norms[0]);
  };
  double beyond = 1;
  while (!skipped(beyond, {})) {
    beyond *= 1.25;
    REQUIRE(beyond < 1e9);
  }
  for (const Layout& layout : {Layout{2, 2, 0}, Layout{4, 4, 2}}) {
    INFO(describe(layout) << ", coefficient " << beyond);
    CHECK(skipped(beyond, layout));
    CHECK_FALSE(skipped(beyond / 1.25, layout));
  }
}

TEST_CASE("exact training with shared sequences: every kind of attention", "[context][exact]") {
  for_each_value<AttentionKind>([&](AttentionKind kind) {
    const bool gated = kind == AttentionKind::softmax || kind == AttentionKind::sink;
    for (const bool gate : {true, false}) {
      if (!gate && !gated) continue;
      INFO(name_of(kind) << ", gate " << gate);
      Training t;
      if (kind == AttentionKind::sparse) use_sparse_attention(t.config);
      t.config.model.attention.kind = kind;
      if (!gate) t.config.model.attention.gates.clear();
      check_exact(t);
    }
  });
}

TEST_CASE("exact training with shared sequences: selected keys, and the indexer's loss",
          "[context][exact][sparse]") {
  Training t;
  use_sparse_attention(t.config);
  SparseConfig& s = t.config.model.attention.sparse;
  SECTION("without documents") { t.config.data.document_mask = false; }
  SECTION("in bf16") { t.config.train.precision = Precision::bf16; }
  SECTION("equal tokens tie") {
    s.indexer.rope = false;
    // Near ties tell whether a query's scores depend on how many queries are scored with it.
    s.k = {.policy = BudgetPolicy::fixed, .base = 4, .min = 1, .max = 4};
    t.config.data.document_mask = false;
    t.config.data.seq_len = 16;
    t.config.train.global_batch_size = 8, t.config.train.micro_batch_size = 1;
    t.config.optimizer.lr = 1e-2;
    for (const uint64_t seed : {1, 2, 3, 4, 5, 6}) {
      t.config.train.seed = seed;
      CAPTURE(seed);
      check_equal(train(t, {}, 16), train(t, {2, 2, 0}, 16));
    }
  }
  SECTION("a set of keys for each key/value head, the own one forced") {
    s.scope = IndexScope::kv_head;
    s.force_self = true;
  }
  SECTION("blocks that begin on one rank and end on another, normalised index keys") {
    s.block = 3;
    s.indexer.key_norm = true;
    s.k = {.policy = BudgetPolicy::fixed, .base = 2, .min = 1, .max = 2};
  }
  SECTION("an indexer that is not detached, with biases, and a sink") {
    s.indexer.detach_input = false;
    s.indexer.bias = true;
    s.sink = true;
    // Whose gradient of the layer's input comes before the indexer's.
    t.config.model.attention.gates.push_back({.position = GatePosition::dense_output});
  }
  SECTION("the dense warm-up") { s.phase = SparsePhase::dense_warm_up; }
  SECTION("both phases, recomputed blocks") {
    s.phase_steps = 1;
    t.config.train.recompute = Recompute::block;
  }
  check_exact(t);
}

TEST_CASE("exact training with shared sequences: every policy of the number of selected keys",
          "[context][exact][sparse]") {
  for_each_value<BudgetPolicy>([&](BudgetPolicy policy) {
    INFO(name_of(policy));
    Training t;
    use_sparse_attention(t.config);
    t.config.model.attention.sparse.k.policy = policy;
    check_exact(t, 3);  // the running mean of the variance adapts k from the second step on
  });
}

TEST_CASE("exact training with shared sequences: every position of a gate, every kind of one",
          "[context][exact]") {
  Training t;
  std::vector<GateConfig>& gates = t.config.model.attention.gates;
  for_each_value<GatePosition>([&](GatePosition position) {
    SECTION(std::string(name_of(position))) {
      gates = {{.position = position}, {.position = position}};
      gates[0].bias = 0.5;
      if (position != GatePosition::dense_output) gates[1].granularity = GateGranularity::headwise;
    }
  });
  SECTION("learned constants, and gates of what they gate") {
    gates = {{.position = GatePosition::value}, {.position = GatePosition::sdpa_output}};
    gates[0].input = GateInput::none;
    gates[1].input = GateInput::self;
  }
  SECTION("of leading channels, shared by heads") {
    gates = {{.position = GatePosition::sdpa_output}};
    gates[0].input_channels = 8;
    gates[0].heads = GateSharing::shared;
  }
  check_exact(t);
}

TEST_CASE("exact training with shared sequences: balance of heads", "[context][exact]") {
  const auto scope = GENERATE(HeadBalanceScope::micro_batch, HeadBalanceScope::previous_step);
  Training t;
  AttentionConfig& a = t.config.model.attention;
  a.head_balance.coefficient = 0.5;
  a.head_balance.scope = scope;
  SECTION("by a fused gate") {}
  SECTION("by a gate behind a norm") { a.output_norm = OutputNorm::rmsnorm; }
  SECTION("by attention on the first key") { a.gates.clear(); }
  SECTION("by sinks") { a.gates.clear(), a.kind = AttentionKind::sink; }
  SECTION("by the key of a sink") { a.gates.clear(), a.kind = AttentionKind::sink_key; }
  SECTION("by sinks of selected keys") {
    a.gates.clear();
    use_sparse_attention(t.config);
    a.sparse.sink = true;
  }
  INFO(name_of(scope));
  check_exact(t, 3);
}

TEST_CASE("exact training with shared sequences: experts", "[context][exact][moe]") {
  Training t;
  t.add_experts();
  ModelConfig& m = t.config.model;
  m.moe.num_experts = 8;
  m.moe.load_balance.coefficient = 0.5;
  m.moe.router_z_loss_coefficient = 0.01;
  SECTION("balance of a micro-batch") {}
  SECTION("balance of the previous step, recomputed blocks") {
    m.moe.load_balance.scope = BalanceScope::previous_step;
    t.config.train.recompute = Recompute::block;
  }
  SECTION("counted over the global batch, without a loss, with biases") {
    m.moe.load_balance = {.coefficient = 0, .scope = BalanceScope::global_batch};
    m.moe.bias = true;
  }
  SECTION("in bf16, fixed-point sums") {
    t.config.train.precision = Precision::bf16;
    t.config.parallel.exact_sum = ExactSum::fixed64;
  }
  check_exact(t, 3);
}

TEST_CASE("exact training with shared sequences and experts on several ranks",
          "[context][exact][moe][zero]") {
  const auto sum = GENERATE(ExactSum::tree, ExactSum::fixed64);
  Training t;
  t.add_experts();
  t.config.model.moe.num_experts = 8;
  t.config.parallel.exact_sum = sum;
  t.config.train.micro_batch_size = 1;
  t.config.model.moe.load_balance = {.coefficient = 0.5, .scope = BalanceScope::previous_step};
  const Outcome one = train(t, {});
  for (const Layout& layout :
       {Layout{2, 2, 0, 2}, Layout{4, 2, 0, 2}, Layout{4, 2, 0, 4}, Layout{4, 4, 0, 2}, Layout{4, 2, 1, 4},
        Layout{4, 4, 2, 2}, Layout{4, 2, 3, 4}, Layout{8, 4, 3, 2}, Layout{8, 2, 2, 4}}) {
    INFO(describe(layout) << ", sum " << name_of(sum));
    const Outcome shared = train(t, layout);
    CHECK(shared.losses == one.losses);
    CHECK(shared.norms == one.norms);
    CHECK((shared.bits == one.bits));
  }
}

TEST_CASE("exact training with shared sequences: the rest of a model", "[context][exact]") {
  Training t;
  ModelConfig& m = t.config.model;
  SECTION("positions of packed documents") {
    t.config.data.packing = Packing::documents;
    t.config.data.document_positions = true;
  }
  SECTION("a begin token") { t.config.data.begin_token = 31; }
  SECTION("a window, several samples") {
    m.attention.window = 5;
    t.config.data.document_mask = false;
    t.config.train.micro_batch_size = 4;
    t.config.train.global_batch_size = 8;
  }
  SECTION("exclusive attention with learned scales, norm of the output") {
    m.attention.exclusive = ExclusiveAttention::learned;
    m.attention.output_norm = OutputNorm::rmsnorm_shared;
    m.attention.output_activation = OutputActivation::silu;
  }
  SECTION("recomputed MLPs, sandwich norms, a clip") {
    t.config.train.recompute = Recompute::mlp;
    m.norm_placement = NormPlacement::sandwich;
    m.branch_clip = 300;
  }
  SECTION("recomputed blocks") { t.config.train.recompute = Recompute::block; }
  SECTION("a z-loss, biases, one head for words and output") {
    m.logit_z_loss_coefficient = 1e-2;
    m.attention_bias = true;
    m.tie_word_embeddings = true;
  }
  SECTION("gated norms, norms behind the rotation") {
    m.gated_norm.rank = 4;
    m.qk_norm_order = QkNormOrder::after_rope;
  }
  SECTION("switch heads") {
    m.attention.switch_heads.num_experts = 3;
    m.attention.switch_heads.num_experts_per_tok = 2;
  }
  SECTION("Muon, and nanochat's model") {
    t.make_nanochat();
    t.config.train.max_steps = 20;
    const Outcome one = train(t, {});
    return check_equal(one, train(t, {4, 4, 0}));
  }
  SECTION("adapters") { t.config.lora = {.rank = 4, .alpha = 8}; }
  SECTION("an odd number of channels") {
    m.hidden_size = 30;
    m.head_dim = 14;
    m.intermediate_size = 37;
  }
  check_exact(t);
}

TEST_CASE("an exact training goes on with sequences on another number of ranks",
          "[context][exact][checkpoint]") {
  const bool sparse = GENERATE(false, true);
  Training t;
  if (sparse) {
    use_sparse_attention(t.config);
    t.config.model.attention.sparse.phase_steps = 2;
  }
  const Outcome one = train(t, {}, 6);
  for (const auto& [first, second] :
       {std::pair<Layout, Layout>{{2, 2, 1}, {1, 1, 0}}, {{1, 1, 0}, {4, 4, 3}}, {{4, 2, 2}, {2, 2, 0}}}) {
    INFO(describe(first) << ", then " << describe(second));
    const std::string folder = t.folder / fmt::format("ckpt{}{}", first.ranks, second.ranks);
    WholeState state;
    for (const bool begins : {true, false}) {
      const Layout& layout = begins ? first : second;
      const Config config = on(layout, t.config);
      run_thread_ranks(layout.ranks, [&](Communicator& c) {
        set_num_threads(1);
        const Blend data = t.blend();
        Trainer trainer(config, data, &c);
        if (begins)
          trainer.initialize();
        else
          trainer.restore(newest_valid_checkpoint(folder));
        for (int i = 0; i < 3; ++i) trainer.step();
        if (!begins) return state.add(trainer.content());
        CheckpointStore store(folder, config.checkpoint, trainer.content(), &trainer.context(),
                              &trainer.ranks());
        store.save(trainer.content());
        if (!store.wait()) throw std::runtime_error("not saved");
      });
    }
    CHECK((state.bits() == one.bits));
  }
}

TEST_CASE("memory of exact training with shared sequences is planned, and activations fall as 1 / N",
          "[context][exact]") {
  const bool experts = GENERATE(false, true);
  Training t;
  if (experts) t.add_experts();
  t.config.data.seq_len = 256;
  const MemoryPlan one = Trainer::measure(t.config);
  for (const Layout& layout : {Layout{2, 2, 0}, Layout{4, 4, 3}}) {
    INFO(describe(layout));
    const Config config = on(layout, t.config);
    const auto dry = make_dry_communicator(0, layout.ranks);
    const MemoryPlan plan = Trainer::measure(config, dry.get());
    CHECK(static_cast<double>(plan.activations * layout.context) <
          1.02 * static_cast<double>(one.activations));
    run_thread_ranks(layout.ranks, [&](Communicator& c) {
      const Blend data = t.blend();
      Trainer trainer(config, data, &c);
      trainer.initialize();
      trainer.step();
      if (trainer.context().scratch.high_water() != plan.scratch ||
          trainer.memory().activations != plan.activations)
        throw std::runtime_error("other memory than planned");
    });
  }
}
