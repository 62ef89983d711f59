#pragma once
// The first two principal components of points, for a head's queries and keys (sink-aware paper, figure 3).
#include <array>
#include <cstdint>
#include <vector>

namespace sluice {

struct Projection {
  std::vector<double>
      points;  // (count, 2), centred; signs make the largest coefficient of each component positive
  std::array<double, 2> explained{};  // fraction of the variance along each, larger first; 0 without variance
};

/// points (count, dims), dims >= 1. The covariance (1/count) is diagonalised by Jacobi rotations, in f64.
Projection project_to_plane(const double* points, int64_t count, int64_t dims);

/// Eigenvalues of a symmetric matrix a (n, n), which is overwritten, and its eigenvectors as rows of
/// `vectors` (n, n), unsorted (cyclic Jacobi; Golub and Van Loan, Matrix Computations, 8.5).
std::vector<double> symmetric_eigen(std::vector<double> a, int64_t n, std::vector<double>& vectors);

}  // namespace sluice
