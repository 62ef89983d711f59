// Exclusive attention: groups of one and of many heads, depths on and off a warp's width, more heads than
// warps; a value of length 0.
#include "ops/exclusive.h"

#include <spdlog/fmt/fmt.h>

#include "ops/cases.h"

namespace sluice::test {
namespace {

struct ExclusiveCase {
  int64_t tokens, kv_heads, group, channels;
  bool learned, in_place, zero = false;
};

OpCase exclusive_case(const ExclusiveCase& c) {
  return {fmt::format("exclusive T={} Hkv={} group={} D={}{}{}{}", c.tokens, c.kv_heads, c.group, c.channels,
                      c.learned ? " learned" : "", c.in_place ? " in place" : "", c.zero ? " zero" : ""),
          [=](CaseRun& r) {
            const int64_t T = c.tokens, H = c.kv_heads * c.group, D = c.channels;
            const Tensor y = r.input("y", {T, H, D}), dz = r.input("dz", {T, H, D});
            const Tensor v = c.zero ? r.input("v", r.dtype, {T, c.kv_heads, D}, [](int64_t) { return 0.0; })
                                    : r.input("v", {T, c.kv_heads, D});
            const Tensor s = c.learned ? r.input("s", {H}) : Tensor(),
                         ds = c.learned ? r.inout("ds", r.wide, {H}) : Tensor();
            exclusive_backward(r.ctx, c.in_place ? r.compared("dy", dz) : r.output("dy", {T, H, D}),
                               r.output("dv", {T, c.kv_heads, D}), ds, dz, y, v, s);
            exclusive_forward(r.ctx, c.in_place ? r.compared("z", y) : r.output("z", {T, H, D}), y, v, s);
          }};
}

}  // namespace

OpFamily exclusive_cases() {
  OpFamily family{"exclusive", {}, {}};
  int turn = 0;
  for (const int64_t channels : {10, 64, 128})
    for (const int64_t group : {1, 4})
      for (const bool learned : {false, true})
        family.cases.push_back(exclusive_case({5, 2, group, channels, learned, turn++ % 3 == 0}));
  family.cases.push_back(exclusive_case({3, 5, 5, 32, true, true}));
  family.cases.push_back(exclusive_case({4, 2, 2, 16, true, false, true}));
  family.fuzz = [](Random& random) {
    return exclusive_case({uniform(random, 1, 20), uniform(random, 1, 5), uniform(random, 1, 6),
                           one_of<int64_t>(random, {uniform(random, 2, 40), 8 * uniform(random, 1, 20)}),
                           uniform(random, 0, 1) == 1, uniform(random, 0, 1) == 1});
  };
  return family;
}

}  // namespace sluice::test
