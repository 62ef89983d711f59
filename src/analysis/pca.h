#pragma once
// Principal components of points, two of them: where a head's queries and keys lie (sink-aware paper, figure
// 3).
#include <array>
#include <cstdint>
#include <vector>

namespace sluice {

struct Projection {
  std::vector<double> points;  // (count, 2), centred; of each component the largest coefficient is positive
  std::array<double, 2>
      explained{};  // share of the variance along each, the larger first; 0 where there is no variance
};

/// points (count, dims), dims >= 1. The covariance (1/count) is diagonalised by Jacobi rotations, in f64.
Projection project_to_plane(const double* points, int64_t count, int64_t dims);

/// Eigenvalues of a symmetric matrix a (n, n), used up, and its eigenvectors as rows of `vectors` (n, n), in
/// no order (cyclic Jacobi; Golub and Van Loan, Matrix Computations, 8.5).
std::vector<double> symmetric_eigen(std::vector<double> a, int64_t n, std::vector<double>& vectors);

}  // namespace sluice
