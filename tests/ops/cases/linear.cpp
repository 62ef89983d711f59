// The three products of a linear layer: operands in both orders, overwriting and adding, sizes on and off
// every grid.
#include "ops/linear.h"

#include <spdlog/fmt/fmt.h>

#include "ops/cases.h"

namespace sluice::test {
namespace {

LinearWeight weight(CaseRun& r, int64_t n, int64_t k) {
  LinearWeight w;
  w.value = r.input("w", {n, k}, 1 / std::sqrt(static_cast<double>(k)));
  return w;
}

OpCase forward_case(int64_t t, int64_t n, int64_t k) {
  return {fmt::format("linear_forward T={} N={} K={}", t, n, k), [=](CaseRun& r) {
            const Tensor x = r.input("x", {t, k});
            linear_forward(r.ctx, r.output("y", {t, n}), x, weight(r, n, k));
          }};
}

OpCase backward_input_case(int64_t t, int64_t n, int64_t k, Into into) {
  return {fmt::format("linear_backward_input T={} N={} K={}{}", t, n, k, into == Into::add ? " added" : ""),
          [=](CaseRun& r) {
            const Tensor dy = r.input("dy", {t, n});
            const Tensor dx = into == Into::add ? r.inout("dx", r.dtype, {t, k}) : r.output("dx", {t, k});
            linear_backward_input(r.ctx, dx, dy, weight(r, n, k), into);
          }};
}

/// dy and x start `skip` rows into their memory, so that pointers lose their alignment.
OpCase backward_weight_case(int64_t t, int64_t n, int64_t k, int64_t skip = 0, Into into = Into::add) {
  return {fmt::format("linear_backward_weight T={} N={} K={} skip={}{}", t, n, k, skip,
                      into == Into::add ? "" : " overwritten"),
          [=](CaseRun& r) {
            const Tensor dy = r.input("dy", {skip + t, n}).rows(skip, t),
                         x = r.input("x", {skip + t, k}).rows(skip, t);
            const Tensor dw =
                into == Into::add ? r.inout("dw", r.wide, {n, k}) : r.output("dw", r.wide, {n, k});
            linear_backward_weight(r.ctx, dw, dy, x, into);
          }};
}

}  // namespace

OpFamily linear_cases() {
  OpFamily family{"linear", {}, {}};
  const int64_t sizes[][3] = {{1, 1, 1},     {3, 5, 7},      {16, 16, 16}, {17, 64, 33},
                              {64, 48, 128}, {130, 257, 65}, {0, 8, 8}};
  for (const auto& [t, n, k] : sizes) {
    family.cases.push_back(forward_case(t, n, k));
    family.cases.push_back(backward_input_case(t, n, k, Into::overwrite));
    family.cases.push_back(backward_input_case(t, n, k, Into::add));
    family.cases.push_back(backward_weight_case(t, n, k));
    family.cases.push_back(backward_weight_case(t, n, k, 0, Into::overwrite));
  }
  family.cases.push_back(backward_weight_case(9, 11, 13, 3));
  family.fuzz = [](Random& random) {
    const int64_t t = uniform(random, 0, 150), n = uniform(random, 1, 150), k = uniform(random, 1, 150);
    switch (uniform(random, 0, 3)) {
      case 0:
        return forward_case(t, n, k);
      case 1:
        return backward_input_case(t, n, k, one_of(random, {Into::overwrite, Into::add}));
      default:
        return backward_weight_case(t, n, k, uniform(random, 0, 2),
                                    one_of(random, {Into::overwrite, Into::add}));
    }
  };
  return family;
}

}  // namespace sluice::test
