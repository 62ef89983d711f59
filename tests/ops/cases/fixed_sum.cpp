// Fixed-point sums: bitwise equal to the CPU; values out of range are skipped and reported.
#include "ops/fixed_sum.h"

#include <spdlog/fmt/fmt.h>

#include <catch2/catch.hpp>
#include <cmath>

#include "ops/cases.h"

namespace sluice::test {
namespace {

OpCase fixed_case(int64_t n, int64_t rows, bool shifted, bool bad) {
  OpCase c{
      fmt::format("fixed_sum {} x ({}){}{}", rows, n, shifted ? " one element on" : "",
                  bad ? " with what does not fit" : ""),
      [=](CaseRun& r) {
        const Tensor x = r.input("x", DType::f32, {rows * n + 1}, [=](int64_t i) {
          const double v = std::sin(static_cast<double>(i) * 12.9898) * (i % 5 == 0 ? 100.0 : 1e-3);
          return !bad || i % 311 != 7 ? v : i % 2 == 0 ? 128.0 : i % 3 == 0 ? -INFINITY : NAN;
        });
        const Tensor first_bad = r.compared_exactly(
            "bad", r.input("bad", DType::i32, {1, 2}, [](int64_t i) { return i == 0 ? -1 : 0x7fffffff; }));
        const Tensor all =
            r.input("all", DType::i32, {rows, n, 2}, [](int64_t i) { return static_cast<double>(i % 7919); });
        const Tensor total =
            r.compared_exactly("total", r.input("total", DType::i32, {n, 2}, [](int64_t) { return -1; }));
        for (int64_t row = 0; row < rows; ++row)
          add_fixed(r.ctx, total, first_bad, x.rows(row * n + (shifted ? 1 : 0), n), 128.0, 1000 + row * n,
                    row == 0 ? Into::overwrite : Into::add);
        const Tensor sum =
            r.compared_exactly("sum", r.input("sum", DType::i32, {n, 2}, [](int64_t) { return -1; }));
        sum_fixed_rows(r.ctx, sum, all);
        const Tensor back = r.input("back", DType::f32, {n + 1}, [](int64_t) { return NAN; });
        from_fixed(r.ctx, r.compared_exactly("x of total", back.rows(shifted ? 1 : 0, n)), total);
      }};
  c.bf16 = false;
  return c;
}

}  // namespace

OpFamily fixed_sum_cases() {
  OpFamily family{"fixed_sum", {}, {}};
  for (const int64_t n : {1, 32, 1001, 5000})
    for (const bool bad : {false, true})
      family.cases.push_back(fixed_case(n, n == 32 ? 9 : 3, n == 1001, bad));
  family.fuzz = [](Random& random) {
    return fixed_case(uniform(random, 1, 9000), uniform(random, 1, 6), uniform(random, 0, 1) == 1,
                      uniform(random, 0, 1) == 1);
  };
  return family;
}

}  // namespace sluice::test
