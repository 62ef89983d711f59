// Residual additions, clipping, copies.
#include "ops/elementwise.h"

#include <spdlog/fmt/fmt.h>

#include "ops/cases.h"

namespace sluice::test {
namespace {

OpCase add_case(int64_t rows, int64_t width) {
  return {fmt::format("add_forward ({}, {})", rows, width), [=](CaseRun& r) {
            const Tensor a = r.input("a", {rows, width}), b = r.input("b", {rows, width});
            add_forward(r.ctx, r.output("y", {rows, width}), a, b);
          }};
}

}  // namespace

OpFamily elementwise_cases() {
  OpFamily family{"elementwise", {}, {}};
  for (const int64_t width : {1, 7, 64, 1000}) family.cases.push_back(add_case(3, width));
  family.fuzz = [](Random& random) { return add_case(uniform(random, 1, 9), uniform(random, 1, 600)); };
  return family;
}

}  // namespace sluice::test
