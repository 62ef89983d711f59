#include "ops/linear.h"

#include <catch2/catch.hpp>

#include "core/parallel_for.h"
#include "support/gradcheck.h"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr int64_t kScratch = 64 << 20;

/// Relative error allowed against the f64 loop over the same (already rounded) inputs.
double tolerance(DType t) { return t == DType::f64 ? 1e-14 : t == DType::f32 ? 2e-6 : 4e-3; }

/// a (m, k) times b (k, n), either stored transposed, as f64 loops.
Tensor naive(Pool& pool, const Tensor& a, bool a_transposed, const Tensor& b, bool b_transposed) {
  const int64_t m = a.dim(a_transposed ? 1 : 0), k = a.dim(a_transposed ? 0 : 1),
                n = b.dim(b_transposed ? 0 : 1);
  Tensor c = pool.zeros(DType::f64, {m, n});
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double s = 0;
      for (int64_t l = 0; l < k; ++l)
        s += Pool::get(a, a_transposed ? l * m + i : i * k + l) *
             Pool::get(b, b_transposed ? j * k + l : l * n + j);
      c.as<double>()[i * n + j] = s;
    }
  return c;
}

Tensor sum_of(Pool& pool, const Tensor& a, const Tensor& b) {
  Tensor c = pool.copy(a, DType::f64);
  for (int64_t i = 0; i < c.numel(); ++i) c.as<double>()[i] += Pool::get(b, i);
  return c;
}

void allocate_packed(Pool& pool, Context& ctx, LinearWeight& w, int64_t rows) {
  const LinearPackedBytes bytes =
      linear_packed_bytes(ctx, w.value.dtype, w.value.dim(0), w.value.dim(1), rows);
  if (bytes.forward > 0) w.packed = pool.zeros(DType::u8, {bytes.forward});
  if (bytes.transposed > 0) w.packed_transposed = pool.zeros(DType::u8, {bytes.transposed});
  linear_pack(ctx, w);
}

struct Size {
  int64_t t, n, k;
};
constexpr Size kSizes[] = {{1, 64, 48},  {3, 17, 31},    {65, 33, 1},
                           {70, 1, 129}, {128, 192, 64}, {1100, 70, 67}};
constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f64};

bool same_bits(const Tensor& a, const Tensor& b) {
  return std::equal(static_cast<const char*>(a.data), static_cast<const char*>(a.data) + a.bytes(),
                    static_cast<const char*>(b.data));
}

}  // namespace

TEST_CASE("linear products equal f64 loops, with and without packed copies", "[linear]") {
  Context ctx(kScratch);
  for (const DType type : kTypes)
    for (const auto& [t, n, k] : kSizes)
      for (const bool packed : {false, true}) {
        CAPTURE(dtype_name(type), t, n, k, packed);
        Pool pool;
        LinearWeight w;
        w.value = pool.normal(type, {n, k});
        const Tensor x = pool.normal(type, {t, k}), dy = pool.normal(type, {t, n});
        if (packed) allocate_packed(pool, ctx, w, t);

        const Tensor y = pool.normal(type, {t, n}, 100);  // arbitrary values that must be overwritten
        linear_forward(ctx, y, x, w);
        CHECK(relative_error(y, naive(pool, x, false, w.value, true)) < tolerance(type));

        const Tensor dx = pool.normal(type, {t, k}, 100);
        linear_backward_input(ctx, dx, dy, w, Into::overwrite);
        const Tensor expected_dx = naive(pool, dy, false, w.value, false);
        CHECK(relative_error(dx, expected_dx) < tolerance(type));

        const Tensor added = pool.normal(type, {t, k}), before = pool.copy(added, DType::f64);
        linear_backward_input(ctx, added, dy, w, Into::add);
        CHECK(relative_error(added, sum_of(pool, before, expected_dx)) < tolerance(type));

        const Tensor dw = pool.normal(accumulate_dtype(type), {n, k}), dw_before = pool.copy(dw, DType::f64);
        linear_backward_weight(ctx, dw, dy, x);
        // bf16 inputs are exact here and sums are f32: as good as f32.
        CHECK(relative_error(dw, sum_of(pool, dw_before, naive(pool, dy, true, x, false))) <
              tolerance(type == DType::f64 ? type : DType::f32));
      }
}

TEST_CASE("a weight's gradient that is overwritten has the bits of one that is added to zeros", "[linear]") {
  Context ctx(kScratch);
  // Strips of bf16 in whole lines and off them, no rows, rows in one part of the depth and in two.
  const Size sizes[] = {{70, 64, 96}, {70, 64, 33}, {5, 15, 16}, {0, 8, 32}, {2500, 48, 64}, {4500, 33, 40}};
  for (const DType type : kTypes)
    for (const Size& size : sizes) {
      CAPTURE(dtype_name(type), size.t, size.n, size.k);
      Pool pool;
      const DType wide = accumulate_dtype(type);
      const Tensor x = pool.normal(type, {size.t, size.k}), dy = pool.normal(type, {size.t, size.n}),
                   added = pool.zeros(wide, {size.n, size.k}),
                   overwritten = pool.zeros(wide, {size.n, size.k});
      for (int64_t i = 0; i < overwritten.numel(); ++i) Pool::set(overwritten, i, NAN);
      linear_backward_weight(ctx, added, dy, x);
      linear_backward_weight(ctx, overwritten, dy, x, Into::overwrite);
      CHECK(same_bits(added, overwritten));
    }
}

TEST_CASE("a few rows times a weight packed for forward alone equal f64 loops, each row by itself",
          "[linear]") {
  Context ctx(kScratch);
  int packed = 0;
  for (const DType type : {DType::f32, DType::bf16})
    for (const auto& [n, k] : {std::pair{1, 40}, {15, 64}, {16, 31}, {70, 129}, {600, 384}, {33, 32}})
      for (const int64_t rows : {1, 2, 3, 5, 7, 8, 9}) {
        CAPTURE(dtype_name(type), n, k, rows);
        Pool pool(static_cast<uint32_t>(n + rows));
        LinearWeight w;
        w.value = pool.normal(type, {n, k});
        if (const int64_t bytes = linear_packed_bytes(ctx, type, n, k, rows).forward; bytes > 0)
          w.packed = pool.zeros(DType::u8, {bytes}), ++packed;
        linear_pack(ctx, w);
        const Tensor x = pool.normal(type, {rows, k}), y = pool.normal(type, {rows, n}, 100);
        linear_forward(ctx, y, x, w);
        CHECK(relative_error(y, naive(pool, x, false, w.value, true)) < tolerance(type));
        if (!w.packed || rows > 8) continue;
        const Tensor alone = pool.normal(type, {1, n}, 100);
        const int threads = num_threads();
        set_num_threads(3);
        linear_forward(ctx, alone, x.rows(rows - 1, 1), w);
        set_num_threads(threads);
        CHECK(same_bits(alone, y.rows(rows - 1, 1)));
      }
  CHECK(packed > 0);
}

TEST_CASE("linear gradients agree with central differences in f64", "[linear]") {
  Context ctx(kScratch);
  Pool pool;
  LinearWeight w;
  w.value = pool.normal(DType::f64, {7, 5});
  const Tensor x = pool.normal(DType::f64, {9, 5}), y = pool.zeros(DType::f64, {9, 7});
  const Tensor dy = pool.normal(DType::f64, {9, 7}), dx = pool.zeros(DType::f64, {9, 5}),
               dw = pool.zeros(DType::f64, {7, 5});
  const auto loss = [&] {
    linear_forward(ctx, y, x, w);
    return dot(dy, y);
  };
  linear_backward_input(ctx, dx, dy, w, Into::overwrite);
  linear_backward_weight(ctx, dw, dy, x);
  CHECK(gradient_error(x, dx, loss) < 1e-7);
  CHECK(gradient_error(w.value, dw, loss) < 1e-7);
}

TEST_CASE("a packed copy keeps its old values until it is packed again", "[linear]") {
  Context ctx(kScratch);
  for (const DType type : {DType::f32, DType::bf16}) {
    Pool pool;
    LinearWeight w;
    w.value = pool.normal(type, {96, 64});
    allocate_packed(pool, ctx, w, 8);
    if (!w.packed) continue;
    const Tensor x = pool.normal(type, {8, 64}), first = pool.zeros(type, {8, 96}),
                 second = pool.zeros(type, {8, 96});
    linear_forward(ctx, first, x, w);
    for (int64_t i = 0; i < w.value.numel(); ++i) Pool::set(w.value, i, 2 * Pool::get(w.value, i));
    linear_forward(ctx, second, x, w);
    CHECK(same_bits(first, second));
    linear_pack(ctx, w);
    linear_forward(ctx, second, x, w);
    CHECK(relative_error(second, naive(pool, x, false, w.value, true)) < tolerance(type));
  }
}

TEST_CASE("linear products are bitwise reproducible", "[linear]") {
  Context ctx(kScratch);
  for (const DType type : kTypes) {
    Pool pool;
    LinearWeight w;
    w.value = pool.normal(type, {300, 200});
    const Tensor x = pool.normal(type, {513, 200}), dy = pool.normal(type, {513, 300});
    Tensor y[2], dx[2], dw[2];
    for (int i : {0, 1}) {
      Context fresh(kScratch);
      y[i] = pool.zeros(type, {513, 300}), dx[i] = pool.zeros(type, {513, 200});
      dw[i] = pool.zeros(accumulate_dtype(type), {300, 200});
      linear_forward(fresh, y[i], x, w);
      linear_backward_input(fresh, dx[i], dy, w, Into::overwrite);
      linear_backward_weight(fresh, dw[i], dy, x);
    }
    CHECK(same_bits(y[0], y[1]));
    CHECK(same_bits(dx[0], dx[1]));
    CHECK(same_bits(dw[0], dw[1]));
  }
}

TEST_CASE("linear products in f64 do not depend on the number of threads", "[linear]") {
  const int threads = num_threads();
  Pool pool;
  LinearWeight w;
  w.value = pool.normal(DType::f64, {130, 70});
  const Tensor x = pool.normal(DType::f64, {200, 70}), dy = pool.normal(DType::f64, {200, 130});
  Tensor y[2], dw[2];
  for (int i : {0, 1}) {
    Context ctx(kScratch);
    set_num_threads(i + 1);
    y[i] = pool.zeros(DType::f64, {200, 130}), dw[i] = pool.zeros(DType::f64, {130, 70});
    linear_forward(ctx, y[i], x, w);
    linear_backward_weight(ctx, dw[i], dy, x);
  }
  set_num_threads(threads);
  CHECK(same_bits(y[0], y[1]));
  CHECK(same_bits(dw[0], dw[1]));
}

TEST_CASE("linear products of independent rows have bits that do not depend on how many rows there are",
          "[linear][context]") {
  Context ctx(kScratch);
  ctx.independent_rows = true;
  for (const DType type : kTypes)
    for (const Size& size : {Size{1100, 70, 67}, Size{128, 192, 64}, Size{130, 33, 1}, Size{256, 16, 2100}}) {
      INFO(dtype_name(type) << " " << size.n << " x " << size.k);
      Pool pool;
      LinearWeight w;
      w.value = pool.normal(type, {size.n, size.k});
      allocate_packed(pool, ctx, w, size.t);
      const Tensor x = pool.normal(type, {size.t, size.k}), dy = pool.normal(type, {size.t, size.n}),
                   before = pool.normal(type, {size.t, size.k});
      const auto products = [&](int64_t begin, int64_t rows) {
        std::vector<Tensor> all = {pool.zeros(type, {rows, size.n}), pool.zeros(type, {rows, size.k}),
                                   pool.copy(before.rows(begin, rows), type)};
        linear_forward(ctx, all[0], x.rows(begin, rows), w);
        linear_backward_input(ctx, all[1], dy.rows(begin, rows), w, Into::overwrite);
        linear_backward_input(ctx, all[2], dy.rows(begin, rows), w, Into::add);
        return all;
      };
      const std::vector<Tensor> whole = products(0, size.t);
      const Tensor expected = naive(pool, dy, false, w.value, false);
      CHECK(relative_error(whole[0], naive(pool, x, false, w.value, true)) < tolerance(type));
      CHECK(relative_error(whole[1], expected) < tolerance(type));
      CHECK(relative_error(whole[2], sum_of(pool, expected, before)) < tolerance(type));
      for (const int64_t rows : {1, 2, 3, 5, 8, 31, 33, 64, 100})
        for (const int64_t begin : {int64_t{0}, int64_t{7}, size.t - rows}) {
          const std::vector<Tensor> part = products(begin, rows);
          for (size_t i = 0; i < 3; ++i) CHECK(same_bits(part[i], whole[i].rows(begin, rows)));
        }
    }
}

TEST_CASE("a dry run of the linear ops measures the scratch memory of the real run", "[linear]") {
  for (const DType type : kTypes) {
    Context dry(0);
    const auto run = [type](Context& ctx, bool real) {
      Pool pool;
      LinearWeight w;
      w.value = pool.normal(type, {40, 24});
      Tensor x = pool.normal(type, {2000, 24}), y = pool.zeros(type, {2000, 40});
      Tensor dw = pool.zeros(accumulate_dtype(type), {40, 24});
      if (!real) x.data = y.data = dw.data = w.value.data = nullptr;
      linear_forward(ctx, y, x, w);
      linear_backward_input(ctx, x, y, w, Into::add);
      for (const Into into : real ? std::vector{Into::overwrite, Into::add} : std::vector{Into::overwrite})
        linear_backward_weight(ctx, dw, y, x, into);
    };
    run(dry, false);
    CHECK(dry.scratch.used() == 0);
    Context real(std::max<int64_t>(64, dry.scratch.high_water()));  // an arena throws when it is too small
    CHECK_NOTHROW(run(real, true));
    CHECK(real.scratch.high_water() == dry.scratch.high_water());
  }
}

TEST_CASE("linear ops refuse wrong shapes and types by name", "[linear]") {
  Context ctx(kScratch);
  Pool pool;
  LinearWeight w;
  w.value = pool.zeros(DType::f32, {4, 32});
  const Tensor x = pool.zeros(DType::f32, {2, 16}), y = pool.zeros(DType::f32, {2, 4});
  CHECK_THROWS_WITH(
      linear_forward(ctx, y, x, w),
      Catch::Contains("linear_forward: weight must be (4, 16) f32") && Catch::Contains("(4, 32)"));
  const Tensor half = pool.zeros(DType::bf16, {2, 32});
  CHECK_THROWS_WITH(linear_forward(ctx, y, half, w),
                    Catch::Contains("linear_forward: weight must be (4, 32) bf16"));
  const Tensor wide = pool.zeros(DType::f32, {2, 32});
  CHECK_THROWS_WITH(linear_backward_input(ctx, x, y, w, Into::add),
                    Catch::Contains("linear_backward_input: dx must be (2, 32) f32"));
  const Tensor dw = pool.zeros(DType::bf16, {4, 32}), half_dy = pool.zeros(DType::bf16, {2, 4});
  CHECK_THROWS_WITH(linear_backward_weight(ctx, dw, half_dy, half),
                    Catch::Contains("linear_backward_weight: dw must be (4, 32) f32"));
  CHECK_THROWS_WITH(linear_backward_weight(ctx, w.value, pool.zeros(DType::f32, {3, 4}), wide),
                    Catch::Contains("linear_backward_weight: dy must be (2, 4) f32"));
  w.packed = pool.zeros(DType::u8, {3});
  CHECK_THROWS_WITH(linear_forward(ctx, y, wide, w), Catch::Contains("packed weight must be"));
  CHECK_THROWS_WITH(linear_forward(ctx, y, pool.zeros(DType::i32, {2, 32}), w), Catch::Contains("got i32"));
}
