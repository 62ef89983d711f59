#include "ops/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(rope_forward)
SLUICE_DECLARE_BACKENDS(rope_backward)

namespace sluice {
namespace {

void check_rope(const char* op, const char* out_name, const Tensor& out, const char* in_name,
                const Tensor& in, const Tensor& positions, const Tensor& cos, const Tensor& sin) {
  check_floating(op, in_name, in);
  SLUICE_CHECK(in.rank == 3 && in.dim(2) % 2 == 0, "{}: {} must be (T, H, D) with D even, got {}", op,
               in_name, in.describe());
  SLUICE_CHECK(cos.rank == 2, "{}: cos must be (positions, D/2), got {}", op, cos.describe());
  check_rows_like(op, out_name, out, in);
  check_tensor(op, "positions", positions, DType::i32, {in.dim(0)});
  check_tensor(op, "cos", cos, accumulate_dtype(in.dtype), {cos.dim(0), in.dim(2) / 2});
  check_tensor(op, "sin", sin, accumulate_dtype(in.dtype), {cos.dim(0), in.dim(2) / 2});
}

/// Weight of interpolation (1) versus extrapolation (0) for frequency i: YaRN's ramp between the dimensions
/// that rotate beta_fast and beta_slow times within the original context.
double yarn_ramp(int64_t i, double head_dim, double theta, const RopeScaling& s) {
  const auto dimension_of = [&](double rotations) {
    return head_dim * std::log(s.original_max_position_embeddings / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(theta));
  };
  double low = dimension_of(s.beta_fast), high = dimension_of(s.beta_slow);
  if (s.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, head_dim - 1);
  if (high == low) high += 0.001;
  return std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
}

}  // namespace

void rope_table(Tensor cos, Tensor sin, double theta, const RopeScaling& scaling) {
  SLUICE_CHECK(cos.rank == 2 && (cos.dtype == DType::f32 || cos.dtype == DType::f64),
               "rope_table: cos must be (positions, D/2) f32 or f64, got {}", cos.describe());
  check_tensor("rope_table", "sin", sin, cos.dtype, {cos.dim(0), cos.dim(1)});
  SLUICE_CHECK(theta > 1, "rope_table: theta must be above 1, got {}", theta);
  SLUICE_CHECK(!scaling.yarn || scaling.factor >= 1, "rope_table: factor must be at least 1, got {}",
               scaling.factor);
  SLUICE_CHECK(cos.device == Device::cpu && sin.device == Device::cpu, "rope_table: host only");
  if (!cos.data) return;  // a measuring arena
  const int64_t positions = cos.dim(0), half = cos.dim(1);
  const double head_dim = 2.0 * static_cast<double>(half),
               m = scaling.yarn ? scaling.attention_factor.value_or(0.1 * std::log(scaling.factor) + 1) : 1;
  for (int64_t i = 0; i < half; ++i) {
    double frequency = std::pow(theta, -2.0 * static_cast<double>(i) / head_dim);
    if (scaling.yarn) {
      const double ramp = yarn_ramp(i, head_dim, theta, scaling);
      frequency = frequency / scaling.factor * ramp + frequency * (1 - ramp);
    }
    for (int64_t t = 0; t < positions; ++t) {
      const double angle = static_cast<double>(t) * frequency, c = m * std::cos(angle),
                   s = m * std::sin(angle);
      if (cos.dtype == DType::f64)
        cos.as<double>()[t * half + i] = c, sin.as<double>()[t * half + i] = s;
      else
        cos.as<float>()[t * half + i] = static_cast<float>(c),
                                   sin.as<float>()[t * half + i] = static_cast<float>(s);
    }
  }
}

void rope_forward(Context& ctx, Tensor y, const Tensor& x, const Tensor& positions, const Tensor& cos,
                  const Tensor& sin) {
  check_rope("rope_forward", "y", y, "x", x, positions, cos, sin);
  check_like("rope_forward", "y", y, x);
  SLUICE_DISPATCH(rope_forward, ctx, y, x, positions, cos, sin);
}

void rope_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& positions, const Tensor& cos,
                   const Tensor& sin) {
  check_rope("rope_backward", "dx", dx, "dy", dy, positions, cos, sin);
  SLUICE_DISPATCH(rope_backward, ctx, dx, dy, positions, cos, sin);
}

}  // namespace sluice
