// Muon: matrices wide, tall and square, on and off the vector width; momentum warming up; a step that is not
// applied.
#include "ops/muon.h"

#include <spdlog/fmt/fmt.h>

#include "ops/cases.h"
#include "ops/reduce.h"

namespace sluice::test {
namespace {

Tensor control_tensor(CaseRun& r, double step, bool apply) {
  UpdateControl c = {};
  c.lr = 0.02, c.step = step, c.clip = 0.5, c.apply = apply ? 1 : 0;
  return r.input("control", DType::f64, {kUpdateControl}, [=](int64_t i) {
    double values[kUpdateControl];
    std::memcpy(values, &c, sizeof c);
    return values[i];
  });
}

/// Products in bf16 on a GPU, in f32 on a CPU: what five steps make of the first roundings is large in the
/// directions whose singular values were small, 3.44^5 times.
OpCase newton_schulz_case(int64_t rows, int64_t columns, int64_t steps) {
  return {fmt::format("newton_schulz ({}, {}) {} steps", rows, columns, steps),
          [=](CaseRun& r) {
            const Tensor x = r.inout("x", r.dtype, {rows, columns}),
                         squares = r.input("squares", DType::f64, {1});
            sum_of_squares(r.ctx, squares, x);
            newton_schulz(r.ctx, x, squares, steps);
          },
          25};
}

OpCase momentum_case(int64_t rows, int64_t columns, double step, bool nesterov, bool apply) {
  return {
      fmt::format("muon_momentum ({}, {}) step {}{}{}", rows, columns, step, nesterov ? " nesterov" : "",
                  apply ? "" : " not applied"),
      [=](CaseRun& r) {
        muon_momentum(
            r.ctx, r.output("update", {rows, columns}), r.inout("m", r.wide, {rows, columns}),
            r.input("gradient", r.wide, {rows, columns}), control_tensor(r, step, apply),
            {.momentum = 0.95, .initial_momentum = 0.85, .momentum_warmup_steps = 10, .nesterov = nesterov});
      }};
}

OpCase apply_case(int64_t rows, int64_t columns, bool with_master, bool apply) {
  return {fmt::format("muon_apply ({}, {}){}{}", rows, columns, with_master ? " master" : "",
                      apply ? "" : " not applied"),
          [=](CaseRun& r) {
            Tensor master;
            if (with_master || r.dtype != r.wide) master = r.inout("master", r.wide, {rows, columns});
            muon_apply(r.ctx, r.inout("value", r.dtype, {rows, columns}), master,
                       r.input("update", {rows, columns}), control_tensor(r, 3, apply), 0.7, 0.1);
          }};
}

}  // namespace

OpFamily muon_cases() {
  OpFamily family{"muon", {}, {}};
  auto& cases = family.cases;
  for (const auto& [rows, columns] :
       {std::pair<int64_t, int64_t>{8, 24}, {24, 8}, {16, 16}, {5, 7}, {33, 9}, {1, 6}})
    for (const int64_t steps : {1, 5})
      cases.push_back(newton_schulz_case(rows, columns, rows == columns ? 2 : steps));
  for (const bool apply : {true, false}) {
    cases.push_back(momentum_case(8, 24, 4, true, apply));
    cases.push_back(momentum_case(5, 7, 30, false, apply));
    for (const bool with_master : {true, false}) {
      cases.push_back(apply_case(24, 8, with_master, apply));
      cases.push_back(apply_case(3, 7, with_master, apply));
    }
  }
  family.fuzz = [](Random& random) {
    const int64_t rows = uniform(random, 1, 40), columns = uniform(random, 1, 40);
    switch (uniform(random, 0, 2)) {
      case 0:
        return newton_schulz_case(rows, columns, uniform(random, 0, 2));
      case 1:
        return momentum_case(rows, columns, static_cast<double>(uniform(random, 1, 20)),
                             uniform(random, 0, 1) == 1, true);
      default:
        return apply_case(rows, columns, uniform(random, 0, 1) == 1, true);
    }
  };
  return family;
}

}  // namespace sluice::test
