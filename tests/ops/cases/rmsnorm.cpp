// RMSNorm: rows taken by part of a warp, a warp, several, a block; widths no vector fits; a weight per head;
// in place; added to.
#include "ops/rmsnorm.h"

#include <spdlog/fmt/fmt.h>

#include "ops/cases.h"

namespace sluice::test {
namespace {

constexpr double kEps = 1e-5;

/// G 0: none.
Tensor weight_of(CaseRun& r, int64_t groups, int64_t width) {
  return groups == 0 ? Tensor() : r.input("weight", {groups, width});
}

OpCase forward_case(int64_t rows, int64_t width, int64_t groups, bool in_place) {
  return {fmt::format("rmsnorm_forward R={} D={} G={}{}", rows, width, groups, in_place ? " in place" : ""),
          [=](CaseRun& r) {
            const Tensor x = r.input("x", {rows, width}), w = weight_of(r, groups, width);
            const Tensor y = in_place ? r.compared("y", x) : r.output("y", {rows, width});
            rmsnorm_forward(r.ctx, y, r.output("rstd", r.wide, {rows}), x, groups == 1 ? w.view({width}) : w,
                            kEps);
          }};
}

OpCase add_case(int64_t rows, int64_t width, int alias, int64_t groups = 1) {
  return {fmt::format("add_rmsnorm_forward R={} D={} G={} {}", rows, width, groups,
                      alias == 0   ? "apart"
                      : alias == 1 ? "onto a"
                                   : "onto b"),
          [=](CaseRun& r) {
            const Tensor a = r.input("a", {rows, width}), b = r.input("b", {rows, width});
            const Tensor sum =
                alias == 0 ? r.output("sum", {rows, width}) : r.compared("sum", alias == 1 ? a : b);
            add_rmsnorm_forward(r.ctx, sum, r.output("y", {rows, width}), r.output("rstd", r.wide, {rows}), a,
                                b, groups == 0 ? Tensor() : r.input("weight", {width}), kEps);
          }};
}

OpCase backward_case(int64_t rows, int64_t width, int64_t groups, bool in_place, Into into,
                     bool shifted = false) {
  return {
      fmt::format("rmsnorm_backward R={} D={} G={}{}{}{}", rows, width, groups, in_place ? " in place" : "",
                  into == Into::add ? " added" : "", shifted ? " one element on" : ""),
      [=](CaseRun& r) {
        const auto tensor = [&](const char* name) {
          if (!shifted) return r.input(name, {rows, width});
          return r.input(name, {rows * width + 1}).rows(1, rows * width).view({rows, width});
        };
        const Tensor x = tensor("x"), dy = tensor("dy");
        const Tensor w = weight_of(r, groups, width), rstd = r.input("rstd", r.wide, {rows});
        const Tensor dx = in_place ? r.compared("dx", dy) : r.inout("dx", r.dtype, {rows, width});
        rmsnorm_backward(r.ctx, dx, groups == 0 ? Tensor() : r.inout("dweight", r.wide, {groups, width}), dy,
                         x, w, rstd, into);
      }};
}

}  // namespace

OpFamily rmsnorm_cases() {
  OpFamily family{"rmsnorm", {}, {}};
  auto& cases = family.cases;
  for (const int64_t width : {1, 6, 20, 64, 96, 128, 200, 256, 512, 768, 1024, 2048, 4096, 8192}) {
    const int64_t rows = width > 1000 ? 3 : 11;
    cases.push_back(forward_case(rows, width, 1, false));
    cases.push_back(add_case(rows, width, static_cast<int>(width / 2 % 3)));
    cases.push_back(backward_case(rows, width, 1, false, Into::overwrite));
  }
  cases.push_back(forward_case(1, 16384 + 8, 1, false));  // longer than registers hold
  cases.push_back(backward_case(2, 16384 + 8, 1, false, Into::add));
  for (const int64_t width : {8, 37, 128, 640}) {
    cases.push_back(forward_case(12, width, 3, true));
    for (const int alias : {0, 1, 2}) cases.push_back(add_case(9, width, alias));
    for (const Into into : {Into::overwrite, Into::add})
      cases.push_back(backward_case(24, width, 3, false, into));
    cases.push_back(backward_case(75, width, 1, true, Into::overwrite));
    cases.push_back(backward_case(40, width, 1, false, Into::overwrite, true));
  }
  for (const int64_t width : {6, 128, 1024}) {  // without a weight
    cases.push_back(forward_case(11, width, 0, width == 128));
    cases.push_back(add_case(11, width, 0, 0));
    for (const Into into : {Into::overwrite, Into::add})
      cases.push_back(backward_case(11, width, 0, false, into, width == 1024));
    cases.push_back(backward_case(11, width, 0, true, Into::overwrite));
  }
  cases.push_back(backward_case(1000, 64, 1, false, Into::overwrite));  // many blocks, several rounds
  cases.push_back(backward_case(1024, 16, 4, false, Into::overwrite));
  cases.push_back(forward_case(0, 64, 1, false));
  cases.push_back(backward_case(0, 64, 1, false, Into::overwrite));
  family.fuzz = [](Random& random) {
    const int64_t groups = one_of<int64_t>(random, {1, 1, 2, 5}), rows = groups * uniform(random, 1, 30);
    const int64_t width = one_of<int64_t>(random, {uniform(random, 1, 100), 8 * uniform(random, 1, 200)});
    switch (uniform(random, 0, 2)) {
      case 0:
        return forward_case(rows, width, groups, uniform(random, 0, 1) == 1);
      case 1:
        return add_case(rows, width, static_cast<int>(uniform(random, 0, 2)));
      default:
        return backward_case(rows, width, groups, false, one_of(random, {Into::overwrite, Into::add}));
    }
  };
  return family;
}

}  // namespace sluice::test
