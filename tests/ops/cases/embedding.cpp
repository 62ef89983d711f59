// Embedding: vocabularies that sort in one to three passes, ids that fill many units, rows on and off the
// vector width.
#include "ops/embedding.h"

#include <spdlog/fmt/fmt.h>

#include <catch2/catch.hpp>
#include <cmath>

#include "ops/cases.h"

namespace sluice::test {
namespace {

/// `skew` 0: all ids are equally frequent; otherwise small ids are frequent, as in text.
OpCase embedding_case(int64_t tokens, int64_t vocab, int64_t width, double skew) {
  return {fmt::format("embedding T={} V={} C={} skew {}", tokens, vocab, width, skew), [=](CaseRun& r) {
            const Tensor ids = r.input("tokens", DType::i32, {tokens}, [=](int64_t i) {
              const double u = static_cast<double>(i * 7919 % 10007) / 10007;
              return std::floor(std::pow(u, 1 + skew) * static_cast<double>(vocab));
            });
            embedding_forward(r.ctx, r.output("y", {tokens, width}), ids, r.input("weight", {vocab, width}));
            embedding_backward(r.ctx, r.inout("dweight", r.wide, {vocab, width}, 0.1),
                               r.input("dy", {tokens, width}), ids);
          }};
}

/// A sum in the order of the tokens, or in any, is the same sum.
OpCase any_order_case(int64_t tokens, int64_t vocab, int64_t width) {
  return {fmt::format("embedding_backward in any order T={} V={} C={}", tokens, vocab, width),
          [=](CaseRun& r) {
            const Tensor ids = r.integers("tokens", {tokens}, 0, static_cast<int32_t>(vocab - 1));
            r.ctx.deterministic = false;
            embedding_backward(r.ctx, r.inout("dweight", r.wide, {vocab, width}),
                               r.input("dy", {tokens, width}), ids);
            r.ctx.deterministic = true;
          }};
}

/// A token outside the vocabulary is reported, immediately or at the next synchronize.
OpCase outside_case(int32_t bad) {
  return {fmt::format("embedding of token {}", bad), [=](CaseRun& r) {
            const int64_t tokens = 40, vocab = 7, width = 8;
            const Tensor ids =
                r.input("tokens", DType::i32, {tokens}, [=](int64_t i) { return i == 33 ? bad : i % vocab; });
            const Tensor y = r.input("y", {tokens, width}), weight = r.input("weight", {vocab, width});
            const Tensor dweight = r.input("dweight", r.wide, {vocab, width});
            const auto forward = [&] { embedding_forward(r.ctx, y, ids, weight), synchronize(r.ctx); };
            const auto backward = [&] { embedding_backward(r.ctx, dweight, y, ids), synchronize(r.ctx); };
            if (r.ctx.dry_run) return forward(), backward();
            CHECK_THROWS_WITH(forward(), Catch::Contains("vocabulary"));
            CHECK_THROWS_WITH(backward(), Catch::Contains("vocabulary"));
          }};
}

}  // namespace

OpFamily embedding_cases() {
  OpFamily family{"embedding", {}, {}};
  auto& cases = family.cases;
  for (const int64_t width : {1, 6, 8, 64, 200}) {
    cases.push_back(embedding_case(1, 3, width, 0));
    cases.push_back(embedding_case(70, 11, width, 0));
    cases.push_back(embedding_case(33, 700, width, 1));
    cases.push_back(any_order_case(33, 9, width));
  }
  cases.push_back(embedding_case(2500, 1, 8, 0));  // one id fills 157 units, two chunks of the sort
  cases.push_back(embedding_case(3000, 40, 12, 2));
  cases.push_back(embedding_case(4500, 5000, 8, 3));   // two passes, three chunks
  cases.push_back(embedding_case(300, 300000, 4, 1));  // three passes
  cases.push_back(embedding_case(64, 511, 8, 0));  // ids fill the digits, with and without the one for others
  cases.push_back(embedding_case(64, 512, 8, 0));
  cases.push_back(embedding_case(20, 7, 2056, 0));  // more columns than a block
  cases.push_back(embedding_case(0, 7, 8, 0));
  for (const int32_t bad : {-1, 7, 1 << 30}) cases.push_back(outside_case(bad));
  family.fuzz = [](Random& random) {
    return embedding_case(uniform(random, 1, 400),
                          one_of<int64_t>(random, {uniform(random, 1, 20), uniform(random, 1, 2000)}),
                          one_of<int64_t>(random, {uniform(random, 1, 40), 8 * uniform(random, 1, 40)}),
                          static_cast<double>(uniform(random, 0, 3)));
  };
  return family;
}

}  // namespace sluice::test
