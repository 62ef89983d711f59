#include "optim/optimizer.h"

#include <catch2/catch.hpp>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/parallel_for.h"
#include "support/gradcheck.h"

namespace sluice {
namespace {

using test::Pool;

/// A store with memory and an optimizer on it.
struct Run {
  Run(ParamStore& params, const OptimizerConfig& config, DType dtype)
      : store(params), optimizer(config, params) {
    store.allocate(context, dtype, 1, values, &gradients);
    optimizer.allocate(context, moments);
  }
  Context context{1 << 20};
  Arena values{"values", 1 << 20}, gradients{"gradients", 1 << 20}, moments{"optimizer", 1 << 21};
  ParamStore& store;
  Optimizer optimizer;
};

ParamStore two_parameters() {
  ParamStore store;
  store.add({.name = "a.weight", .shape = {5, 3}, .init = Init::normal(1)});
  store.add({.name = "b.norm", .shape = {7}, .init = Init::constant(1), .weight_decay = false});
  return store;
}

void fill_from_grid(const Tensor& t, const nlohmann::json& j, double grid) {
  for (int64_t i = 0; i < t.numel(); ++i)
    Pool::set(t, i, j["grid"][static_cast<size_t>(i)].get<double>() / grid);
}

/// The largest difference of a parameter from a golden's list, relative to its norm.
double distance(const Tensor& value, const nlohmann::json& golden) {
  double error = 0, norm = 0;
  for (int64_t i = 0; i < value.numel(); ++i) {
    const double x = golden["data"][static_cast<size_t>(i)];
    error += (Pool::get(value, i) - x) * (Pool::get(value, i) - x);
    norm += x * x;
  }
  return std::sqrt(error / norm);
}

OptimizerConfig muon_config() {
  OptimizerConfig config;
  config.type = OptimizerType::muon;
  config.lr = 0.01;
  config.muon.momentum_warmup_steps = 4;
  return config;
}

/// What Muon takes, beside all that it does not.
ParamStore block_and_rest() {
  ParamStore store;
  store.add({.name = "embed", .shape = {9, 6}, .init = Init::normal(1)});
  store.begin_unit(1);
  store.add({.name = "norm", .shape = {6}, .init = Init::constant(1), .weight_decay = false});
  store.add({.name = "wide", .shape = {4, 6}, .init = Init::normal(1)});
  store.add({.name = "tall", .shape = {10, 6}, .init = Init::normal(1), .joined = true});
  store.add({.name = "constant", .shape = {2, 3}, .init = Init::normal(1), .weight_decay = false});
  store.add({.name = "router", .shape = {5, 6}, .init = Init::normal(1), .orthogonal = false});
  store.add(
      {.name = "expert", .shape = {3, 6}, .init = Init::normal(1), .split = {.axis = SplitAxis::expert}});
  store.begin_unit(0);
  store.add({.name = "head", .shape = {9, 6}, .init = Init::normal(1)});
  return store;
}

const std::vector<bool> kOfMuon = {false, false, true, true, false, false, true, false};

void random_gradients(ParamStore& store, Pool& pool) {
  for (int p = 0; p < static_cast<int>(store.specs().size()); ++p) {
    const Tensor g = pool.normal(store.grad(p).dtype, {store.numel(p)});
    std::memcpy(store.grad(p).data, g.data, static_cast<size_t>(g.bytes()));
  }
}

}  // namespace

TEST_CASE("ten steps equal torch.optim.AdamW", "[optimizer][golden]") {
  std::ifstream file(std::string(SLUICE_SOURCE_DIR) + "/tests/golden/adamw.json");
  REQUIRE(file.good());
  const nlohmann::json golden = nlohmann::json::parse(file);
  for (const auto& [dtype, tolerance] : {std::pair{DType::f64, 1e-8}, std::pair{DType::f32, 1e-6}}) {
    ParamStore store = two_parameters();
    OptimizerConfig config;
    config.beta1 = golden["beta1"];
    config.beta2 = golden["beta2"];
    config.eps = golden["eps"];
    config.weight_decay = golden["weight_decay"];
    Run run(store, config, dtype);
    for (size_t p = 0; p < 2; ++p)
      fill_from_grid(store.value(static_cast<int>(p)), golden["start"][p], golden["grid"]);
    for (const auto& step : golden["steps"]) {
      for (size_t p = 0; p < 2; ++p)
        fill_from_grid(store.grad(static_cast<int>(p)), step["gradients"][p], golden["grid"]);
      run.optimizer.step(run.context, golden["lr"], 0);
      for (size_t p = 0; p < 2; ++p) {
        const Tensor value = store.value(static_cast<int>(p));
        double error = 0, norm = 0;
        for (int64_t i = 0; i < value.numel(); ++i) {
          const double x = step["values"][p]["data"][static_cast<size_t>(i)];
          error += (Pool::get(value, i) - x) * (Pool::get(value, i) - x);
          norm += x * x;
        }
        REQUIRE(std::sqrt(error / norm) < tolerance);
      }
    }
    CHECK(run.optimizer.steps_applied() == 10);
  }
}

TEST_CASE("bf16 values follow an f32 master exactly", "[optimizer]") {
  ParamStore narrow = two_parameters(), wide = two_parameters();
  OptimizerConfig config;
  Run a(narrow, config, DType::bf16), b(wide, config, DType::f32);
  narrow.initialize(a.context, 3);
  a.optimizer.sync_master(a.context);
  CHECK(b.optimizer.state(0, ".master").empty());
  for (int p = 0; p < 2; ++p)
    for (int64_t i = 0; i < narrow.numel(p); ++i) Pool::set(wide.value(p), i, Pool::get(narrow.value(p), i));
  Pool pool;
  for (int step = 0; step < 5; ++step) {
    for (int p = 0; p < 2; ++p) {
      const Tensor g = pool.normal(DType::f32, {narrow.numel(p)});
      std::memcpy(narrow.grad(p).data, g.data, static_cast<size_t>(g.bytes()));
      std::memcpy(wide.grad(p).data, g.data, static_cast<size_t>(g.bytes()));
    }
    a.optimizer.step(a.context, 1e-4, 0.5);
    b.optimizer.step(b.context, 1e-4, 0.5);
  }
  for (int p = 0; p < 2; ++p)
    for (int64_t i = 0; i < narrow.numel(p); ++i) {
      REQUIRE(Pool::get(a.optimizer.state(p, ".master"), i) == Pool::get(wide.value(p), i));
      REQUIRE(Pool::get(narrow.value(p), i) ==
              static_cast<float>(bf16(static_cast<float>(Pool::get(wide.value(p), i)))));
    }
}

TEST_CASE("decay and learning rate follow the layer, then the rules; the last rule wins", "[optimizer]") {
  // With zero gradients only the decay moves a value: w <- w (1 - lr multiplier decay).
  const auto factors = [](const std::vector<ParameterRule>& rules) {
    ParamStore store = two_parameters();
    OptimizerConfig config;
    config.weight_decay = 0.5;
    config.rules = rules;
    Run run(store, config, DType::f64);
    for (int p = 0; p < 2; ++p)
      for (int64_t i = 0; i < store.numel(p); ++i) Pool::set(store.value(p), i, 1);
    run.optimizer.step(run.context, 0.1, 0);
    return std::pair{Pool::get(store.value(0), 0), Pool::get(store.value(1), 0)};
  };
  CHECK(factors({}) == std::pair{1 - 0.1 * 0.5, 1.0});
  CHECK(factors({{"norm", 1.0, true}}) == std::pair{1 - 0.1 * 0.5, 1 - 0.1 * 0.5});
  CHECK(factors({{"a.", 1.0, false}}) == std::pair{1.0, 1.0});
  const auto [a, b] = factors({{"weight", 3.0, std::nullopt}, {"norm", 4.0, true}});
  CHECK(a == Approx(1 - 0.3 * 0.5));
  CHECK(b == Approx(1 - 0.4 * 0.5));
  // The last rule that matches decides. One that decides nothing was meant to: here the first freezes
  // nothing.
  ParameterRule frozen{"a.", 1.0, std::nullopt};
  frozen.trainable = false;
  try {
    factors({frozen, {"a.weight", 0.5, std::nullopt}});
    FAIL("a rule that later ones overrule was accepted");
  } catch (const Error& e) {
    CHECK(std::string(e.what()).starts_with("optimizer.rules[0] has no effect: later rules decide"));
  }
  try {
    factors({{"a.", 1.0, false}, {"gate_porj", 10.0, std::nullopt}});
    FAIL("a rule that matches nothing was accepted");
  } catch (const Error& e) {
    CHECK(e.code() == ExitCode::usage);
    CHECK(std::string(e.what()) == "optimizer.rules[1]: no parameter's name contains 'gate_porj'");
  }
}

TEST_CASE("the gradient norm covers all parameters, with any number of threads", "[optimizer]") {
  ParamStore store;
  store.add({.name = "w", .shape = {300, 500}, .init = Init::normal(1)});
  store.add({.name = "b", .shape = {70001}, .init = Init::normal(1)});
  Context context(1 << 20);
  Arena values("values", 2 << 20), gradients("gradients", 2 << 20);
  store.allocate(context, DType::f32, 1, values, &gradients);
  Optimizer optimizer({}, store);
  Arena moments("optimizer", 4 << 20);
  optimizer.allocate(context, moments);
  const auto gradient_norm = [&] { return optimizer.step(context, 0, 0).grad_norm; };
  double squares = 0;
  for (int p = 0; p < 2; ++p)
    for (int64_t i = 0; i < store.numel(p); ++i) {
      const float x = static_cast<float>((i * 7919 + p) % 1000) * 1e-3f;
      Pool::set(store.grad(p), i, x);
      squares += static_cast<double>(x) * x;
    }
  const double norm = gradient_norm();
  CHECK(norm == Approx(std::sqrt(squares)).epsilon(1e-12));
  const int threads = num_threads();
  set_num_threads(1);
  CHECK(gradient_norm() == norm);
  set_num_threads(threads);
  Pool::set(store.grad(1), 5, NAN);
  CHECK(!std::isfinite(gradient_norm()));
}

TEST_CASE("a dry step counts no update", "[optimizer]") {
  ParamStore store = two_parameters();
  Context dry(0);
  Arena values("values"), gradients("gradients"), moments("optimizer");
  store.allocate(dry, DType::bf16, 1, values, &gradients);
  Optimizer optimizer({}, store);
  optimizer.allocate(dry, moments);
  optimizer.step(dry, 1e-3, 1.0);
  CHECK(optimizer.steps_applied() == 0);
  CHECK(moments.entries().size() == 5);
  CHECK(moments.entries()[2].name == "master");
  CHECK(moments.entries()[2].tensor.numel() == store.flat_values().numel());
  CHECK(optimizer.state(0, ".master").has_shape({5, 3}));
}

TEST_CASE("six steps of Muon equal an implementation in PyTorch", "[optimizer][muon][golden]") {
  std::ifstream file(std::string(SLUICE_SOURCE_DIR) + "/tests/golden/muon.json");
  REQUIRE(file.good());
  const nlohmann::json golden = nlohmann::json::parse(file);
  for (const auto& [dtype, tolerance] : {std::pair{DType::f64, 1e-8}, std::pair{DType::f32, 1e-5}}) {
    ParamStore store;
    store.begin_unit(1);
    for (const char* name : {"tall", "wide", "square"}) {
      const auto& shape = golden["start"][store.specs().size()]["shape"];
      store.add({.name = name, .shape = {shape[0], shape[1]}});
    }
    OptimizerConfig config = muon_config();
    config.muon.lr = golden["lr"];
    config.muon.momentum = golden["momentum"];
    config.muon.initial_momentum = golden["initial_momentum"];
    config.muon.momentum_warmup_steps = golden["momentum_warmup_steps"];
    config.muon.weight_decay = golden["weight_decay"];
    config.muon.newton_schulz_steps = golden["newton_schulz_steps"];
    Run run(store, config, dtype);
    for (size_t p = 0; p < 3; ++p)
      fill_from_grid(store.value(static_cast<int>(p)), golden["start"][p], golden["grid"]);
    for (const auto& step : golden["steps"]) {
      for (size_t p = 0; p < 3; ++p)
        fill_from_grid(store.grad(static_cast<int>(p)), step["gradients"][p], golden["grid"]);
      run.optimizer.step(run.context, config.lr, golden["max_grad_norm"]);
      for (size_t p = 0; p < 3; ++p)
        REQUIRE(distance(store.value(static_cast<int>(p)), step["values"][p]) < tolerance);
    }
  }
}

TEST_CASE("Muon updates the matrices of blocks; all other parameters and their moments belong to AdamW",
          "[optimizer][muon]") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    ParamStore store = block_and_rest(), plain = block_and_rest();
    OptimizerConfig config = muon_config(), adamw = config;
    adamw.type = OptimizerType::adamw;
    config.rules = adamw.rules = {{"norm", 3.0, true}};
    Run muon(store, config, dtype), other(plain, adamw, dtype);
    for (Run* run : {&muon, &other}) {
      run->store.initialize(run->context, 5);
      run->optimizer.sync_master(run->context);
    }
    Pool a(3), b(3);
    for (int step = 0; step < 3; ++step) {
      random_gradients(store, a);
      random_gradients(plain, b);
      muon.optimizer.step(muon.context, 0.01, 1);
      other.optimizer.step(other.context, 0.01, 1);
    }
    for (int p = 0; p < static_cast<int>(kOfMuon.size()); ++p) {
      const ParamSpec& spec = store.specs()[static_cast<size_t>(p)];
      INFO(spec.name);
      const auto same = [](const Tensor& x, const Tensor& y) {
        return x.numel() == y.numel() && std::memcmp(x.data, y.data, static_cast<size_t>(x.bytes())) == 0;
      };
      CHECK(muon.optimizer.state(p, ".v").empty() == kOfMuon[static_cast<size_t>(p)]);
      const int64_t moments = kOfMuon[static_cast<size_t>(p)] ? 1 : 2, masters = dtype == DType::bf16 ? 1 : 0;
      CHECK(std::ssize(muon.optimizer.state_names(spec)) == moments + masters);
      CHECK(same(store.value(p), plain.value(p)) != kOfMuon[static_cast<size_t>(p)]);
      if (kOfMuon[static_cast<size_t>(p)]) continue;
      CHECK(same(muon.optimizer.state(p, ".m"), other.optimizer.state(p, ".m")));
      CHECK(same(muon.optimizer.state(p, ".v"), other.optimizer.state(p, ".v")));
    }
    // Second moments of the rest alone, each run of them padded to 32 elements: embed, norm, [constant,
    // router], head.
    CHECK(muon.moments.entries()[1].name == "v");
    CHECK(muon.moments.entries()[1].tensor.numel() <= 64 + 32 + 96 + 64);
  }
}

TEST_CASE(
    "Muon has its own learning rate with the common schedule, times the rule's multiplier; rules decide on "
    "decay",
    "[optimizer][muon]") {
  const auto factor = [](const std::vector<ParameterRule>& rules, double lr) {
    ParamStore store = block_and_rest();
    OptimizerConfig config = muon_config();
    config.muon.lr = 0.4;
    config.muon.weight_decay = 0.5;
    config.rules = rules;
    Run run(store, config, DType::f64);
    for (int64_t i = 0; i < store.numel(2); ++i) Pool::set(store.value(2), i, 1);
    run.optimizer.step(run.context, lr, 0);  // without gradients decay alone moves a value
    return Pool::get(store.value(2), 0);
  };
  CHECK(factor({}, 0.01) == Approx(1 - 0.4 * 0.5));
  CHECK(factor({}, 0.005) == Approx(1 - 0.2 * 0.5));  // half the peak
  CHECK(factor({{"wide", 0.5, std::nullopt}}, 0.01) == Approx(1 - 0.2 * 0.5));
  CHECK(factor({{"wide", 1.0, false}}, 0.01) == 1.0);
}

TEST_CASE("a step that is not applied does not change Muon's weights and momentum", "[optimizer][muon]") {
  ParamStore store = block_and_rest();
  Run run(store, muon_config(), DType::bf16);
  store.initialize(run.context, 5);
  run.optimizer.sync_master(run.context);
  Pool pool;
  random_gradients(store, pool);
  CHECK(run.optimizer.step(run.context, 0.01, 1).apply == 1);
  const auto bits = [&] {
    std::string all(static_cast<const char*>(store.flat_values().data),
                    static_cast<size_t>(store.flat_values().bytes()));
    for (const auto& [name, t] : run.optimizer.flat_state())
      all.append(static_cast<const char*>(t.data), static_cast<size_t>(t.bytes()));
    return all;
  };
  const std::string before = bits();
  Pool::set(store.grad(3), 7, NAN);
  CHECK(run.optimizer.step(run.context, 0.01, 1).apply == 0);
  CHECK(bits() == before);
  CHECK(run.optimizer.steps_applied() == 1);
}

}  // namespace sluice
