#pragma once
// Central differences in f64 against hand-written gradients, and small helpers for op tests.
#include <cmath>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "core/context.h"

namespace sluice::test {

/// Owns the tensors of a test in host memory, random or filled, of any dtype.
class Pool {
 public:
  explicit Pool(uint32_t seed = 1) : random_(seed) {}

  Tensor zeros(DType dtype, std::initializer_list<int64_t> dims, const char* name = "t") {
    Tensor t(nullptr, dtype, dims, name);
    // 64-byte alignment, as in an arena.
    blocks_.emplace_back(static_cast<size_t>(t.bytes()) + 64, 0);
    const auto address = reinterpret_cast<uintptr_t>(blocks_.back().data());
    t.data = reinterpret_cast<void*>((address + 63) / 64 * 64);
    return t;
  }
  Tensor normal(DType dtype, std::initializer_list<int64_t> dims, double scale = 1.0,
                const char* name = "t") {
    Tensor t = zeros(dtype, dims, name);
    std::normal_distribution<double> normal_distribution(0.0, scale);
    for (int64_t i = 0; i < t.numel(); ++i) set(t, i, normal_distribution(random_));
    return t;
  }
  Tensor integers(std::initializer_list<int64_t> dims, int32_t low, int32_t high, const char* name = "t") {
    Tensor t = zeros(DType::i32, dims, name);
    std::uniform_int_distribution<int32_t> uniform(low, high);
    for (int64_t i = 0; i < t.numel(); ++i) t.as<int32_t>()[i] = uniform(random_);
    return t;
  }
  Tensor copy(const Tensor& source, DType dtype) {
    Tensor t = zeros(dtype, {source.numel()}, source.name);
    t.rank = source.rank;
    t.shape = source.shape;
    for (int64_t i = 0; i < t.numel(); ++i) set(t, i, get(source, i));
    return t;
  }

  static double get(const Tensor& t, int64_t i) {
    switch (t.dtype) {
      case DType::f32:
        return static_cast<const float*>(t.data)[i];
      case DType::f64:
        return static_cast<const double*>(t.data)[i];
      case DType::bf16:
        return static_cast<float>(static_cast<const bf16*>(t.data)[i]);
      case DType::i32:
        return static_cast<const int32_t*>(t.data)[i];
      case DType::u8:
        return static_cast<const uint8_t*>(t.data)[i];
    }
    return 0;
  }
  static void set(const Tensor& t, int64_t i, double x) {
    switch (t.dtype) {
      case DType::f32:
        static_cast<float*>(t.data)[i] = static_cast<float>(x);
        break;
      case DType::f64:
        static_cast<double*>(t.data)[i] = x;
        break;
      case DType::bf16:
        static_cast<bf16*>(t.data)[i] = bf16(static_cast<float>(x));
        break;
      case DType::i32:
        static_cast<int32_t*>(t.data)[i] = static_cast<int32_t>(x);
        break;
      case DType::u8:
        static_cast<uint8_t*>(t.data)[i] = static_cast<uint8_t>(x);
        break;
    }
  }

 private:
  std::mt19937 random_;
  std::deque<std::vector<char>> blocks_;
};

/// A double of the host as a tensor (1).
inline Tensor scalar(double& x) { return Tensor(&x, DType::f64, {1}); }

/// ||a - b|| / max(||a||, ||b||), 0 when both vanish; infinity if anything is not finite.
inline double relative_error(const Tensor& a, const Tensor& b) {
  double difference = 0, na = 0, nb = 0;
  for (int64_t i = 0; i < a.numel(); ++i) {
    const double x = Pool::get(a, i), y = Pool::get(b, i);
    if (!std::isfinite(x) || !std::isfinite(y)) return INFINITY;
    difference += (x - y) * (x - y);
    na += x * x;
    nb += y * y;
  }
  const double scale = std::sqrt(std::max(na, nb));
  return scale == 0 ? 0 : std::sqrt(difference) / scale;
}

/// <weights, t>: a scalar loss that depends on every element of an output.
inline double dot(const Tensor& weights, const Tensor& t) {
  double s = 0;
  for (int64_t i = 0; i < t.numel(); ++i) s += Pool::get(weights, i) * Pool::get(t, i);
  return s;
}

/// Norm-wise relative error between `gradient` and central differences of loss() in `x` (f64). loss
/// recomputes the forward pass from x. At most `samples` evenly spread elements are perturbed and compared.
/// The error is relative to the norm of the gradient, or to `floor` where that is larger.
inline double gradient_error(const Tensor& x, const Tensor& gradient, const std::function<double()>& loss,
                             int64_t samples = 200, double step = 1e-5, double floor = 0) {
  const int64_t n = x.numel(), count = std::min(n, samples);
  double difference = 0, norm = 0;
  for (int64_t s = 0; s < count; ++s) {
    const int64_t i = n * s / count;
    const double x0 = Pool::get(x, i), h = step * std::max(1.0, std::abs(x0));
    // Fourth-order differences: the truncation error stays below 1e-9 for smooth functions of unit scale.
    const auto at = [&](double value) {
      Pool::set(x, i, value);
      return loss();
    };
    const double numeric =
        (8 * (at(x0 + h * 50) - at(x0 - h * 50)) - (at(x0 + h * 100) - at(x0 - h * 100))) / (12 * 50 * h);
    Pool::set(x, i, x0);
    const double analytic = Pool::get(gradient, i);
    if (!std::isfinite(analytic) || !std::isfinite(numeric)) return INFINITY;
    difference += (numeric - analytic) * (numeric - analytic);
    norm += std::max(numeric * numeric, analytic * analytic);
  }
  return norm == 0 ? 0 : std::sqrt(difference) / std::max(std::sqrt(norm), floor);
}

/// The error message of a call that must fail.
inline std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

}  // namespace sluice::test
