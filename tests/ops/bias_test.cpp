// Biases of one linear map and of many experts', with the factors of an expert's rows: the formula,
// gradients, rows of no bias, gathered gradients.
#include "ops/bias.h"

#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;

namespace {

/// Biases of groups of rows; factors, where there are some, in another order than the rows.
struct Problem {
  std::vector<int64_t> groups;
  int64_t width, beyond = 0;
  bool weighted = false;

  int64_t inside() const {
    int64_t sum = 0;
    for (const int64_t rows : groups) sum += rows;
    return sum;
  }
  int64_t rows() const { return inside() + beyond; }
  int64_t count() const { return static_cast<int64_t>(groups.size()); }

  BiasRows of(Pool& pool, DType wide) const {
    BiasRows out;
    out.offsets = pool.zeros(DType::i32, {count() + 1});
    for (size_t g = 0; g < groups.size(); ++g)
      out.offsets.as<int32_t>()[g + 1] = out.offsets.as<int32_t>()[g] + static_cast<int32_t>(groups[g]);
    if (!weighted) return out;
    out.weights = pool.copy(pool.normal(DType::bf16, {rows()}), wide);
    out.slots = pool.zeros(DType::i32, {rows()});
    for (int64_t r = 0; r < rows(); ++r)
      out.slots.as<int32_t>()[r] = static_cast<int32_t>((r * 7919 + 3) % rows());  // every slot once
    return out;
  }
  /// The bias of a row; -1: none.
  int64_t group(int64_t r) const {
    for (int64_t g = 0, end = 0; g < count(); ++g)
      if (r < (end += groups[static_cast<size_t>(g)])) return g;
    return -1;
  }
};

// One row; empty groups first, last and between; more columns than a thread sums at once.
const Problem kProblems[] = {{{1}, 1},        {{3, 0, 5, 0}, 17, 0, true}, {{0, 0, 40}, 33, 7, true},
                             {{5, 9}, 70, 2}, {{2, 0, 19, 1}, 131},        {{200, 150}, 300, 5, true}};

double factor(const BiasRows& rows, int64_t r) {
  return rows.weights ? Pool::get(rows.weights, rows.slots.as<int32_t>()[r]) : 1.0;
}

}  // namespace

TEST_CASE("biases agree over types and threads, and a row beyond the last is not touched", "[bias]") {
  for (const Problem& p : kProblems) {
    CAPTURE(p.groups, p.width, p.weighted);
    check_op([&](Pool& pool, Context& ctx, DType type) {
      const DType wide = accumulate_dtype(type);
      const BiasRows rows = p.of(pool, wide);
      const Tensor y = exact_normal(pool, type, {p.rows(), p.width}),
                   bias = exact_normal(pool, type, {p.count(), p.width});
      const Tensor wide_y = pool.copy(y, wide), before = pool.copy(y, type);
      bias_forward(ctx, y, bias, rows);
      bias_forward(ctx, wide_y, bias, rows);
      CHECK(same_bits(y.rows(p.inside(), p.beyond), before.rows(p.inside(), p.beyond)));
      const Tensor dy = exact_normal(pool, type, {p.rows(), p.width}),
                   dbias = pool.copy(exact_normal(pool, type, {p.count(), p.width}), wide);
      bias_backward(ctx, dbias, dy, Tensor(), rows);
      std::vector outputs = {y, wide_y, dbias};
      if (p.weighted) {
        outputs.push_back(pool.copy(exact_normal(pool, type, {p.rows()}), wide));
        bias_backward_weights(ctx, outputs.back(), dy, Tensor(), bias, rows);
      }
      return outputs;
    });
  }
}

TEST_CASE("biases equal their formula, and their gradients central differences", "[bias]") {
  Context ctx(kTestScratch);
  for (const Problem& p : kProblems) {
    CAPTURE(p.groups, p.width, p.weighted);
    Pool pool;
    const BiasRows rows = p.of(pool, DType::f64);
    const int64_t R = p.rows(), N = p.width, sources = 11;
    const Tensor x = pool.normal(DType::f64, {R, N}), bias = pool.normal(DType::f64, {p.count() * N});
    const Tensor y = pool.copy(x, DType::f64);
    bias_forward(ctx, y, bias, rows);
    for (int64_t r = 0; r < R; ++r)
      for (int64_t i = 0; i < N; ++i) {
        const int64_t g = p.group(r);
        const double added = g < 0 ? 0 : factor(rows, r) * Pool::get(bias, g * N + i);
        REQUIRE(Pool::get(y, r * N + i) ==
                Approx(Pool::get(x, r * N + i) + added).epsilon(1e-14).margin(1e-14));
      }

    // Row r of the output's gradient is row index[r] of dy.
    const Tensor dy = pool.normal(DType::f64, {sources, N}), index = pool.integers({R}, 0, sources - 1);
    const auto loss = [&] {
      for (int64_t i = 0; i < R * N; ++i) Pool::set(y, i, 0);
      bias_forward(ctx, y, bias, rows);
      double sum = 0;
      for (int64_t i = 0; i < R * N; ++i)
        sum += Pool::get(y, i) * Pool::get(dy, index.as<int32_t>()[i / N] * N + i % N);
      return sum;
    };
    const Tensor dbias = pool.zeros(DType::f64, {p.count() * N});
    bias_backward(ctx, dbias, dy, index, rows);
    CHECK(gradient_error(bias, dbias, loss) <= kGradientTolerance);
    bias_backward(ctx, dbias, dy, index, rows);  // added to
    for (int64_t i = 0; i < dbias.numel(); ++i) Pool::set(dbias, i, Pool::get(dbias, i) / 2);
    CHECK(gradient_error(bias, dbias, loss) <= kGradientTolerance);
    if (!p.weighted) continue;
    const Tensor dweights = pool.zeros(DType::f64, {R});
    bias_backward_weights(ctx, dweights, dy, index, bias, rows);
    CHECK(gradient_error(rows.weights, dweights, loss) <= kGradientTolerance);
  }
}

TEST_CASE("without offsets all rows have one bias", "[bias]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor y = pool.zeros(DType::f32, {3, 2}), bias = pool.zeros(DType::f32, {2});
  Pool::set(bias, 0, 1.5), Pool::set(bias, 1, -2);
  bias_forward(ctx, y, bias, {});
  for (int64_t i = 0; i < 6; ++i) CHECK(Pool::get(y, i) == (i % 2 == 0 ? 1.5 : -2));
  const Tensor dbias = pool.zeros(DType::f32, {2});
  bias_backward(ctx, dbias, y, Tensor(), {});
  CHECK(Pool::get(dbias, 0) == 4.5);
  CHECK(Pool::get(dbias, 1) == -6);
}

TEST_CASE("biases refuse wrong arguments by name", "[bias]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor y = pool.zeros(DType::f32, {4, 3}), bias = pool.zeros(DType::f32, {3});
  const Tensor offsets = pool.zeros(DType::i32, {3}), slots = pool.zeros(DType::i32, {4});
  CHECK(error_of([&] { bias_forward(ctx, y, bias, {}); }) == "no error");
  CHECK(error_of([&] { bias_forward(ctx, y, bias, {.offsets = offsets}); }) ==
        "bias_forward: bias must hold 6 elements of f32, got (3) f32");
  CHECK(error_of([&] { bias_forward(ctx, y, pool.zeros(DType::f64, {3}), {}); }) ==
        "bias_forward: y is f32, the bias f64");
  CHECK(error_of([&] { bias_backward(ctx, bias, y, Tensor(), {.slots = slots}); }) ==
        "bias_backward: weights and slots belong together");
  CHECK(error_of([&] { bias_backward(ctx, bias, y, pool.zeros(DType::f32, {4}), {}); }) ==
        "bias_backward: index must be (4) i32, got (4) f32");
  CHECK(error_of([&] { bias_backward_weights(ctx, bias, y, Tensor(), bias, {}); }) ==
        "bias_backward_weights: without weights");
}
