#include "optim/rules.h"

#include <catch2/catch.hpp>

#include "config/fields.h"

namespace sluice {
namespace {

ParamSpec matrix_of_a_block() { return {.name = "q_proj", .shape = {4, 6}, .unit = 1}; }

}  // namespace

TEST_CASE("every optimizer has a rule for any parameter, and its rules have states of different names",
          "[optimizer][rules]") {
  for (size_t type = 0; type < EnumNames<OptimizerType>::names.size(); ++type) {
    OptimizerConfig config;
    config.type = static_cast<OptimizerType>(type);
    INFO(enum_name(config.type));
    const std::vector<UpdateRule> rules = rules_of(config);
    REQUIRE(!rules.empty());
    // The first takes what no other wants, a norm's weight.
    const ParamSpec norm{.name = "norm", .shape = {6}, .weight_decay = false};
    CHECK(std::visit([&](const auto& rule) { return rule.takes(norm); }, rules[0]));
    for (const UpdateRule& rule : rules) {
      const auto names = std::visit([](const auto& r) { return r.state_names(); }, rule);
      for (size_t i = 0; i < names.size(); ++i) {
        CHECK(names[i][0] == '.');
        for (size_t j = 0; j < i; ++j) CHECK(std::string(names[i]) != names[j]);
      }
    }
  }
}

TEST_CASE("Muon updates the matrices of blocks that decay and are whole linear maps", "[optimizer][rules]") {
  const MuonRule muon({});
  ParamSpec spec = matrix_of_a_block();
  CHECK(muon.takes(spec));
  spec.unit = 0;  // embedding, head
  CHECK_FALSE(muon.takes(spec));
  spec = matrix_of_a_block();
  spec.shape = {6};
  CHECK_FALSE(muon.takes(spec));
  spec = matrix_of_a_block();
  spec.weight_decay = false;
  CHECK_FALSE(muon.takes(spec));
  spec = matrix_of_a_block();
  spec.orthogonal = false;
  CHECK_FALSE(muon.takes(spec));
  CHECK(AdamwRule({}).takes(spec));
}

TEST_CASE("A rule's factors are its own rate and decay times those of a parameter", "[optimizer][rules]") {
  OptimizerConfig config;
  config.lr = 0.01;
  config.weight_decay = 0.1;
  config.muon.lr = 0.04;
  config.muon.weight_decay = 0.3;
  const UpdateFactors a = AdamwRule(config).factors(2, true), m = MuonRule(config).factors(2, true);
  CHECK(a.lr_multiplier == 2);
  CHECK(a.weight_decay == 0.1);
  CHECK(m.lr_multiplier == Approx(8));
  CHECK(m.weight_decay == 0.3);
  CHECK(AdamwRule(config).factors(2, false).weight_decay == 0);
  CHECK(MuonRule(config).factors(2, false).weight_decay == 0);
}

TEST_CASE("Muon refuses a slice of a matrix", "[optimizer][rules]") {
  Context ctx(1 << 16);
  const ParamSpec spec = matrix_of_a_block();
  UpdateRange range{.members = {{.spec = &spec, .begin = 6, .count = 18}}};
  CHECK_THROWS_WITH(MuonRule({}).update(ctx, range, {}), Catch::Contains("q_proj is cut"));
}

}  // namespace sluice
