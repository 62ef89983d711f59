// CPU compared with CUDA, emulated or real, over the one list of cases (cases.h).
//   test_cuda                     the whole list
//   test_cuda "[attention]"       one family
//   SLUICE_FUZZ_CASES=200 SLUICE_FUZZ_SEED=7 test_cuda "[fuzz]"
//   SLUICE_CASE_STRIDE=3 SLUICE_CASE_FIRST=1 test_cuda   every third case per family, from its second on
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "ops/cases.h"
#include "support/gpu.h"

namespace sluice::test {
namespace {

struct Result {
  std::vector<CaseRun::Output> outputs;
  std::unique_ptr<CaseRun> run;  // owns the host copies
  std::unique_ptr<Arena> memory;
  std::unique_ptr<Context> ctx;
};

/// Measures on a dry run, then computes.
Result run_on(Device device, const OpCase& c, DType dtype) {
  Context dry(0, device);
  Arena measure("case", 0, device);
  CaseRun dry_run(dry, dtype, measure);
  c.run(dry_run);

  Result r;
  r.memory = std::make_unique<Arena>("case", std::max<int64_t>(measure.high_water(), 64), device);
  r.ctx = std::make_unique<Context>(std::max<int64_t>(dry.scratch.high_water(), 64), device);
  r.ctx->deterministic = true;
  r.run = std::make_unique<CaseRun>(*r.ctx, dtype, *r.memory);
  c.run(*r.run);
  r.outputs = r.run->collect();
  CHECK(r.ctx->scratch.high_water() == dry.scratch.high_water());
  CHECK(r.ctx->scratch.used() == 0);
  return r;
}

/// Largest difference of one element, in units of the root mean square.
double worst_element(const Tensor& a, const Tensor& b) {
  double worst = 0, squares = 0;
  for (int64_t i = 0; i < a.numel(); ++i) {
    const double x = Pool::get(a, i), y = Pool::get(b, i);
    worst = std::max(worst, std::abs(x - y));
    squares += y * y;
  }
  return squares == 0 ? worst : worst / std::sqrt(squares / static_cast<double>(a.numel()));
}

void check_case(const OpCase& c, DType dtype) {
  INFO(c.name << ", " << dtype_name(dtype));
  const Result expected = run_on(Device::cpu, c, dtype), actual = run_on(Device::cuda, c, dtype);
  REQUIRE(expected.outputs.size() == actual.outputs.size());
  const double tolerance = parity_tolerance(dtype) * c.tolerance_factor;
  for (size_t i = 0; i < expected.outputs.size(); ++i) {
    INFO("output " << expected.outputs[i].name);
    const Tensor &a = actual.outputs[i].host, &b = expected.outputs[i].host;
    if (a.dtype == DType::i32 || a.dtype == DType::u8) {
      CHECK(std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0);
      continue;
    }
    CHECK(relative_error(a, b) <= tolerance);
    CHECK(worst_element(a, b) <= 16 * tolerance);
  }
}

void check_both(const OpCase& c) {
  if (c.f32) check_case(c, DType::f32);
  if (c.bf16) check_case(c, DType::bf16);
}

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}

void check_family(const OpFamily& family) {
  if (no_device()) return;
  const auto stride = static_cast<size_t>(std::max<int64_t>(1, from_environment("SLUICE_CASE_STRIDE", 1)));
  const size_t first =
      static_cast<size_t>(from_environment("SLUICE_CASE_FIRST", 0)) % std::min(stride, family.cases.size());
  for (size_t i = first; i < family.cases.size(); i += stride) check_both(family.cases[i]);
}

void fuzz_family(const OpFamily& family) {
  if (no_device() || !family.fuzz) return;
  const int64_t seed = from_environment("SLUICE_FUZZ_SEED", 1),
                count = from_environment("SLUICE_FUZZ_CASES", 4);
  Random random(static_cast<uint32_t>(seed));
  for (int64_t i = 0; i < count; ++i) check_both(family.fuzz(random));
}

}  // namespace

#define SLUICE_FAMILY(family)                                                                      \
  TEST_CASE("every backend agrees: " #family, "[" #family "]") { check_family(family##_cases()); } \
  TEST_CASE("every backend agrees on random shapes: " #family, "[" #family "][fuzz]") {            \
    fuzz_family(family##_cases());                                                                 \
  }

#include "ops/case_families.h"

}  // namespace sluice::test
