#include "params/adapters.h"

#include <catch2/catch.hpp>

#include "core/error.h"

namespace sluice {

TEST_CASE("A target names a module by the end of its name, from a point on", "[params][lora]") {
  const auto takes = [](const std::string& target, const std::string& name) {
    return AdapterTargets({.rank = 2, .targets = {target}})
        .take({.name = name, .shape = {2, 2}, .when_frozen = WhenFrozen::adapted});
  };
  CHECK(takes("gate_proj", "model.layers.0.mlp.gate_proj.weight"));
  CHECK(takes("mlp.gate_proj", "model.layers.0.mlp.gate_proj.weight"));
  CHECK(takes("gate_proj", "gate_proj.weight"));
  CHECK_FALSE(takes("gate_proj", "model.layers.0.self_attn.value_gate_proj.weight"));
  CHECK_FALSE(takes("self_attn.gate_proj", "model.layers.0.mlp.gate_proj.weight"));
  CHECK_FALSE(takes("gate_proj", "model.layers.0.mlp.gate_proj.bias"));
}

TEST_CASE("targets that match no matrix, and parameters that cannot have an adapter, are refused by name",
          "[params][lora]") {
  AdapterTargets targets({.rank = 2, .targets = {"q_proj", "router"}});
  CHECK(targets.take({.name = "q_proj.weight", .shape = {2, 2}, .when_frozen = WhenFrozen::adapted}));
  CHECK_THROWS_WITH(targets.check_used(), "lora.targets: no matrix of this model is called router");
  CHECK_THROWS_WITH(targets.take({.name = "router.weight", .shape = {2, 2}}),
                    Catch::Contains("router.weight is named, but gets no adapter"));
  // Without adapters nothing is compared.
  AdapterTargets none({.rank = 0, .targets = {"q_proj"}});
  CHECK_FALSE(none.active());
  CHECK_FALSE(none.take({.name = "q_proj.weight", .shape = {2, 2}}));
  CHECK_NOTHROW(none.check_used());
}

TEST_CASE("the first matrix of an adapter is random and the second zero", "[params][lora]") {
  const auto [a, b] =
      AdapterTargets({.rank = 4, .alpha = 2}).specs_for({.name = "m.q_proj.weight", .shape = {6, 12}});
  CHECK(a.name == "m.q_proj.lora_A.weight");
  CHECK(b.name == "m.q_proj.lora_B.weight");
  CHECK(a.init.value == Approx(1.0 / 6));  // the variance 1 / (3 x 12)
  CHECK(b.init.kind == Init::Kind::constant);
  CHECK(b.init.value == 0);
}

}  // namespace sluice
