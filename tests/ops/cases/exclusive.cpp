// Exclusive attention: groups of one and of many heads, depths on and off a warp's width, more heads than
// warps; a value of length 0; outputs parallel to it, up to their rounding.
#include "ops/exclusive.h"

#include <spdlog/fmt/fmt.h>

#include "ops/cases.h"
#include "ops/rmsnorm.h"

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

/// Every other token's y is a multiple of v by head; behind z is a norm that would show its rounding.
OpCase parallel_case(int64_t kv_heads, int64_t group, int64_t channels, bool learned) {
  return {
      fmt::format("exclusive parallel Hkv={} group={} D={}{}", kv_heads, group, channels,
                  learned ? " learned" : ""),
      [=](CaseRun& r) {
        const int64_t T = 5, H = kv_heads * group, D = channels;
        // Exact in bf16.
        const auto value = [](int64_t i) { return static_cast<double>(2 * (i * 37 % 64) - 63) / 32; };
        const auto output = [&](int64_t i) {
          const int64_t row = i / D, h = row % H;
          return row / H % 2 ? value(i + 11)
                             : value(row / group * D + i % D) * (0.3 + 0.1 * static_cast<double>(h));
        };
        const Tensor y = r.input("y", r.dtype, {T, H, D}, output), dz = r.input("dz", {T, H, D}),
                     v = r.input("v", r.dtype, {T, kv_heads, D}, value);
        const Tensor s = learned ? r.input("s", r.dtype, {H}, [](int64_t h) { return h % 2 ? 1 : 0.5; })
                                 : Tensor(),
                     ds = learned ? r.inout("ds", r.wide, {H}) : Tensor();
        exclusive_backward(r.ctx, r.output("dy", {T, H, D}), r.output("dv", {T, kv_heads, D}), ds, dz, y, v,
                           s, true);
        const Tensor z = r.output("z", {T, H, D});
        exclusive_forward(r.ctx, z, y, v, s, true);
        rmsnorm_forward(r.ctx, r.output("norm", {T, H, D}), r.output("rstd", r.wide, {T * H}), z, {}, 1e-12);
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
  for (const bool learned : {false, true}) {
    family.cases.push_back(parallel_case(1, 4, 64, learned));
    family.cases.push_back(parallel_case(3, 3, 10, learned));
  }
  family.fuzz = [](Random& random) {
    return exclusive_case({uniform(random, 1, 20), uniform(random, 1, 5), uniform(random, 1, 6),
                           one_of<int64_t>(random, {uniform(random, 2, 40), 8 * uniform(random, 1, 20)}),
                           uniform(random, 0, 1) == 1, uniform(random, 0, 1) == 1});
  };
  return family;
}

}  // namespace sluice::test
