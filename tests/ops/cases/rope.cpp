// Rotary embedding, alone and behind the norm of every head: head sizes for 4 to 32 lanes and off the grid,
// slices of heads that are not whole, a weight for all heads or one per head, in place.
#include "ops/rope.h"

#include <spdlog/fmt/fmt.h>

#include <catch2/catch.hpp>

#include "ops/cases.h"
#include "ops/made_queries.h"
#include "ops/norm_rope.h"

namespace sluice::test {
namespace {

constexpr int64_t kPositions = RopeAngles::kPositions;
constexpr double kEps = 1e-5;

using Table = RopeAngles;

OpCase rope_case(int64_t tokens, int64_t heads, int64_t width, bool in_place) {
  return {fmt::format("rope T={} H={} D={}{}", tokens, heads, width, in_place ? " in place" : ""),
          [=](CaseRun& r) {
            const Table t(r, tokens, width / 2);
            const Tensor x = r.input("x", {tokens, heads, width}), dy = r.input("dy", {tokens, heads, width});
            const auto out = [&](const char* name, const Tensor& in) {
              return in_place ? r.compared(name, in) : r.output(name, {tokens, heads, width});
            };
            rope_forward(r.ctx, out("y", x), x, t.positions, t.cos, t.sin);
            // In every second shape as columns of a matrix.
            const Tensor dx = !in_place && tokens % 2 == 1
                                  ? r.columns("dx", tokens, heads * width).view({tokens, heads, width})
                                  : out("dx", dy);
            rope_backward(r.ctx, dx, dy, t.positions, t.cos, t.sin);
          }};
}

OpCase norm_rope_case(int64_t tokens, int64_t heads, int64_t width, bool per_head, bool in_place,
                      bool weights = true) {
  return {fmt::format("norm_rope T={} H={} D={}{}{}", tokens, heads, width,
                      !weights   ? " no weight"
                      : per_head ? " weight per head"
                                 : "",
                      in_place ? " in place" : ""),
          [=](CaseRun& r) {
            const Table t(r, tokens, width / 2);
            const Tensor x = r.input("x", {tokens, heads, width}), dy = r.input("dy", {tokens, heads, width});
            const Tensor w = !weights   ? Tensor()
                             : per_head ? r.input("weight", {heads, width})
                                        : r.input("weight", {width});
            norm_rope_forward(r.ctx, r.output("y", {tokens, heads, width}),
                              r.output("rstd", r.wide, {tokens * heads}), x, w, kEps, t.positions, t.cos,
                              t.sin);
            const Tensor rstd = r.input("rstd of backward", r.wide, {tokens * heads});
            const Tensor dw = !weights   ? Tensor()
                              : per_head ? r.inout("dweight", r.wide, {heads, width})
                                         : r.inout("dweight", r.wide, {width});
            const Tensor dx = in_place ? r.compared("dx", dy)
                              : (tokens + heads) % 2 == 0
                                  ? r.columns("dx", tokens, heads * width).view({tokens, heads, width})
                                  : r.output("dx", {tokens, heads, width});
            norm_rope_backward(r.ctx, dx, dw, dy, x, w, rstd, t.positions, t.cos, t.sin);
          }};
}

/// A position outside the table is reported, immediately or at the next synchronize.
OpCase outside_case(int32_t bad, int64_t width) {
  return {fmt::format("rope of position {} D={}", bad, width), [=](CaseRun& r) {
            const int64_t tokens = 6, heads = 2;
            Table t(r, tokens, width / 2);
            t.positions =
                r.input("positions", DType::i32, {tokens}, [=](int64_t i) { return i == 4 ? bad : 1.0; });
            const Tensor x = r.input("x", {tokens, heads, width}), y = r.input("y", {tokens, heads, width});
            const Tensor w = r.input("weight", {width}), rstd = r.input("rstd", r.wide, {tokens * heads});
            const Tensor dw = r.input("dweight", r.wide, {width});
            const std::function<void()> calls[] = {
                [&] { rope_forward(r.ctx, y, x, t.positions, t.cos, t.sin); },
                [&] { norm_rope_forward(r.ctx, y, rstd, x, w, kEps, t.positions, t.cos, t.sin); },
                [&] { norm_rope_backward(r.ctx, y, dw, y, x, w, rstd, t.positions, t.cos, t.sin); }};
            for (const auto& call : calls) {
              if (r.ctx.dry_run)
                call();
              else
                CHECK_THROWS_WITH((call(), synchronize(r.ctx)), Catch::Contains("position"));
            }
            t.positions = r.integers("positions inside", {tokens}, 0, kPositions - 1);  // usable again
            norm_rope_backward(r.ctx, y, dw, y, x, w, rstd, t.positions, t.cos, t.sin);
          }};
}

}  // namespace

OpFamily rope_cases() {
  OpFamily family{"rope", {}, {}};
  auto& cases = family.cases;
  for (const int64_t width : {2, 6, 16, 32, 64, 96, 128, 256, 512, 600}) {
    cases.push_back(rope_case(5, 3, width, width % 64 == 0));
    cases.push_back(norm_rope_case(5, 3, width, false, width % 32 == 0));
    cases.push_back(norm_rope_case(3, 2, width, true, width % 32 != 0));
  }
  for (const int64_t heads : {1, 4, 5, 9}) {
    cases.push_back(rope_case(7, heads, 64, false));
    cases.push_back(norm_rope_case(13, heads, 128, false, false));
    cases.push_back(norm_rope_case(13, heads, 64, true, false));
  }
  for (const int64_t width : {10, 64})
    cases.push_back(norm_rope_case(5, 3, width, false, width == 64, false));
  cases.push_back(norm_rope_case(300, 4, 32, false, false));  // several blocks, several rounds
  cases.push_back(norm_rope_case(300, 2, 32, true, false));
  cases.push_back(norm_rope_case(120, 2, 10, false, false));
  for (const int32_t bad : {-1, static_cast<int32_t>(kPositions)})
    for (const int64_t width : {10, 64}) cases.push_back(outside_case(bad, width));
  cases.push_back(rope_case(0, 2, 64, false));
  cases.push_back(norm_rope_case(0, 2, 64, false, false));
  family.fuzz = [](Random& random) {
    const int64_t tokens = uniform(random, 1, 40), heads = uniform(random, 1, 9);
    const int64_t width = one_of<int64_t>(random, {2 * uniform(random, 1, 40), 16 * uniform(random, 1, 20)});
    const bool in_place = uniform(random, 0, 1) == 1;
    return uniform(random, 0, 2) == 0
               ? rope_case(tokens, heads, width, in_place)
               : norm_rope_case(tokens, heads, width, uniform(random, 0, 1) == 1, in_place);
  };
  return family;
}

}  // namespace sluice::test
