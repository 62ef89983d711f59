// A mixture of experts: gradients through router, losses, experts and shared expert; edge cases; scopes of
// the balance loss.
#include <array>
#include <catch2/catch.hpp>
#include <cmath>

#include "ops/elementwise.h"
#include "support/model.h"

using namespace sluice;
using namespace sluice::test;

namespace {

ModelConfig moe_config(int64_t experts = 5, int64_t per_token = 2) {
  ModelConfig c = tiny_config();
  c.moe.num_experts = experts;
  c.moe.num_experts_per_tok = per_token;
  c.moe.moe_intermediate_size = 4;
  c.moe.load_balance.coefficient = 0.3;
  c.moe.router_z_loss_coefficient = 0.2;
  return c;
}

/// One layer with its own memory, in f64.
struct OneMoe {
  ParamStore store;
  Moe moe;
  std::unique_ptr<Arena> values, grads, activations;
  std::unique_ptr<Context> ctx;
  Moe::Saved saved;
  Tensor x, dx, dy, totals;
  MoeConfig config;

  OneMoe(const ModelConfig& c, int64_t tokens, bool keep_inner = true)
      : moe(c, store, "mlp", 0), config(c.moe) {
    Context dry(0);
    Arena v("values"), g("gradients"), a("activations");
    build(dry, v, g, a, c, tokens, keep_inner);
    run(dry, {});
    values = std::make_unique<Arena>("values", v.high_water());
    grads = std::make_unique<Arena>("gradients", g.high_water());
    activations = std::make_unique<Arena>("activations", a.high_water());
    ctx = std::make_unique<Context>(std::max<int64_t>(dry.scratch.high_water(), 64));
    build(*ctx, *values, *grads, *activations, c, tokens, keep_inner);
    std::mt19937 random(3);
    std::normal_distribution<double> normal;
    for (const Tensor& t : {store.flat_values(), x, dy})
      for (int64_t i = 0; i < t.numel(); ++i)
        Pool::set(t, i, (t.data == x.data || t.data == dy.data ? 1 : 0.5) * normal(random));
    store.pack(*ctx);
  }

  void build(Context& c, Arena& v, Arena& g, Arena& a, const ModelConfig& model, int64_t tokens,
             bool keep_inner) {
    store.allocate(c, DType::f64, tokens, v, &g);
    saved = moe.make_saved(a, "moe", tokens, DType::f64, keep_inner);
    for (Tensor* t : {&x, &dx, &dy}) *t = a.alloc("x", DType::f64, {tokens, model.hidden_size});
    totals = a.alloc("totals", DType::f64, {1, router_totals_size(model.moe.num_experts)});
  }
  void run(Context& c, const RouterLoad& load) {
    moe.forward(c, x, load, saved);
    moe.backward(c, dx, dy, x, load, saved);
  }
  void backward(const RouterLoad& load = {}) {
    store.zero_grads(*ctx);
    store.pack(*ctx);
    run(*ctx, load);
  }
  Tensor weight(const std::string& name) const {
    for (size_t i = 0; i < store.specs().size(); ++i)
      if (store.specs()[i].name == name) return store.value(static_cast<ParamStore::Id>(i));
    throw std::runtime_error("no parameter " + name);
  }

  double balance_loss() const {
    const int64_t T = x.dim(0), E = config.num_experts;
    double loss = 0;
    for (int64_t e = 0; e < E; ++e) {
      double p = 0;
      for (int64_t t = 0; t < T; ++t) p += Pool::get(saved.probabilities, t * E + e);
      loss += Pool::get(saved.counts, e) / static_cast<double>(T * config.num_experts_per_tok) * p /
              static_cast<double>(T);
    }
    return loss * static_cast<double>(E);
  }
  double z_loss() const {
    double loss = 0;
    for (int64_t t = 0; t < x.dim(0); ++t) loss += std::pow(Pool::get(saved.lse, t), 2);
    return loss / static_cast<double>(x.dim(0));
  }
  /// The scalar whose gradient backward computes.
  double objective() {
    store.pack(*ctx);
    moe.forward(*ctx, x, {}, saved);
    return dot(dy, saved.y) + config.load_balance.coefficient * balance_loss() +
           config.router_z_loss_coefficient * z_loss();
  }
  /// Margin between the last selected expert and the first one that is not: differences must not cross it.
  double margin() {
    moe.forward(*ctx, x, {}, saved);
    const int64_t E = config.num_experts, K = config.num_experts_per_tok;
    double least = 1;
    for (int64_t t = 0; t < x.dim(0); ++t) {
      std::vector<double> p;
      for (int64_t e = 0; e < E; ++e) p.push_back(Pool::get(saved.probabilities, t * E + e));
      std::sort(p.rbegin(), p.rend());
      if (K < E) least = std::min(least, p[static_cast<size_t>(K) - 1] - p[static_cast<size_t>(K)]);
    }
    return least;
  }
};

void check_gradients(const ModelConfig& config, int64_t tokens = 7) {
  const OneThread one_thread;
  for (const bool keep_inner : {true, false}) {
    OneMoe m(config, tokens, keep_inner);
    REQUIRE(m.margin() > 1e-4);
    m.backward();
    double largest = 0;
    const auto check = [&](const std::string& what, const Tensor& value, const Tensor& gradient) {
      Pool pool;
      const Tensor analytic = pool.copy(gradient, DType::f64);
      INFO(what);
      CHECK(gradient_error(
                value, analytic, [&] { return m.objective(); }, 20, 1e-6) <= 1e-7);
      for (int64_t i = 0; i < analytic.numel(); ++i)
        largest = std::max(largest, std::abs(Pool::get(analytic, i)));
    };
    check("x", m.x, m.dx);
    for (size_t i = 0; i < m.store.specs().size(); ++i)
      check(m.store.specs()[i].name, m.store.value(static_cast<ParamStore::Id>(i)),
            m.store.grad(static_cast<ParamStore::Id>(i)));
    CHECK(largest > 1e-2);
  }
}

}  // namespace

TEST_CASE("gradients of a mixture of experts equal central differences", "[moe][gradient]") {
  for (const bool norm_topk_prob : {false, true})
    for (const int64_t shared : {0, 3})
      for (const bool gate : {false, true}) {
        if (gate && shared == 0) continue;
        for (const auto& [experts, per_token] : std::vector<std::array<int64_t, 2>>{{5, 2}, {4, 1}, {3, 3}}) {
          ModelConfig c = moe_config(experts, per_token);
          c.moe.norm_topk_prob = norm_topk_prob;
          c.moe.shared_expert_intermediate_size = shared;
          c.moe.shared_expert_gate = gate;
          INFO("norm_topk_prob " << norm_topk_prob << ", shared " << shared << ", gate " << gate << ", "
                                 << per_token << " of " << experts);
          check_gradients(c);
        }
      }
}

TEST_CASE("gradients with biases and clamped SwiGLU equal central differences", "[moe][gradient]") {
  for (const bool bias : {false, true})
    for (const double limit : {0.0, 0.4})
      for (const auto& [experts, per_token] : std::vector<std::array<int64_t, 2>>{{5, 2}, {4, 1}, {3, 3}}) {
        ModelConfig c = moe_config(experts, per_token);
        c.moe.bias = bias;
        if (limit > 0) c.moe.swiglu_limit = limit;
        c.moe.shared_expert_intermediate_size = per_token == 1 ? 3 : 0;
        INFO("bias " << bias << ", limit " << limit << ", " << per_token << " of " << experts);
        check_gradients(c);
        if (limit == 0) continue;
        // Values on both sides of the limit.
        OneMoe m(c, 7);
        m.moe.forward(*m.ctx, m.x, {}, m.saved);
        int64_t held = 0;
        for (int64_t i = 0; i < m.saved.gate_up.numel(); ++i)
          held += std::abs(Pool::get(m.saved.gate_up, i)) > limit;
        CHECK(held > m.saved.gate_up.numel() / 8);
        CHECK(held < m.saved.gate_up.numel());
      }
}

TEST_CASE("each router loss alone has the right gradient", "[moe][gradient]") {
  for (const bool balance : {false, true}) {
    ModelConfig c = moe_config();
    (balance ? c.moe.router_z_loss_coefficient : c.moe.load_balance.coefficient) = 0;
    const OneThread one_thread;
    OneMoe m(c, 9);
    for (int64_t i = 0; i < m.dy.numel(); ++i) Pool::set(m.dy, i, 0);
    m.backward();
    Pool pool;
    const Tensor router = m.weight("mlp.gate.weight"), gradient = pool.copy(m.store.grad(0), DType::f64);
    CHECK(gradient_error(
              router, gradient, [&] { return m.objective(); }, 40, 1e-6) <= 1e-7);
    double largest = 0;
    for (int64_t i = 0; i < gradient.numel(); ++i)
      largest = std::max(largest, std::abs(Pool::get(gradient, i)));
    CHECK(largest > 1e-3);
  }
}

TEST_CASE("all tokens to the same experts, and experts without tokens", "[moe][edge]") {
  const OneThread one_thread;
  OneMoe m(moe_config(6, 2), 8);
  // A constant channel makes the router select experts 4 and 1 for every token.
  const Tensor router = m.weight("mlp.gate.weight");
  for (int64_t t = 0; t < 8; ++t) Pool::set(m.x, t * 6, 1);
  for (int64_t e = 0; e < 6; ++e) Pool::set(router, e * 6, e == 4 ? 60 : e == 1 ? 40 : -20);
  m.backward();
  for (int64_t e = 0; e < 6; ++e) CHECK(Pool::get(m.saved.counts, e) == (e == 4 || e == 1 ? 8 : 0));
  for (int64_t t = 0; t < 8; ++t) {
    CHECK(m.saved.experts.as<int32_t>()[2 * t] == 4);
    CHECK(m.saved.experts.as<int32_t>()[2 * t + 1] == 1);
  }
  // Gradients of unused experts are exactly zero, and those of the others are not.
  for (size_t i = 1; i < m.store.specs().size(); ++i) {
    const std::string& name = m.store.specs()[i].name;
    const bool used =
        name.find("experts.4.") != std::string::npos || name.find("experts.1.") != std::string::npos;
    double norm = 0;
    const Tensor gradient = m.store.grad(static_cast<ParamStore::Id>(i));
    for (int64_t j = 0; j < gradient.numel(); ++j) norm += std::abs(Pool::get(gradient, j));
    INFO(name);
    CHECK((norm > 0) == used);
  }
  CHECK(m.balance_loss() > 2.9);  // E/K = 3 if one pair receives everything
}

TEST_CASE("with every expert selected the mixture is the weighted sum of all", "[moe][edge]") {
  const OneThread one_thread;
  OneMoe all(moe_config(4, 4), 6);
  all.moe.forward(*all.ctx, all.x, {}, all.saved);
  for (int64_t t = 0; t < 6; ++t) {
    double sum = 0;
    for (int64_t k = 0; k < 4; ++k) sum += Pool::get(all.saved.weights, t * 4 + k);
    CHECK(sum == Approx(1));
  }
  CHECK(all.balance_loss() == Approx(1));  // f is uniform for any p
}

TEST_CASE("equal probabilities go to the lower indices", "[moe][edge]") {
  const OneThread one_thread;
  OneMoe m(moe_config(6, 3), 4);
  const Tensor router = m.weight("mlp.gate.weight");
  for (int64_t i = 0; i < router.numel(); ++i)
    Pool::set(router, i, i / 6 == 5 ? 0 : Pool::get(router, i % 6));
  for (int64_t t = 0; t < 4; ++t) {  // experts 0 to 4 alike; 5 is better or worse
    m.store.pack(*m.ctx);
    m.moe.forward(*m.ctx, m.x, {}, m.saved);
    const int32_t* chosen = m.saved.experts.as<int32_t>() + t * 3;
    if (chosen[0] == 5) {
      CHECK(chosen[1] == 0);
      CHECK(chosen[2] == 1);
    } else {
      for (int32_t k = 0; k < 3; ++k) CHECK(chosen[k] == k);
    }
  }
}

TEST_CASE("a skewed router has a larger balance loss than a balanced one", "[moe][loss]") {
  const OneThread one_thread;
  double before = 0;
  for (const double skew : {0.0, 2.0, 8.0}) {
    OneMoe m(moe_config(8, 2), 64);
    const Tensor router = m.weight("mlp.gate.weight");
    for (int64_t i = 0; i < router.numel(); ++i) Pool::set(router, i, 0.05 * Pool::get(router, i));
    for (int64_t t = 0; t < 64; ++t) Pool::set(m.x, t * 6, 1);
    Pool::set(router, 3 * 6, skew);
    m.store.pack(*m.ctx);
    m.moe.forward(*m.ctx, m.x, {}, m.saved);
    const double loss = m.balance_loss();
    CHECK(loss > before + (skew > 0 ? 0.5 : 0));
    if (skew == 0) CHECK(loss == Approx(1).margin(0.1));
    before = loss;
  }
}

TEST_CASE("two accumulated halves have the counts and the loss of the whole", "[moe][loss]") {
  const OneThread one_thread;
  const ModelConfig c = moe_config(5, 2);
  OneMoe whole(c, 12), half(c, 6);
  fill(*whole.ctx, whole.totals, 0);
  fill(*half.ctx, half.totals, 0);
  whole.moe.forward(*whole.ctx, whole.x, {.totals = whole.totals}, whole.saved);
  for (int64_t part = 0; part < 2; ++part) {
    for (int64_t i = 0; i < 36; ++i) Pool::set(half.x, i, Pool::get(whole.x, part * 36 + i));
    for (int64_t i = 0; i < half.store.flat_values().numel(); ++i)
      Pool::set(half.store.flat_values(), i, Pool::get(whole.store.flat_values(), i));
    half.store.pack(*half.ctx);
    half.moe.forward(*half.ctx, half.x, {.totals = half.totals}, half.saved);
  }
  for (int64_t i = 0; i < router_totals_size(5); ++i) {
    if (i == 10) continue;  // the loss of each part is not additive, which is why the global scope exists
    CHECK(Pool::get(half.totals, i) == Approx(Pool::get(whole.totals, i)).epsilon(1e-12));
  }
  CHECK(Pool::get(half.totals, 10) != Approx(Pool::get(whole.totals, 10)).epsilon(1e-6));
  CHECK(Pool::get(whole.totals, 10) == Approx(12 * whole.balance_loss()).epsilon(1e-12));
  CHECK(Pool::get(whole.totals, 11) == Approx(12 * whole.z_loss()).epsilon(1e-12));
  CHECK(Pool::get(whole.totals, 12) == 12);
}

TEST_CASE("the gradient of the balance loss uses the counts of its scope", "[moe][loss]") {
  const OneThread one_thread;
  ModelConfig c = moe_config(5, 2);
  c.moe.router_z_loss_coefficient = 0;
  const auto router_gradient = [&](BalanceScope scope, double counted_before) {
    c.moe.load_balance.scope = scope;
    OneMoe m(c, 6);
    for (int64_t i = 0; i < m.dy.numel(); ++i) Pool::set(m.dy, i, 0);
    fill(*m.ctx, m.totals, 0);
    Pool::set(m.totals, 2, counted_before);  // as if earlier micro-batches had gone to expert 2
    m.backward({.totals = m.totals});
    std::vector<double> g;
    for (int64_t i = 0; i < m.store.grad(0).numel(); ++i) g.push_back(Pool::get(m.store.grad(0), i));
    return g;
  };
  CHECK(router_gradient(BalanceScope::micro_batch, 0) == router_gradient(BalanceScope::micro_batch, 500));
  CHECK(router_gradient(BalanceScope::global_batch, 0) != router_gradient(BalanceScope::global_batch, 500));
  CHECK(router_gradient(BalanceScope::micro_batch, 0) == router_gradient(BalanceScope::global_batch, 0));
}

TEST_CASE(
    "with scope previous_step the balance loss uses the previous counts, and has no gradient without them",
    "[moe][loss]") {
  const OneThread one_thread;
  ModelConfig c = moe_config(5, 2);
  c.moe.router_z_loss_coefficient = 0;
  std::vector<double> counted;
  const auto router_gradient = [&](BalanceScope scope, std::vector<double> previous) {
    c.moe.load_balance.scope = scope;
    OneMoe m(c, 6);
    for (int64_t i = 0; i < m.dy.numel(); ++i) Pool::set(m.dy, i, 0);
    fill(*m.ctx, m.totals, 0);
    m.backward({.totals = m.totals, .previous = Tensor(previous.data(), DType::f64, {1, 5})});
    counted.clear();
    for (int64_t e = 0; e < 5; ++e) counted.push_back(Pool::get(m.totals, e));
    std::vector<double> g;
    for (int64_t i = 0; i < m.store.grad(0).numel(); ++i) g.push_back(Pool::get(m.store.grad(0), i));
    return g;
  };
  const auto micro = router_gradient(BalanceScope::micro_batch, {9, 9, 9, 9, 9});
  CHECK(router_gradient(BalanceScope::previous_step, counted) == micro);
  const auto skewed = router_gradient(BalanceScope::previous_step, {0, 40, 1, 0, 0});
  CHECK(skewed != micro);
  CHECK(skewed == router_gradient(BalanceScope::previous_step, {0, 80, 2, 0, 0}));
  for (const double g : router_gradient(BalanceScope::previous_step, {0, 0, 0, 0, 0})) CHECK(g == 0);
}
