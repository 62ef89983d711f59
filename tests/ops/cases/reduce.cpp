// Reductions to one number: no element, one, a chunk, several and a rest; infinities and NaN.
#include "ops/reduce.h"

#include <spdlog/fmt/fmt.h>

#include <catch2/catch.hpp>
#include <cmath>

#include "ops/cases.h"
#include "ops/elementwise.h"

namespace sluice::test {
namespace {

OpCase reduce_case(int64_t n, bool shifted) {
  return {fmt::format("sum, sum_of_squares, max_abs ({}){}", n, shifted ? " one element on" : ""),
          [=](CaseRun& r) {
            const Tensor x = shifted ? r.input("x", {n + 1}).rows(1, n) : r.input("x", {n});
            sum(r.ctx, r.output("sum", DType::f64, {1}), x, Into::overwrite);
            sum(r.ctx, r.inout("added", DType::f64, {1}), x, Into::add);
            sum_of_squares(r.ctx, r.output("squares", DType::f64, {1}), x);
            max_abs(r.ctx, r.output("largest", DType::f64, {1}), x);
            const Tensor bins = r.output("bins", DType::f64, {kSquareBins});
            fill(r.ctx, bins, 0.0);
            add_squares(r.ctx, bins, x);
            add_squares(r.ctx, bins, x);
          }};
}

/// Element `at` of n is `value`, which must show in sum_of_squares and max_abs.
OpCase special_case(int64_t n, int64_t at, double value) {
  return {fmt::format("reductions of {} in element {} of {}", value, at, n), [=](CaseRun& r) {
            const Tensor x = r.input("x", r.dtype, {n}, [=](int64_t i) {
              return i == at ? value : i == 0 ? -INFINITY : 1.0;
            });
            double squares = 0, largest = 0;
            const Tensor s = r.input("squares", DType::f64, {1}), m = r.input("largest", DType::f64, {1});
            sum_of_squares(r.ctx, s, x);
            max_abs(r.ctx, m, x);
            if (r.ctx.dry_run) return;
            copy(r.ctx, scalar(squares), s);
            copy(r.ctx, scalar(largest), m);
            synchronize(r.ctx);
            CHECK(!std::isfinite(squares));
            CHECK((std::isnan(value) ? std::isnan(largest) : largest == INFINITY));
          }};
}

/// Terms that cancel, so that another order shows.
OpCase rows_case(int64_t count, int64_t n, bool shifted) {
  OpCase c{fmt::format("sum_rows ({}, {}){}", count, n, shifted ? " one element on" : ""), [=](CaseRun& r) {
             for (const Into into : {Into::overwrite, Into::add}) {
               const Tensor all = r.input("rows", DType::f32, {count * n + 1}, [](int64_t i) {
                 return std::sin(static_cast<double>(i) * 12.9898) * (i % 3 == 0 ? 4e4 : 1);
               });
               const Tensor rows = all.rows(shifted ? 1 : 0, count * n).view({count, n});
               sum_rows(r.ctx, r.compared_exactly("y", r.input("y", DType::f32, {n})), rows, into);
             }
           }};
  c.bf16 = false;
  return c;
}

}  // namespace

OpFamily reduce_cases() {
  OpFamily family{"reduce", {}, {}};
  for (const int64_t n : {0, 1, 7, 1000, 65536, 3 * 65536 + 21})
    for (const bool shifted : {false, true}) family.cases.push_back(reduce_case(n, shifted));
  for (const double value : {static_cast<double>(NAN), static_cast<double>(INFINITY)})
    for (const int64_t at : {1, 299, 65536 + 5, 65536 + 298})
      family.cases.push_back(special_case(65536 + 299, at, value));
  for (const int64_t count : {1, 2, 3, 5, 8, 9, 17, 70})
    for (const int64_t n : {1, 32, 4100}) family.cases.push_back(rows_case(count, n, n == 32));
  family.fuzz = [](Random& random) {
    return reduce_case(uniform(random, 1, 100000), uniform(random, 0, 1) == 1);
  };
  return family;
}

}  // namespace sluice::test
