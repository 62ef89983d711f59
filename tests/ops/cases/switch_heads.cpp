// Switch heads: one expert, all, a few of many; experts that write a whole head, parts of it, on and off the
// vector width; ties.
#include "ops/switch_heads.h"

#include <spdlog/fmt/fmt.h>

#include "core/kinds.h"
#include "ops/cases.h"

namespace sluice::test {
namespace {

struct SwitchCase {
  int64_t tokens, heads, experts, chosen, width, channels;
  bool tied = false;
};

/// Logits of a head are apart, or equal: no rounding turns their order.
OpCase switch_case(const SwitchCase& s) {
  return {fmt::format("switch_heads T={} H={} E={} K={} w={} D={}{}", s.tokens, s.heads, s.experts, s.chosen,
                      s.width, s.channels, s.tied ? " tied" : ""),
          [=](CaseRun& r) {
            const int64_t T = s.tokens, H = s.heads, E = s.experts, K = s.chosen;
            const Tensor logits = r.input("logits", r.dtype, {T, H, E}, [=](int64_t i) {
              const int64_t place = (i * 7919 + i / E * 31) % E;
              return 4.0 * static_cast<double>(s.tied ? place / 3 : place) / static_cast<double>(E) - 2;
            });
            const Tensor projected = r.input("projected", {T, H, E, s.width}),
                         dv = r.input("dv", {T, H, s.channels});
            const Tensor chosen = r.output("chosen", DType::i32, {T, H, K});
            switch_heads_forward(r.ctx, r.output("v", {T, H, s.channels}), chosen, logits, projected);
            switch_heads_backward(r.ctx, r.output("dlogits", {T, H, E}),
                                  r.output("dprojected", {T, H, E, s.width}), dv, logits, projected, chosen);
          }};
}

}  // namespace

OpFamily switch_heads_cases() {
  OpFamily family{"switch_heads", {}, {}};
  for (const int64_t channels : {10, 16, 64, 128}) {
    family.cases.push_back(switch_case({5, 3, 1, 1, channels, channels}));
    family.cases.push_back(switch_case({7, 2, 4, 4, channels, channels}));
    family.cases.push_back(switch_case({4, 2, 8, 2, channels / 2, channels, true}));
    family.cases.push_back(switch_case({3, 2, 8, 8, channels / 2, channels}));
  }
  family.cases.push_back(switch_case({6, 4, 4, 4, 32, 128}));
  family.cases.push_back(switch_case({3, 1, 1024, 32, 2, 64, true}));
  family.cases.push_back(switch_case({0, 2, 4, 2, 8, 8}));
  family.fuzz = [](Random& random) {
    const int64_t experts = uniform(random, 1, 12),
                  width = one_of<int64_t>(random, {uniform(random, 1, 40), 8 * uniform(random, 1, 20)});
    return switch_case({uniform(random, 1, 20), uniform(random, 1, 5), experts, uniform(random, 1, experts),
                        width, width * uniform(random, 1, experts), uniform(random, 0, 1) == 1});
  };
  return family;
}

}  // namespace sluice::test
