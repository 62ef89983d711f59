// Sums of bits: no element, one, several blocks and a rest; every bit is the CPU's.
#include "ops/bit_sum.h"

#include <spdlog/fmt/fmt.h>

#include "ops/cases.h"

namespace sluice::test {
namespace {

OpCase bit_sum_case(int64_t n, bool shifted) {
  return {fmt::format("bit_sum ({}){}", n, shifted ? " one element on" : ""), [=](CaseRun& r) {
            const Tensor x = r.input("x", {n + 1}).rows(shifted ? 1 : 0, n);
            bit_sum(r.ctx,
                    r.compared_exactly("sum", r.input("sum", DType::i32, {2}, [](int64_t) { return -1; })), x,
                    1000, 0x1234567890abcdefu);
          }};
}

}  // namespace

OpFamily bit_sum_cases() {
  OpFamily family{"bit_sum", {}, {}};
  for (const int64_t n : {0, 1, 255, 257, 5000, 300000}) family.cases.push_back(bit_sum_case(n, n == 5000));
  family.fuzz = [](Random& random) {
    return bit_sum_case(uniform(random, 1, 9000), uniform(random, 0, 1) == 1);
  };
  return family;
}

}  // namespace sluice::test
