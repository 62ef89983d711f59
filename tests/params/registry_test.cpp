#include "params/registry.h"

#include <catch2/catch.hpp>

namespace sluice {
namespace {

ParamSpec matrix(const char* name, int64_t out, int64_t in) {
  return {.name = name, .shape = {out, in}, .when_frozen = WhenFrozen::adapted};
}

std::vector<std::string> names_of(const ParamRegistry& registry) {
  std::vector<std::string> names;
  for (const ParamSpec& spec : registry.specs()) names.push_back(spec.name);
  return names;
}

}  // namespace

TEST_CASE("parameters keep the order of registration and belong to the current unit", "[params]") {
  ParamRegistry registry;
  CHECK(registry.add({.name = "embed", .shape = {4, 3}, .active = 0.5}) == 0);
  registry.begin_unit(2);
  CHECK(registry.add({.name = "norm", .shape = {7}}) == 1);
  registry.begin_unit(0);
  CHECK(registry.add({.name = "head", .shape = {2, 5}}) == 2);
  CHECK(names_of(registry) == std::vector<std::string>{"embed", "norm", "head"});
  CHECK(registry.spec(0).unit == 0);
  CHECK(registry.spec(1).unit == 2);
  CHECK(registry.spec(2).unit == 0);
  CHECK(registry.total() == 12 + 7 + 10);
  CHECK(registry.total_trained() == registry.total());
  CHECK(registry.total_active() == 6 + 7 + 10);
  registry.close();
  CHECK_THROWS_WITH(registry.add({.name = "late", .shape = {3}}),
                    Catch::Contains("after the store was allocated"));
}

TEST_CASE("a matrix is joined in backward where its place and its training allow it", "[params]") {
  struct Case {
    int64_t rows_before, rows;
    const char* frozen;
    bool joined, apart;
  };
  for (const Case& c :
       {Case{8, 16, "none", true, false}, Case{8, 16, "", true, false}, Case{8, 16, "before", false, true},
        Case{8, 16, "behind", false, true}, Case{12, 16, "none", false, false},
        Case{8, 12, "none", false, false}, Case{12, 16, "before", false, false}}) {
    ParameterRule rule;
    rule.match = c.frozen;
    rule.trainable = false;
    ParamRegistry registry({}, {rule});
    registry.add({.name = "before", .shape = {c.rows_before, 32}, .joined_in_backward = true});
    registry.add({.name = "behind", .shape = {c.rows, 32}, .joined = true, .joined_in_backward = true});
    INFO(c.rows_before << " and " << c.rows << ", frozen: " << c.frozen);
    CHECK(registry.spec(1).joined == c.joined);
    CHECK(registry.spec(1).apart == c.apart);
  }
  ParamRegistry registry;  // numbers that would shift what follows from its alignment; other neighbours
  registry.add({.name = "odd", .shape = {8, 3}, .joined_in_backward = true});
  registry.add({.name = "behind odd", .shape = {8, 3}, .joined = true, .joined_in_backward = true});
  registry.add({.name = "norm", .shape = {32}});
  registry.add({.name = "behind norm", .shape = {8, 32}, .joined = true, .joined_in_backward = true});
  for (const ParamId id : {1, 3}) CHECK_FALSE(registry.spec(id).joined);
}

TEST_CASE("adapters follow the joined group of their matrix, and only they are trained", "[params][lora]") {
  ParamRegistry registry({.rank = 2, .alpha = 8, .targets = {"up_proj"}});
  registry.begin_unit(1);
  registry.add(matrix("mlp.gate_proj.weight", 5, 3));
  ParamSpec up = matrix("mlp.up_proj.weight", 5, 3);
  up.joined = true;
  registry.add(up);
  registry.begin_unit(0);
  registry.add({.name = "norm", .shape = {3}});
  registry.close();
  CHECK(names_of(registry) == std::vector<std::string>{"mlp.gate_proj.weight", "mlp.up_proj.weight",
                                                       "mlp.up_proj.lora_A.weight",
                                                       "mlp.up_proj.lora_B.weight", "norm"});
  CHECK(registry.adapters(1).empty());
  REQUIRE(registry.adapters(0).size() == 1);
  const Adapter& adapter = registry.adapters(0)[0];
  CHECK(adapter.matrix == 1);
  CHECK(adapter.begin == 5);
  CHECK(registry.spec(adapter.a).shape == std::vector<int64_t>{2, 3});
  CHECK(registry.spec(adapter.b).shape == std::vector<int64_t>{5, 2});
  CHECK(registry.adapter_scale() == 4);
  for (const ParamSpec& spec : registry.specs()) {
    CHECK(spec.trainable == spec.adapter);
    CHECK(spec.unit == (spec.name == "norm" ? 0 : 1));
  }
  CHECK(registry.total_trained() == 2 * 3 + 5 * 2);
}

}  // namespace sluice
