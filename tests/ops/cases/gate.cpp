// Gates: every activation, sharing, combination and granularity, of every token and of none; head sizes on
// and off the vector width.
#include "ops/gate.h"

#include <spdlog/fmt/fmt.h>

#include "ops/cases.h"
#include "support/enums.h"

namespace sluice::test {
namespace {

struct GateCase {
  int64_t tokens, heads, channels;
  GateKind kind;
  bool headwise, per_token, in_place;
};

OpCase gate_case(const GateCase& g) {
  return {fmt::format("gate T={} H={} D={} {} {} {} {}{}{}", g.tokens, g.heads, g.channels,
                      name_of(g.kind.activation), name_of(g.kind.sharing), name_of(g.kind.combine),
                      g.headwise ? "headwise" : "elementwise", g.per_token ? "" : " constant",
                      g.in_place ? " in place" : ""),
          [=](CaseRun& r) {
            const int64_t T = g.tokens, H = g.heads, D = g.channels, Z = g.per_token ? T : 1;
            const auto scores = [&](const Tensor& t) {
              return g.headwise ? t.view({Z, H}) : t.view({Z, H, D});
            };
            const int64_t slots = Z * H * (g.headwise ? 1 : D);
            const Tensor x = r.input("x", {T, H, D}), dy = r.input("dy", {T, H, D}),
                         z = scores(r.input("z", {slots}, 2));
            gate_scores(r.ctx, scores(r.output("scores", r.wide, {slots})), z, g.kind);
            // As columns of a matrix in every second shape of scores per token.
            const int64_t slots_of_token = slots / Z;
            const Tensor dz = !g.per_token           ? r.inout("dz", r.wide, {slots}).view({1, slots})
                              : (T + H + D) % 2 == 1 ? r.columns("dz", T, slots_of_token)
                                                     : r.output("dz", {T, slots_of_token});
            // A gradient of heads' mean scores joins in every second shape of scores specific to a head.
            const bool heads = g.kind.sharing == GateSharing::specific && (T + H + D) % 2 == 0;
            const Tensor dhead = heads ? r.input("dhead", DType::f64, {H}) : Tensor();
            gate_backward(r.ctx, g.in_place ? r.compared("dx", dy) : r.output("dx", {T, H, D}), scores(dz),
                          dy, x, z, g.kind, dhead);
            gate_forward(r.ctx, g.in_place ? r.compared("y", x) : r.output("y", {T, H, D}), x, z, g.kind);
          }};
}

GateKind kind_of(int activation, int sharing, int combine) {
  return {static_cast<GateActivation>(activation), static_cast<GateSharing>(sharing),
          static_cast<GateCombine>(combine)};
}

}  // namespace

OpFamily gate_cases() {
  OpFamily family{"gate", {}, {}};
  auto& cases = family.cases;
  int turn = 0;
  for (int activation = 0; activation < kCount<GateActivation>; ++activation)
    for (int sharing = 0; sharing < 3; ++sharing)
      for (int combine = 0; combine < 2; ++combine)
        for (const bool headwise : {false, true})
          for (const bool per_token : {false, true})
            cases.push_back(gate_case({5, 3, turn++ % 2 ? 16 : 10, kind_of(activation, sharing, combine),
                                       headwise, per_token, turn % 3 == 0}));
  for (int sharing = 0; sharing < 3; ++sharing)
    for (const bool headwise : {false, true})
      for (const bool per_token : {false, true}) {
        cases.push_back(gate_case({37, 4, 64, kind_of(0, sharing, 0), headwise, per_token, false}));
        cases.push_back(gate_case({9, 1, 520, kind_of(0, sharing, 0), headwise, per_token, true}));
      }
  cases.push_back(gate_case({3, 1, 2304, kind_of(0, 0, 0), true, true, false}));  // a row for a whole block
  cases.push_back(gate_case({6, 2, 128, kind_of(0, 0, 0), true, true, false}));
  family.fuzz = [](Random& random) {
    return gate_case(
        {uniform(random, 2, 30), uniform(random, 1, 8),
         one_of<int64_t>(random, {uniform(random, 1, 40), 8 * uniform(random, 1, 32)}),
         kind_of(static_cast<int>(uniform(random, 0, kCount<GateActivation> - 1)),
                 static_cast<int>(uniform(random, 0, 2)), static_cast<int>(uniform(random, 0, 1))),
         uniform(random, 0, 1) == 1, uniform(random, 0, 1) == 1, uniform(random, 0, 1) == 1});
  };
  return family;
}

}  // namespace sluice::test
