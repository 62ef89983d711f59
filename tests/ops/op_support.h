#pragma once
// Common parts of the tests of elementwise ops: one tolerance table, and a check of an op over types and
// threads.
#include <catch2/catch.hpp>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/parallel_for.h"
#include "support/gradcheck.h"
#include "support/products.h"

namespace sluice::test {

/// Norm-wise relative error: of a gradient in f64 against central differences, and of f32 and bf16 storage
/// against f64 on equal inputs.
constexpr double kGradientTolerance = 1e-7;
constexpr double tolerance(DType t) { return t == DType::f64 ? 1e-13 : t == DType::f32 ? 1e-5 : 1e-2; }
constexpr DType kFloatingTypes[] = {DType::f32, DType::bf16, DType::f64};

constexpr int64_t kTestScratch = int64_t{64} << 20;

/// Sets the number of threads for a scope.
class Threads {
 public:
  explicit Threads(int n) : before_(num_threads()) { set_num_threads(n); }
  ~Threads() { set_num_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.dtype == b.dtype && a.numel() == b.numel() &&
         std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0;
}

/// The message of the Error that f throws.
template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

/// Values that every storage type holds exactly, in storage type `type`.
inline Tensor exact_normal(Pool& pool, DType type, std::initializer_list<int64_t> dims, double spread = 1.0) {
  return pool.copy(pool.normal(DType::bf16, dims, spread), type);
}

/// Runs an op on tensors of a pool (the same values on every call, see exact_normal) and returns its outputs.
using Run = std::function<std::vector<Tensor>(Pool&, Context&, DType)>;

/// f32 and bf16 agree with f64; every type gives the same bits with 1 and 2 threads; a dry run takes the
/// same temporaries, reads no data, and releases them. Outputs from `products` on are matrix products, whose
/// bits are those of the library.
inline void check_op(const Run& run, size_t products = std::numeric_limits<size_t>::max()) {
  const Threads single(1);
  Pool pool64(7);
  Context ctx(kTestScratch);
  const auto exact = run(pool64, ctx, DType::f64);
  for (const DType type : kFloatingTypes) {
    INFO(dtype_name(type));
    Pool pool1(7);
    const auto one = run(pool1, ctx, type);
    for (size_t i = 0; i < exact.size(); ++i) {
      INFO("output " << i);
      CHECK(relative_error(one[i], exact[i]) <= tolerance(type));
    }
    {
      const Threads threads(2);
      Pool pool2(7);
      const auto two = run(pool2, ctx, type);
      for (size_t i = 0; i < exact.size(); ++i) {
        INFO("output " << i << ", two threads");
        if (i < products || products_keep_bits_over_threads())
          CHECK(same_bits(one[i], two[i]));
        else
          CHECK(relative_error(two[i], exact[i]) <= tolerance(type));
      }
    }
    Context real(kTestScratch), dry(0);
    Pool pool3(7), pool4(7);
    run(pool3, real, type);
    run(pool4, dry, type);
    CHECK(dry.scratch.high_water() == real.scratch.high_water());
    CHECK(dry.scratch.used() == 0);
    CHECK(real.scratch.used() == 0);
  }
}

}  // namespace sluice::test
