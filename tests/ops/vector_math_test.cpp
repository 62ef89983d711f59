#include <algorithm>
#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "core/dtype.h"
#include "ops/activation.h"
#include "ops/dispatch.h"
#include "ops/op_support.h"
#include "ops/reduce.h"

namespace sluice::test {
namespace {
#include "ops/cpu/vector_math.h"
}
}  // namespace sluice::test

SLUICE_DECLARE_BACKENDS(silu_forward)
SLUICE_DECLARE_BACKENDS(max_abs)

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

double relative(float x) {
  const double exact = std::exp(static_cast<double>(x));
  return std::abs(static_cast<double>(exp_fast(x)) - exact) / exact;
}

/// silu by each instruction set that this processor runs.
using Silu = void (*)(Context&, Tensor, const Tensor&);
std::vector<std::pair<const char*, Silu>> backends() {
  std::vector<std::pair<const char*, Silu>> list = {{"baseline", cpu::baseline::silu_forward}};
#if defined(__x86_64__)
  if (cpu_features().avx2_fma) list.emplace_back("avx2", cpu::avx2::silu_forward);
  if (cpu_features().avx512) list.emplace_back("avx512", cpu::avx512::silu_forward);
#endif
  return list;
}

}  // namespace

TEST_CASE("exp_fast is within 1.5e-7 of e^x over its finite range", "[vector_math]") {
  double worst = 0;
  // Every exponent and, within it, evenly spread mantissas; both signs.
  for (uint64_t bits = 0; bits < 0x7f800000u; bits += 1013)
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const float x = std::bit_cast<float>(static_cast<uint32_t>(bits) | sign);
      if (x >= -86.9f && x <= 88.72f) worst = std::max(worst, relative(x));
    }
  // Where the remainder changes sides: odd multiples of ln(2) / 2, and their neighbours.
  for (int n = -125; n <= 127; ++n) {
    float x = static_cast<float>((n + 0.5) * std::log(2.0));
    for (int i = 0; i < 8; ++i, x = std::nextafter(x, kInf))
      if (x >= -86.9f && x <= 88.72f) worst = std::max(worst, relative(x));
  }
  CHECK(worst <= 1.5e-7);
  CHECK(worst > 1e-8);  // an error of zero would mean that nothing was compared
}

TEST_CASE("exp_fast at the ends: zero, infinity, NaN, and never a denormal", "[vector_math]") {
  CHECK(exp_fast(0.0f) == 1.0f);
  CHECK(exp_fast(-0.0f) == 1.0f);
  CHECK(exp_fast(std::numeric_limits<float>::denorm_min()) == 1.0f);
  CHECK(std::isnan(exp_fast(kNan)));
  CHECK(std::isnan(exp_fast(-kNan)));
  CHECK(exp_fast(kInf) == kInf);
  CHECK(exp_fast(-kInf) == 0.0f);
  CHECK(exp_fast(std::numeric_limits<float>::max()) == kInf);
  CHECK(exp_fast(std::numeric_limits<float>::lowest()) == 0.0f);
  CHECK(std::isfinite(exp_fast(88.0f)));
  CHECK(std::isfinite(exp_fast(88.72f)));
  CHECK(exp_fast(88.73f) == kInf);
  CHECK(exp_fast(95.0f) == kInf);
  CHECK(exp_fast(-88.0f) == 0.0f);
  CHECK(exp_fast(std::nextafter(-86.9f, -kInf)) == 0.0f);
  // The last numbers before zero are normal, and what would be denormal is 0.
  for (float x = -86.9f; x < -86.0f; x += 1e-4f) CHECK(std::isnormal(exp_fast(x)));
  for (float x = -104.0f; x < -86.91f; x += 0.01f) CHECK(exp_fast(x) == 0.0f);
}

TEST_CASE("exp_fast is monotonic", "[vector_math]") {
  // Neighbours may swap by a rounding; numbers 1e-5 apart (84 units of the last place at 1) may not.
  bool rises = true;
  for (float x = -86.9f; x < 88.6f; x += 0.01f)
    rises = rises && exp_fast(x) <= exp_fast(x + 1e-5f * (1 + std::abs(x)));
  CHECK(rises);
}

TEST_CASE("sigmoid saturates to zero and one and keeps NaN", "[vector_math]") {
  CHECK(sigmoid(0.0f) == 0.5f);
  CHECK(sigmoid(kInf) == 1.0f);
  CHECK(sigmoid(-kInf) == 0.0f);
  CHECK(sigmoid(100.0f) == 1.0f);
  CHECK(sigmoid(-100.0f) == 0.0f);
  CHECK(sigmoid(17.5f) == 1.0f);
  CHECK(sigmoid(-88.0f) > 0.0f);
  CHECK(std::isnan(sigmoid(kNan)));
  CHECK(std::isnan(sigmoid(-kNan)));
  double worst = 0;
  for (float x = -87.3f; x < 90.0f; x += 0.0037f) {
    const double exact = 1 / (1 + std::exp(-static_cast<double>(x)));
    worst = std::max(worst, std::abs(static_cast<double>(sigmoid(x)) - exact) / exact);
  }
  CHECK(worst <= 3e-7);
  CHECK(sigmoid(1000.0) == 1.0);
  CHECK(sigmoid(-1000.0) == 0.0);
  CHECK(sigmoid(1.5) == 1 / (1 + std::exp(-1.5)));
}

TEST_CASE("bf16 loads and stores equal the conversions of dtype.h", "[vector_math]") {
  // Every bf16 there is, and the float neighbours of every tie between two of them.
  for (uint32_t upper = 0; upper < 0x10000u; ++upper) {
    bf16 element;
    element.bits = static_cast<uint16_t>(upper);
    const uint32_t loaded = std::bit_cast<uint32_t>(load(&element));
    if (loaded != upper << 16) FAIL("load of " << upper);
    for (const uint32_t lower : {0x0u, 0x1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float x = std::bit_cast<float>(upper << 16 | lower);
      store(&element, x);
      if (element.bits != bf16(x).bits) FAIL("store of " << x);
      if (std::isnan(x) != std::isnan(load(&element))) FAIL("NaN of " << x);
    }
  }
}

TEST_CASE("each instruction set computes the same function in vector body and remainder", "[vector_math]") {
  // 1003 elements: whole vectors of any width, and a remainder. The same value at each place gives the same
  // bits.
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor x = pool.zeros(DType::f32, {1003}), y = pool.zeros(DType::f32, {1003});
  for (const auto& [name, silu] : backends())
    for (const float value :
         {-200.0f, -87.0f, -20.0f, -1.0f, -1e-8f, 0.0f, 0.3f, 1.0f, 17.0f, 88.0f, 200.0f, kInf, kNan}) {
      INFO(name << ", " << value);
      for (int64_t i = 0; i < x.numel(); ++i) Pool::set(x, i, value);
      silu(ctx, y, x);
      const double exact = std::isinf(value) ? kInf : value / (1 + std::exp(-static_cast<double>(value)));
      bool same = true, close = true;
      for (int64_t i = 0; i < x.numel(); ++i) {
        const double got = Pool::get(y, i);
        same = same && (std::isnan(value) || std::bit_cast<uint32_t>(static_cast<float>(got)) ==
                                                 std::bit_cast<uint32_t>(y.as<float>()[0]));
        close = close &&
                (std::isnan(value) ? std::isnan(got)
                                   : got == exact || std::abs(got - exact) <= 4e-7 * std::abs(exact) + 1e-35);
      }
      CHECK(same);
      CHECK(close);
    }
}

#if defined(__x86_64__)
TEST_CASE("kernels leave the x87 registers empty", "[vector_math]") {
  // GCC 12 without -mno-mmx (cpu.cmake) moves integers through an MMX register here and does not clean up.
  Pool pool;
  Context ctx(kTestScratch);
  const auto check = [&](auto* max_abs_of) {
    for (const DType type : kFloatingTypes)
      for (const int64_t n : {1, 2, 7, 1003}) {
        const Tensor x = pool.normal(type, {n});
        double largest = 0;
        max_abs_of(ctx, scalar(largest), x);
        uint32_t environment[7];
        asm volatile("fnstenv %0\n\tfldenv %0\n\temms" : "+m"(environment));
        CHECK((environment[2] & 0xffff) == 0xffff);  // the tag word: two bits per register, 11 = empty
      }
  };
  check(cpu::baseline::max_abs);
  if (cpu_features().avx2_fma) check(cpu::avx2::max_abs);
  if (cpu_features().avx512) check(cpu::avx512::max_abs);
}
#endif
