#include "analysis/pca.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"

namespace sluice {
namespace {

constexpr int kMaxSweeps = 60;  // a dozen is usual: convergence is quadratic

}  // namespace

std::vector<double> symmetric_eigen(std::vector<double> a, int64_t n, std::vector<double>& vectors) {
  const auto at = [n](std::vector<double>& m, int64_t i, int64_t j) -> double& {
    return m[static_cast<size_t>(i * n + j)];
  };
  vectors.assign(static_cast<size_t>(n * n), 0);
  for (int64_t i = 0; i < n; ++i) at(vectors, i, i) = 1;
  double whole = 0;
  for (const double x : a) whole += x * x;
  for (int sweep = 0; sweep < kMaxSweeps; ++sweep) {
    double off = 0;
    for (int64_t p = 0; p < n; ++p)
      for (int64_t q = p + 1; q < n; ++q) off += at(a, p, q) * at(a, p, q);
    if (off <= 1e-30 * whole) break;
    for (int64_t p = 0; p < n; ++p)
      for (int64_t q = p + 1; q < n; ++q) {
        const double apq = at(a, p, q);
        if (apq == 0) continue;
        // The rotation that makes a_pq zero, by the smaller angle.
        const double theta = (at(a, q, q) - at(a, p, p)) / (2 * apq);
        const double t = (theta >= 0 ? 1 : -1) / (std::abs(theta) + std::sqrt(theta * theta + 1));
        const double c = 1 / std::sqrt(t * t + 1), s = t * c;
        const auto rotate = [c, s](double& x, double& y) {
          const double old = x;
          x = c * old - s * y;
          y = s * old + c * y;
        };
        for (int64_t k = 0; k < n; ++k) rotate(at(a, p, k), at(a, q, k));
        for (int64_t k = 0; k < n; ++k) rotate(at(a, k, p), at(a, k, q));
        for (int64_t k = 0; k < n; ++k) rotate(at(vectors, p, k), at(vectors, q, k));
      }
  }
  std::vector<double> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) values[static_cast<size_t>(i)] = at(a, i, i);
  return values;
}

Projection project_to_plane(const double* points, int64_t count, int64_t dims) {
  SLUICE_CHECK(dims > 0, "project_to_plane: points of {} dimensions", dims);
  const auto d = static_cast<size_t>(dims);
  std::vector<double> mean(d, 0), centred(points, points + count * dims), covariance(d * d, 0);
  for (int64_t i = 0; i < count; ++i)
    for (size_t c = 0; c < d; ++c)
      mean[c] += points[static_cast<size_t>(i * dims) + c] / static_cast<double>(count);
  for (size_t i = 0; i < centred.size(); ++i) centred[i] -= mean[i % d];
  for (size_t i = 0; i < centred.size(); i += d)
    for (size_t a = 0; a < d; ++a)
      for (size_t b = 0; b <= a; ++b)
        covariance[a * d + b] += centred[i + a] * centred[i + b] / static_cast<double>(count);
  double trace = 0;
  for (size_t a = 0; a < d; ++a) {
    trace += covariance[a * d + a];
    for (size_t b = 0; b < a; ++b) covariance[b * d + a] = covariance[a * d + b];
  }

  std::vector<double> axes;
  const std::vector<double> variances = symmetric_eigen(std::move(covariance), dims, axes);
  std::vector<size_t> order(d);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return variances[a] > variances[b]; });

  Projection result;
  result.points.assign(static_cast<size_t>(count) * 2, 0);
  for (size_t k = 0; k < std::min<size_t>(2, d); ++k) {
    double* axis = axes.data() + order[k] * d;
    // An axis has two directions: the same one on every machine.
    const double* largest =
        std::max_element(axis, axis + d, [](double x, double y) { return std::abs(x) < std::abs(y); });
    const double sign = *largest < 0 ? -1 : 1;
    for (size_t i = 0; i < static_cast<size_t>(count); ++i)
      result.points[2 * i + k] = sign * std::inner_product(axis, axis + d, centred.data() + i * d, 0.0);
    if (trace > 0) result.explained[k] = std::max(variances[order[k]], 0.0) / trace;
  }
  return result;
}

}  // namespace sluice
