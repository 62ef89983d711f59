// Products of many experts: tiles on and off the grid, groups that end within a tile, that are empty, that
// have everything; gathered rows; rows beyond the last group. On Hopper rows of whole 16-byte vectors (sizes
// divisible by 8) take wgmma, the others mma.sync; elsewhere all take mma.sync.
#include "ops/grouped_linear.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

#include "core/device.h"
#include "ops/cases.h"
#ifdef SLUICE_EMULATION
#include "seam.h"
#endif

namespace sluice::test {
namespace {

enum class Gather { first, second };  // dy or x of backward_weight

struct Shape {
  std::vector<int64_t> group_rows;
  int64_t n, k;
  int64_t beyond = 0;  // rows of no group
  int64_t tokens = 0;  // rows an index chooses from; 0: no index

  int64_t groups() const { return static_cast<int64_t>(group_rows.size()); }
  int64_t rows() const {
    int64_t sum = beyond;
    for (const int64_t r : group_rows) sum += r;
    return sum;
  }
};

std::string describe(const Shape& s) {
  return fmt::format("rows [{}] + {} N={} K={}{}", fmt::join(s.group_rows, " "), s.beyond, s.n, s.k,
                     s.tokens ? fmt::format(" of {} tokens", s.tokens) : "");
}

Tensor offsets(CaseRun& r, const Shape& s) {
  return r.input("offsets", DType::i32, {s.groups() + 1}, [&](int64_t g) {
    int64_t sum = 0;
    for (int64_t i = 0; i < g; ++i) sum += s.group_rows[static_cast<size_t>(i)];
    return static_cast<double>(sum);
  });
}

Tensor index(CaseRun& r, const Shape& s) {
  return s.tokens ? r.integers("index", {s.rows()}, 0, static_cast<int32_t>(s.tokens) - 1) : Tensor();
}

LinearWeight weight(CaseRun& r, const Shape& s) {
  LinearWeight w;
  w.value = r.input("w", {s.groups() * s.n, s.k}, 1 / std::sqrt(static_cast<double>(s.k)));
  w.groups = s.groups();
  return w;
}

/// Rows beyond the last group are unchanged.
OpCase forward_case(const Shape& s) {
  return {
      fmt::format("grouped_linear_forward {}", describe(s)), [=](CaseRun& r) {
        const Tensor x = r.input("x", {s.tokens ? s.tokens : s.rows(), s.k});
        const Tensor y = s.beyond ? r.inout("y", r.dtype, {s.rows(), s.n}) : r.output("y", {s.rows(), s.n});
        grouped_linear_forward(r.ctx, y, x, weight(r, s), offsets(r, s), index(r, s));
      }};
}

OpCase backward_input_case(const Shape& s) {
  return {fmt::format("grouped_linear_backward_input {}", describe(s)), [=](CaseRun& r) {
            const Tensor dy = r.input("dy", {s.tokens ? s.tokens : s.rows(), s.n});
            const Tensor dx =
                s.beyond ? r.inout("dx", r.dtype, {s.rows(), s.k}) : r.output("dx", {s.rows(), s.k});
            grouped_linear_backward_input(r.ctx, dx, dy, weight(r, s), offsets(r, s), index(r, s));
          }};
}

/// Rows beyond the last group are NaN in operands that are not gathered, and must have no effect.
OpCase backward_weight_case(const Shape& s, Gather gather, Into into = Into::add) {
  const bool of_dy = s.tokens && gather == Gather::first, of_x = s.tokens && gather == Gather::second;
  const auto operand = [s](CaseRun& r, const char* name, bool gathered, int64_t columns) {
    if (gathered) return r.input(name, {s.tokens, columns});
    const int64_t used = (s.rows() - s.beyond) * columns;
    return r.input(name, r.dtype, {s.rows(), columns},
                   [=](int64_t i) { return i < used ? static_cast<double>(i * 37 % 101 - 50) / 32 : NAN; });
  };
  return {fmt::format("grouped_linear_backward_weight {}{}{}", describe(s),
                      of_dy  ? " (dy)"
                      : of_x ? " (x)"
                             : "",
                      into == Into::add ? "" : " overwritten"),
          [=](CaseRun& r) {
            const Tensor dy = operand(r, "dy", of_dy, s.n), x = operand(r, "x", of_x, s.k);
            const Tensor chosen = of_dy || of_x ? index(r, s) : Tensor();
            const Tensor dw = into == Into::add ? r.inout("dw", r.wide, {s.groups() * s.n, s.k})
                                                : r.output("dw", r.wide, {s.groups() * s.n, s.k});
            grouped_linear_backward_weight(r.ctx, dw, dy, x, offsets(r, s), of_dy ? chosen : Tensor(),
                                           of_x ? chosen : Tensor(), into);
          }};
}

Shape random_shape(Random& random) {
  Shape s;
  const int64_t unit = one_of<int64_t>(random, {1, 8, 8, 8});
  s.n = unit * uniform(random, 1, 320 / unit), s.k = unit * uniform(random, 1, 320 / unit);
  s.group_rows.resize(static_cast<size_t>(uniform(random, 1, 6)));
  for (int64_t& rows : s.group_rows)
    rows = one_of<int64_t>(random, {0, uniform(random, 1, 20), uniform(random, 1, 150)});
  s.beyond = one_of<int64_t>(random, {0, uniform(random, 1, 100)});
  s.tokens = one_of<int64_t>(random, {0, uniform(random, 1, 100)});
  return s;
}

}  // namespace

OpFamily grouped_linear_cases() {
  OpFamily family{"grouped_linear", {}, {}};
  const auto all = [&](const Shape& s) {
    family.cases.push_back(forward_case(s));
    family.cases.push_back(backward_input_case(s));
    family.cases.push_back(backward_weight_case(s, Gather::first));
    family.cases.push_back(backward_weight_case(s, Gather::first, Into::overwrite));
    if (s.tokens) family.cases.push_back(backward_weight_case(s, Gather::second));
  };
  all({{1}, 1, 1});
  all({{3, 0, 5, 1}, 5, 7, 2});                    // nothing on a grid
  all({{3, 0, 5, 1}, 15, 9, 2, 4});                // the same, gathered
  all({{0, 0, 140, 0}, 48, 33, 7, 40});            // everything in one group, which is more than a tile
  all({{128, 128}, 128, 64});                      // whole tiles
  all({{128, 64, 0, 256}, 256, 128, 0, 100});      // the same, gathered: several tiles in a group
  all({{0, 1, 130, 2, 0, 65}, 264, 200, 60});      // off every grid, whole vectors
  all({{0, 1, 130, 2, 0, 65}, 136, 328, 60, 77});  // the same, gathered
  all({{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, 16, 24, 1, 50});  // many groups in what would be one tile
  all({{70, 200}, 8, 520});                                       // many steps of the contraction
  all({{70, 330}, 520, 8, 0, 40});
  // Of odd numbers of tiles, so that those that a cluster computes at once are of two groups, or of two
  // columns.
  all({{300, 1, 0, 129, 257}, 384, 520, 0, 90});
  all({{129, 128, 1}, 128, 264});
  all({{0, 0}, 16, 16, 5});      // no rows in any group
  all({{0}, 16, 16});            // no rows at all
  Shape many{{}, 8, 16, 3, 20};  // more groups than the plan takes in a round
  for (int64_t g = 0; g < 300; ++g) many.group_rows.push_back(g % 7 == 0 ? 2 : g == 261 ? 150 : 0);
  family.cases.push_back(forward_case(many));
  family.cases.push_back(backward_weight_case(many, Gather::second));
  family.fuzz = [](Random& random) {
    const Shape s = random_shape(random);
    switch (uniform(random, 0, 2)) {
      case 0:
        return forward_case(s);
      case 1:
        return backward_input_case(s);
      default:
        return backward_weight_case(s, one_of(random, {Gather::first, Gather::second}),
                                    one_of(random, {Into::overwrite, Into::add}));
    }
  };
  return family;
}

#ifdef SLUICE_EMULATION
TEST_CASE("grouped products load and store matrices without bank conflicts", "[grouped_linear]") {
  if (cuda_devices().empty()) return;
  const Shape gathered{{130, 70}, 136, 72, 0, 50};  // wgmma and stmatrix, or ldmatrix on other cards
  const Shape odd{{130, 70}, 131, 67, 0, 50};       // ldmatrix
  emu::reset_stats();
  for (const Shape& s : {gathered, odd})
    for (const OpCase& c :
         {forward_case(s), backward_input_case(s), backward_weight_case(s, Gather::second)}) {
      Context dry(0, Device::cuda);
      Arena measure("case", 0, Device::cuda);
      CaseRun dry_run(dry, DType::bf16, measure);
      c.run(dry_run);
      Arena memory("case", measure.high_water(), Device::cuda);
      Context ctx(std::max<int64_t>(dry.scratch.high_water(), 64), Device::cuda);
      CaseRun run(ctx, DType::bf16, memory);
      c.run(run);
      synchronize(ctx);
    }
  CHECK(emu::stats().ldsm_phases > 0);
  CHECK(emu::stats().ldsm_conflicts == 0);
}
#endif

}  // namespace sluice::test
