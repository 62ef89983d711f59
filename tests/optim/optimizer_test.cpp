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

}  // namespace

TEST_CASE("Ten steps equal those of torch.optim.AdamW", "[optimizer][golden]") {
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
  CHECK(b.optimizer.master(0).empty());
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
      REQUIRE(Pool::get(a.optimizer.master(p), i) == Pool::get(wide.value(p), i));
      REQUIRE(Pool::get(narrow.value(p), i) ==
              static_cast<float>(bf16(static_cast<float>(Pool::get(wide.value(p), i)))));
    }
}

TEST_CASE("Decay and learning rate follow the layer, then the rules, the last one winning", "[optimizer]") {
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
  const auto [a, b] = factors({{"weight", 3.0, std::nullopt}, {"b", 2.0, true}, {"norm", 4.0, true}});
  CHECK(a == Approx(1 - 0.3 * 0.5));
  CHECK(b == Approx(1 - 0.4 * 0.5));
  try {
    factors({{"a.", 1.0, false}, {"gate_porj", 10.0, std::nullopt}});
    FAIL("a rule that matches nothing was accepted");
  } catch (const Error& e) {
    CHECK(e.code() == ExitCode::usage);
    CHECK(std::string(e.what()) == "optimizer.rules[1]: no parameter's name contains 'gate_porj'");
  }
}

TEST_CASE("The gradient norm is that of all parameters, with any number of threads", "[optimizer]") {
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

TEST_CASE("Measuring a step counts no update", "[optimizer]") {
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
  CHECK(optimizer.master(0).has_shape({5, 3}));
}

}  // namespace sluice
