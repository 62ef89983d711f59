// Samples that end in padding, and the same tokens without it: no auxiliary loss, none of its sums and no
// gradient tells them apart.
#include <catch2/catch.hpp>

#include "core/targets.h"
#include "support/model.h"

namespace sluice {
namespace {

using test::Pool;
using test::TestModel;
using test::TokenBatch;

/// Two documents of 5 and 3 tokens; with padding, each in a sample of 7. hidden: padding is a sequence of its
/// own, as under data.document_mask.
TokenBatch documents(bool padded, bool hidden) {
  TokenBatch b;
  for (const uint32_t seed : {1U, 2U}) {
    const auto start = static_cast<int32_t>(b.tokens.size());
    b.add(test::random_tokens(seed == 1 ? 6 : 4, 11, seed));
    b.targets.back() = kNoTarget;
    const auto first = static_cast<int32_t>(b.tokens.size());
    while (padded && static_cast<int32_t>(b.tokens.size()) < start + 7) {
      b.positions.push_back(static_cast<int32_t>(b.tokens.size()) - start);
      b.first_key.push_back(hidden ? first : start);
      b.tokens.push_back(0);
      b.targets.push_back(kPadding);
    }
  }
  return b;
}

/// A training's micro-batch with everything that its auxiliary losses count.
struct Step {
  Step(const ModelConfig& config, const TokenBatch& batch, Recompute recompute)
      : m(config, batch, DType::f64, recompute), weight(pool.zeros(DType::f64, {1})) {
    Pool::set(weight, 0, 1.0 / 8);
    if (config.moe.num_experts > 0)
      m.load.routers.totals =
          pool.zeros(DType::f64, {config.num_hidden_layers, router_totals_size(config.moe.num_experts)});
    m.load.routers.token_weight = weight;
    m.randomize();
    for (const Tensor& variance : m.model.index_variances()) Pool::set(variance, 0, 0.5);
    m.loss_and_gradient();
  }
  Pool pool;
  TestModel m;
  Tensor weight;
};

void check_equal(const char* what, const Tensor& a, const Tensor& b) {
  INFO(what);
  REQUIRE(a.numel() == b.numel());
  for (int64_t i = 0; i < a.numel(); ++i) {
    INFO(i);
    CHECK(Pool::get(a, i) == Approx(Pool::get(b, i)).epsilon(1e-11).margin(1e-13));
  }
}

void check_padding(const ModelConfig& config) {
  const Recompute recompute = GENERATE(Recompute::none, Recompute::block);
  const bool hidden = GENERATE(true, false);
  const test::OneThread one_thread;
  const Step plain(config, documents(false, hidden), recompute),
      padded(config, documents(true, hidden), recompute);
  for (size_t i = 0; i < plain.m.store.specs().size(); ++i)
    check_equal(plain.m.store.specs()[i].name.c_str(), padded.m.store.grad(static_cast<ParamStore::Id>(i)),
                plain.m.store.grad(static_cast<ParamStore::Id>(i)));
  check_equal("routers", padded.m.load.routers.totals, plain.m.load.routers.totals);
  check_equal("heads", padded.m.load.heads.totals, plain.m.load.heads.totals);
  check_equal("indexers", padded.m.load.indexers.sums, plain.m.load.indexers.sums);
}

ModelConfig two_layers() {
  ModelConfig c = test::tiny_config();
  c.num_hidden_layers = 2;
  return c;
}

}  // namespace

TEST_CASE("routers do not count padding", "[padding][moe]") {
  ModelConfig c = two_layers();
  c.moe.num_experts = 5, c.moe.num_experts_per_tok = 2, c.moe.moe_intermediate_size = 3;
  c.moe.load_balance.coefficient = 0.3, c.moe.router_z_loss_coefficient = 0.2;
  c.moe.load_balance.scope = GENERATE(BalanceScope::micro_batch, BalanceScope::global_batch);
  check_padding(c);
}

TEST_CASE("head balance does not count padding", "[padding][heads]") {
  ModelConfig c = two_layers();
  c.attention.head_balance.coefficient = 0.3;
  GateConfig gate, own;
  gate.granularity = GENERATE(GateGranularity::headwise, GateGranularity::elementwise);
  own.input = GateInput::self;
  switch (GENERATE(0, 1, 2, 3, 4, 5)) {
    case 0:
      break;
    case 1:
      c.attention.kind = AttentionKind::sink;
      break;
    case 2:
      c.attention.gates = {gate};
      break;
    case 3:
      c.attention.gates = {gate, own};
      break;
    case 4:
      c.attention.kind = AttentionKind::sink;
      c.attention.gates = {own};
      break;
    default:
      c.attention.kind = AttentionKind::sparse;
      c.attention.sparse.k.base = 2;
      c.attention.sparse.sink = GENERATE(false, true);
  }
  check_padding(c);
}

TEST_CASE("the number of selected keys follows no padding", "[padding][sparse]") {
  ModelConfig c = two_layers();
  c.attention.kind = AttentionKind::sparse;
  SparseConfig& sparse = c.attention.sparse;
  sparse.loss.coefficient = 0.5;
  sparse.k.policy = GENERATE(BudgetPolicy::inverse, BudgetPolicy::fixed);
  sparse.k.base = 2, sparse.k.min = 1, sparse.k.max = 4;
  check_padding(c);
}

}  // namespace sluice
