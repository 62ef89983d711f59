#include "ops/muon.h"

#include "ops/op_support.h"
#include "ops/reduce.h"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr int64_t kShapes[][2] = {
    {24, 96}, {130, 250}, {250, 100}, {1, 7}, {7, 1}};  // one chunk of rows, several, vectors

void orthogonalise(Pool& pool, Context& ctx, const Tensor& x, int64_t steps) {
  const Tensor squares = pool.zeros(DType::f64, {1});
  sum_of_squares(ctx, squares, x);
  newton_schulz(ctx, x, squares, steps);
}

/// The definition, without regard to which side is smaller.
std::vector<double> naive(const Tensor& x, int64_t steps) {
  const int64_t n = x.dim(0), k = x.dim(1);
  std::vector<double> y(static_cast<size_t>(n * k));
  double squares = 0;
  for (int64_t i = 0; i < n * k; ++i) squares += Pool::get(x, i) * Pool::get(x, i);
  for (int64_t i = 0; i < n * k; ++i)
    y[static_cast<size_t>(i)] = Pool::get(x, i) / (std::sqrt(squares) + 1e-7);
  using Matrix = std::vector<double>;
  const auto product = [](const Matrix& a, const Matrix& b, int64_t rows, int64_t inner, int64_t columns) {
    Matrix c(static_cast<size_t>(rows * columns));
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t l = 0; l < inner; ++l)
        for (int64_t j = 0; j < columns; ++j)
          c[static_cast<size_t>(i * columns + j)] +=
              a[static_cast<size_t>(i * inner + l)] * b[static_cast<size_t>(l * columns + j)];
    return c;
  };
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<double> t(y.size());
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < k; ++j) t[static_cast<size_t>(j * n + i)] = y[static_cast<size_t>(i * k + j)];
    const Matrix gram = product(y, t, n, k, n), once = product(gram, y, n, n, k),
                 twice = product(gram, once, n, n, k);
    for (size_t i = 0; i < y.size(); ++i) y[i] = 3.4445 * y[i] - 4.7750 * once[i] + 2.0315 * twice[i];
  }
  return y;
}

/// Squares of the singular values of x (N, K), N <= K: eigenvalues of x x^T by Jacobi's rotations.
std::vector<double> squared_singular_values(const Tensor& x) {
  const int64_t n = x.dim(0), k = x.dim(1);
  std::vector<std::vector<double>> a(static_cast<size_t>(n), std::vector<double>(static_cast<size_t>(n)));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < n; ++j)
      for (int64_t l = 0; l < k; ++l)
        a[static_cast<size_t>(i)][static_cast<size_t>(j)] +=
            Pool::get(x, i * k + l) * Pool::get(x, j * k + l);
  const auto size = static_cast<size_t>(n);
  for (int sweep = 0; sweep < 12; ++sweep)
    for (size_t p = 0; p < size; ++p)
      for (size_t q = p + 1; q < size; ++q) {
        if (std::abs(a[p][q]) < 1e-15) continue;
        const double angle = 0.5 * std::atan2(2 * a[p][q], a[q][q] - a[p][p]), c = std::cos(angle),
                     s = std::sin(angle);
        for (size_t i = 0; i < size; ++i) {
          const double u = a[i][p], v = a[i][q];
          a[i][p] = c * u - s * v, a[i][q] = s * u + c * v;
        }
        for (size_t i = 0; i < size; ++i) {
          const double u = a[p][i], v = a[q][i];
          a[p][i] = c * u - s * v, a[q][i] = s * u + c * v;
        }
      }
  std::vector<double> values;
  for (size_t i = 0; i < size; ++i) values.push_back(a[i][i]);
  return values;
}

}  // namespace

TEST_CASE("Newton-Schulz agrees over types and threads, on wide and tall matrices", "[muon]") {
  for (const auto& [rows, columns] : kShapes) {
    INFO(rows << " x " << columns);
    const int64_t n = rows, k = columns;
    check_op([&](Pool& pool, Context& ctx, DType type) {
      const Tensor x = exact_normal(pool, type, {n, k}, 3);
      orthogonalise(pool, ctx, x, 5);
      return std::vector{x};
    });
  }
}

TEST_CASE("Newton-Schulz equals the iteration, for even and odd numbers of steps", "[muon]") {
  Context ctx(kTestScratch);
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{130, 110}, {7, 20}, {20, 7}, {5, 5}})
    for (const int64_t steps : {0, 1, 2}) {
      INFO(rows << " x " << columns << ", " << steps << " steps");
      Pool pool;
      const Tensor x = pool.normal(DType::f64, {rows, columns}),
                   expected = pool.zeros(DType::f64, {rows, columns});
      const std::vector<double> y = naive(x, steps);
      std::copy(y.begin(), y.end(), expected.as<double>());
      orthogonalise(pool, ctx, x, steps);
      CHECK(relative_error(x, expected) < 1e-13);
    }
}

TEST_CASE("five steps of Newton-Schulz give singular values between 0.68 and 1.21", "[muon]") {
  Context ctx(kTestScratch);
  for (const int64_t columns : {96, 24}) {
    Pool pool;
    const Tensor x = pool.normal(DType::f32, {24, columns}, columns == 24 ? 0.05 : 1.0);
    // The quintic is 0.682 at its least beyond its hump, which is 1.202 high. A square of random numbers has
    // singular values near 0, which take more steps.
    for (int64_t i = 0; columns == 24 && i < 24; ++i) Pool::set(x, i * 25, Pool::get(x, i * 25) + 1);
    orthogonalise(pool, ctx, x, 5);
    for (const double square : squared_singular_values(x)) {
      CHECK(square > 0.68 * 0.68);
      CHECK(square < 1.21 * 1.21);
    }
  }
}

TEST_CASE("Newton-Schulz of zeros is zeros", "[muon]") {
  Context ctx(kTestScratch);
  Pool pool;
  const Tensor x = pool.zeros(DType::f32, {3, 5});
  orthogonalise(pool, ctx, x, 5);
  for (int64_t i = 0; i < x.numel(); ++i) CHECK(Pool::get(x, i) == 0);
}
