// Biases: of one map and of many experts', with and without the factors of rows; groups that are empty, rows
// of no group, gathered gradients, logits in f32 with a bias in bf16.
#include "ops/bias.h"

#include <spdlog/fmt/fmt.h>

#include "ops/cases.h"

namespace sluice::test {
namespace {

struct Shape {
  std::vector<int64_t> groups;  // rows of each; empty: one bias for `beyond` rows
  int64_t width, beyond = 0;
  bool weighted = false;
  int64_t tokens = 0;  // rows an index of dy chooses from; 0: no index

  int64_t rows() const {
    int64_t sum = beyond;
    for (const int64_t rows_of_one : groups) sum += rows_of_one;
    return sum;
  }
  int64_t biases() const { return std::max<int64_t>(static_cast<int64_t>(groups.size()), 1); }
};

std::string describe(const Shape& s) {
  return fmt::format("rows [{}] + {} N={}{}{}", fmt::join(s.groups, " "), s.beyond, s.width,
                     s.weighted ? " weighted" : "", s.tokens ? fmt::format(" of {}", s.tokens) : "");
}

BiasRows rows_of(CaseRun& r, const Shape& s) {
  BiasRows out;
  const int64_t count = static_cast<int64_t>(s.groups.size()), R = s.rows();
  if (count > 0)
    out.offsets = r.input("offsets", DType::i32, {count + 1}, [&](int64_t g) {
      int64_t sum = 0;
      for (int64_t i = 0; i < g; ++i) sum += s.groups[static_cast<size_t>(i)];
      return static_cast<double>(sum);
    });
  if (!s.weighted) return out;
  out.weights = r.input("weights", r.wide, {R});
  out.slots = r.input("slots", DType::i32, {R}, [=](int64_t i) {
    return static_cast<double>((i * 7919 + 3) % R);  // 7919 is prime: every slot once
  });
  return out;
}

OpCase bias_case(const Shape& s, bool logits = false) {
  return {fmt::format("bias {}{}", describe(s), logits ? " logits" : ""), [=](CaseRun& r) {
            const int64_t R = s.rows(), N = s.width;
            const BiasRows rows = rows_of(r, s);
            const Tensor bias = r.input("bias", {s.biases(), N});
            bias_forward(r.ctx, r.inout("y", logits ? r.wide : r.dtype, {R, N}), bias, rows);
            const Tensor dy = r.input("dy", logits ? r.wide : r.dtype, {s.tokens ? s.tokens : R, N});
            const Tensor index =
                s.tokens ? r.integers("index", {R}, 0, static_cast<int32_t>(s.tokens) - 1) : Tensor();
            bias_backward(r.ctx, r.inout("dbias", r.wide, {s.biases(), N}), dy, index, rows);
            if (s.weighted)
              bias_backward_weights(r.ctx, r.inout("dweights", r.wide, {R}), dy, index, bias, rows);
          }};
}

}  // namespace

OpFamily bias_cases() {
  OpFamily family{"bias", {}, {}};
  for (const int64_t width : {1, 7, 32, 33, 200}) {
    family.cases.push_back(bias_case({{}, width, 40}));
    family.cases.push_back(bias_case({{3, 0, 50, 1}, width, 2, true, 9}));
  }
  family.cases.push_back(bias_case({{}, 6, 70}, true));
  family.cases.push_back(bias_case({{0, 0, 30, 0}, 24}));
  family.cases.push_back(bias_case({{0, 0}, 16, 5, true}));
  family.cases.push_back(bias_case({{}, 16, 0}));
  Shape many{{}, 8, 3, true, 20};
  for (int64_t g = 0; g < 300; ++g) many.groups.push_back(g % 7 == 0 ? 2 : g == 261 ? 150 : 0);
  family.cases.push_back(bias_case(many));
  family.fuzz = [](Random& random) {
    Shape s{{}, uniform(random, 1, 300), uniform(random, 0, 20)};
    for (int64_t g = uniform(random, 0, 6); g > 0; --g)
      s.groups.push_back(one_of<int64_t>(random, {0, uniform(random, 1, 80)}));
    s.weighted = !s.groups.empty() && s.rows() > 0 && uniform(random, 0, 1) == 1;
    s.tokens = one_of<int64_t>(random, {0, uniform(random, 1, 40)});
    return bias_case(s);
  };
  return family;
}

}  // namespace sluice::test
