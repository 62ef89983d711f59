// Grouped products compared with plain loops: partitions of rows into groups, gathered operands, thread
// counts.
#include "ops/grouped_linear.h"

#include <numeric>

#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;

namespace {

/// Relative error allowed against the f64 loop over the same (already rounded) inputs.
double loop_tolerance(DType t) { return t == DType::f64 ? 1e-14 : t == DType::f32 ? 2e-6 : 4e-3; }

Tensor offsets_of(Pool& pool, const std::vector<int64_t>& rows) {
  const Tensor t = pool.zeros(DType::i32, {static_cast<int64_t>(rows.size()) + 1});
  for (size_t g = 0; g < rows.size(); ++g)
    t.as<int32_t>()[g + 1] = t.as<int32_t>()[g] + static_cast<int32_t>(rows[g]);
  return t;
}

/// y_r = x_r W_g^T, or x_r W_g; rows outside every group stay 0.
Tensor loop_rows(Pool& pool, const Tensor& x, const LinearWeight& w, const Tensor& offsets,
                 const Tensor& index, int64_t rows, bool transposed) {
  const int64_t N = w.value.dim(0) / w.groups, K = w.value.dim(1), in = transposed ? K : N,
                out = transposed ? N : K;
  const Tensor y = pool.zeros(DType::f64, {rows, out});
  for (int64_t g = 0; g < w.groups; ++g)
    for (int64_t r = offsets.as<int32_t>()[g]; r < offsets.as<int32_t>()[g + 1]; ++r) {
      const int64_t from = index ? index.as<int32_t>()[r] : r;
      for (int64_t o = 0; o < out; ++o) {
        double s = 0;
        for (int64_t i = 0; i < in; ++i)
          s += Pool::get(x, from * in + i) *
               Pool::get(w.value, (g * N + (transposed ? o : i)) * K + (transposed ? i : o));
        y.as<double>()[r * out + o] = s;
      }
    }
  return y;
}

Tensor loop_weight(Pool& pool, const Tensor& before, const Tensor& dy, const Tensor& x, const Tensor& offsets,
                   const Tensor& dy_index, const Tensor& x_index) {
  const int64_t groups = offsets.dim(0) - 1, N = dy.dim(1), K = x.dim(1);
  const Tensor dw = pool.copy(before, DType::f64);
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t r = offsets.as<int32_t>()[g]; r < offsets.as<int32_t>()[g + 1]; ++r) {
      const int64_t a = dy_index ? dy_index.as<int32_t>()[r] : r, b = x_index ? x_index.as<int32_t>()[r] : r;
      for (int64_t n = 0; n < N; ++n)
        for (int64_t k = 0; k < K; ++k)
          dw.as<double>()[(g * N + n) * K + k] += Pool::get(dy, a * N + n) * Pool::get(x, b * K + k);
    }
  return dw;
}

struct Problem {
  std::vector<int64_t> rows;  // of each group
  int64_t N, K, beyond = 0;   // rows that belong to no group
  int64_t total() const { return std::accumulate(rows.begin(), rows.end(), beyond); }
};
// One row; empty groups; all rows in one of several; sizes off every tile; several blocks of rows, of columns
// and of depth.
const Problem kProblems[] = {
    {{1}, 1, 1},           {{3, 0, 5, 0}, 17, 31}, {{0, 0, 40}, 33, 16, 7}, {{14, 15, 6, 7, 29}, 64, 48, 3},
    {{600, 0, 3}, 35, 70}, {{2, 19}, 290, 13},     {{5, 23}, 40, 530},      {{130, 66}, 270, 300, 1}};

LinearWeight weight_of(Pool& pool, Context& ctx, DType type, const Problem& p, bool packed) {
  LinearWeight w;
  w.groups = static_cast<int64_t>(p.rows.size());
  w.value = pool.normal(type, {w.groups * p.N, p.K});
  if (!packed) return w;
  const LinearPackedBytes bytes = grouped_linear_packed_bytes(ctx, type, w.groups, p.N, p.K);
  if (bytes.forward > 0) w.packed = pool.zeros(DType::u8, {bytes.forward});
  if (bytes.transposed > 0) w.packed_transposed = pool.zeros(DType::u8, {bytes.transposed});
  grouped_linear_pack(ctx, w);
  return w;
}

}  // namespace

TEST_CASE("grouped products equal f64 loops, gathered or not, with and without packed copies",
          "[grouped_linear]") {
  Context ctx(kTestScratch);
  for (const DType type : kFloatingTypes)
    for (const Problem& p : kProblems)
      for (const bool gathered : {false, true}) {
        CAPTURE(dtype_name(type), p.rows, p.N, p.K, gathered);
        Pool pool;
        const LinearWeight w = weight_of(pool, ctx, type, p, gathered);
        const int64_t R = p.total(), sources = gathered ? 11 : R;
        const Tensor offsets = offsets_of(pool, p.rows), none;
        const Tensor index = gathered ? pool.integers({R}, 0, 10) : none;
        const double tolerance = loop_tolerance(type),
                     weight_tolerance = loop_tolerance(type == DType::f64 ? type : DType::f32);
        // Overwritten within groups, unchanged beyond them.
        const auto check = [&](const Tensor& to, const Tensor& expected, const auto& op) {
          for (int64_t i = 0; i < to.numel(); ++i) Pool::set(to, i, 77);
          op();
          const int64_t inside = R - p.beyond;
          CHECK(relative_error(to.rows(0, inside), expected.rows(0, inside)) < tolerance);
          for (int64_t i = inside * to.dim(1); i < to.numel(); ++i) REQUIRE(Pool::get(to, i) == 77);
        };
        const Tensor x = pool.normal(type, {sources, p.K}), y = pool.zeros(type, {R, p.N});
        check(y, loop_rows(pool, x, w, offsets, index, R, true),
              [&] { grouped_linear_forward(ctx, y, x, w, offsets, index); });

        const Tensor dy = pool.normal(type, {sources, p.N}), dx = pool.zeros(type, {R, p.K});
        check(dx, loop_rows(pool, dy, w, offsets, index, R, false),
              [&] { grouped_linear_backward_input(ctx, dx, dy, w, offsets, index); });

        const Tensor plain_dy = pool.normal(type, {R, p.N}), plain_x = pool.normal(type, {R, p.K});
        const auto check_weight = [&](const Tensor& of_dy, const Tensor& of_x, const Tensor& dy_index,
                                      const Tensor& x_index) {
          const Tensor dw = pool.normal(accumulate_dtype(type), {w.groups * p.N, p.K});
          const Tensor expected = loop_weight(pool, dw, of_dy, of_x, offsets, dy_index, x_index);
          grouped_linear_backward_weight(ctx, dw, of_dy, of_x, offsets, dy_index, x_index);
          CHECK(relative_error(dw, expected) < weight_tolerance);
        };
        check_weight(dy, plain_x, index, none);
        check_weight(plain_dy, x, none, index);
      }
}

TEST_CASE("weights' gradients that are overwritten have the bits of ones that are added to zeros",
          "[grouped_linear]") {
  Context ctx(kTestScratch);
  std::vector<Problem> problems(std::begin(kProblems), std::end(kProblems));
  problems.push_back({.rows = {5, 0, 300, 17}, .N = 48, .K = 96});  // in whole lines
  problems.push_back({.rows = {0, 700}, .N = 33, .K = 64});         // a depth of several parts
  problems.push_back({.rows = {0, 0}, .N = 16, .K = 32});           // no rows
  for (const DType type : kFloatingTypes)
    for (const Problem& p : problems) {
      CAPTURE(dtype_name(type), p.rows, p.N, p.K);
      Pool pool;
      const Tensor offsets = offsets_of(pool, p.rows), x = pool.normal(type, {p.total(), p.K}),
                   dy = pool.normal(type, {p.total(), p.N});
      const auto groups = static_cast<int64_t>(p.rows.size());
      const Tensor added = pool.zeros(accumulate_dtype(type), {groups * p.N, p.K}),
                   overwritten = pool.zeros(accumulate_dtype(type), {groups * p.N, p.K});
      for (int64_t i = 0; i < overwritten.numel(); ++i) Pool::set(overwritten, i, NAN);
      grouped_linear_backward_weight(ctx, added, dy, x, offsets, Tensor(), Tensor());
      grouped_linear_backward_weight(ctx, overwritten, dy, x, offsets, Tensor(), Tensor(), Into::overwrite);
      CHECK(same_bits(added, overwritten));
    }
}

TEST_CASE("grouped products give the same bits for any number of threads", "[grouped_linear]") {
  for (const DType type : kFloatingTypes)
    for (const Problem& p : kProblems) {
      CAPTURE(dtype_name(type), p.rows, p.N, p.K);
      Tensor y[3], dx[3], dw[3];
      Pool pools[3] = {Pool(5), Pool(5), Pool(5)};
      for (int i = 0; i < 3; ++i) {
        const Threads threads(i + 1);
        Context ctx(kTestScratch);
        Pool& pool = pools[i];
        const LinearWeight w = weight_of(pool, ctx, type, p, true);
        const Tensor offsets = offsets_of(pool, p.rows);
        const Tensor x = pool.normal(type, {p.total(), p.K}), dout = pool.normal(type, {p.total(), p.N});
        y[i] = pool.zeros(type, {p.total(), p.N}), dx[i] = pool.zeros(type, {p.total(), p.K});
        dw[i] = pool.zeros(accumulate_dtype(type), {w.groups * p.N, p.K});
        grouped_linear_forward(ctx, y[i], x, w, offsets, Tensor());
        grouped_linear_backward_input(ctx, dx[i], dout, w, offsets, Tensor());
        grouped_linear_backward_weight(ctx, dw[i], dout, x, offsets, Tensor(), Tensor());
      }
      for (int i = 1; i < 3; ++i) {
        CHECK(same_bits(y[0], y[i]));
        CHECK(same_bits(dx[0], dx[i]));
        CHECK(same_bits(dw[0], dw[i]));
      }
    }
}

TEST_CASE("a row's result does not depend on the rows around it", "[grouped_linear]") {
  Context ctx(kTestScratch);
  for (const DType type : kFloatingTypes) {
    INFO(dtype_name(type));
    Pool pool;
    const Problem p{{37, 5}, 45, 290};
    const LinearWeight w = weight_of(pool, ctx, type, p, true);
    const Tensor x = pool.normal(type, {42, p.K}), dy = pool.normal(type, {42, p.N});
    const Tensor y = pool.zeros(type, {42, p.N}), dx = pool.zeros(type, {42, p.K});
    grouped_linear_forward(ctx, y, x, w, offsets_of(pool, p.rows), Tensor());
    grouped_linear_backward_input(ctx, dx, dy, w, offsets_of(pool, p.rows), Tensor());
    // Rows 30 to 36 of group 0 alone, in reverse order.
    const Tensor index = pool.zeros(DType::i32, {7});
    for (int64_t i = 0; i < 7; ++i) index.as<int32_t>()[i] = static_cast<int32_t>(36 - i);
    const Tensor some_y = pool.zeros(type, {7, p.N}), some_dx = pool.zeros(type, {7, p.K});
    grouped_linear_forward(ctx, some_y, x, w, offsets_of(pool, {7, 0}), index);
    grouped_linear_backward_input(ctx, some_dx, dy, w, offsets_of(pool, {7, 0}), index);
    for (int64_t i = 0; i < 7; ++i) {
      CHECK(same_bits(some_y.rows(i, 1), y.rows(36 - i, 1)));
      CHECK(same_bits(some_dx.rows(i, 1), dx.rows(36 - i, 1)));
    }
  }
}

TEST_CASE("grouped gradients agree with central differences in f64", "[grouped_linear]") {
  Context ctx(kTestScratch);
  Pool pool;
  const Problem p{{4, 0, 3}, 7, 5};
  const LinearWeight w = weight_of(pool, ctx, DType::f64, p, false);
  const Tensor offsets = offsets_of(pool, p.rows), index = pool.integers({7}, 0, 3);
  const Tensor x = pool.normal(DType::f64, {4, p.K}), y = pool.zeros(DType::f64, {7, p.N}),
               dy = pool.normal(DType::f64, {7, p.N});
  const Tensor dw = pool.zeros(DType::f64, {3 * p.N, p.K}), dx_rows = pool.zeros(DType::f64, {7, p.K});
  const Tensor dx = pool.zeros(DType::f64, {4, p.K});
  const auto loss = [&] {
    grouped_linear_forward(ctx, y, x, w, offsets, index);
    return dot(dy, y);
  };
  grouped_linear_backward_weight(ctx, dw, dy, x, offsets, Tensor(), index);
  grouped_linear_backward_input(ctx, dx_rows, dy, w, offsets, Tensor());
  for (int64_t r = 0; r < 7; ++r)
    for (int64_t k = 0; k < p.K; ++k)
      dx.as<double>()[index.as<int32_t>()[r] * p.K + k] += Pool::get(dx_rows, r * p.K + k);
  CHECK(gradient_error(w.value, dw, loss) < kGradientTolerance);
  CHECK(gradient_error(x, dx, loss) < kGradientTolerance);
}

TEST_CASE("a dry run of grouped products measures the scratch memory of the real run", "[grouped_linear]") {
  for (const DType type : kFloatingTypes) {
    Context dry(0);
    const auto run = [type](Context& ctx, bool real) {
      Pool pool;
      LinearWeight w = weight_of(pool, ctx, type, {{0, 0}, 20, 24}, false);
      Tensor offsets = offsets_of(pool, {300, 20}), x = pool.normal(type, {320, 24}),
             y = pool.zeros(type, {320, 20});
      Tensor dw = pool.zeros(accumulate_dtype(type), {40, 24});
      if (!real) w.value.data = offsets.data = x.data = y.data = dw.data = nullptr;
      grouped_linear_forward(ctx, y, x, w, offsets, Tensor());
      grouped_linear_backward_input(ctx, x, y, w, offsets, Tensor());
      grouped_linear_backward_weight(ctx, dw, y, x, offsets, Tensor(), Tensor());
    };
    run(dry, false);
    CHECK(dry.scratch.used() == 0);
    Context real(std::max<int64_t>(64, dry.scratch.high_water()));  // an arena throws when it is too small
    CHECK_NOTHROW(run(real, true));
    CHECK(real.scratch.high_water() == dry.scratch.high_water());
  }
}

TEST_CASE("grouped products refuse wrong shapes and types by name", "[grouped_linear]") {
  using Catch::Matchers::Contains;
  Context ctx(kTestScratch);
  Pool pool;
  LinearWeight w = weight_of(pool, ctx, DType::f32, {{0, 0}, 4, 8}, false);
  const Tensor offsets = offsets_of(pool, {3, 2}), none;
  const Tensor x = pool.zeros(DType::f32, {5, 8}), y = pool.zeros(DType::f32, {5, 4}),
               dw = pool.zeros(DType::f32, {8, 8});
  CHECK_NOTHROW(grouped_linear_forward(ctx, y, x, w, offsets, none));
  CHECK_THAT(error_of([&] { grouped_linear_forward(ctx, x, x, w, offsets, none); }),
             Contains("grouped_linear_forward: y must be (5, 4) f32"));
  CHECK_THAT(error_of([&] { grouped_linear_forward(ctx, y, y, w, offsets, none); }),
             Contains("grouped_linear_forward: x must be (5, 8) f32"));
  CHECK_THAT(error_of([&] { grouped_linear_forward(ctx, y, x, w, offsets.rows(0, 2), none); }),
             Contains("grouped_linear_forward: offsets must be (3) i32"));
  CHECK_THAT(error_of([&] { grouped_linear_forward(ctx, y, x, w, offsets, pool.zeros(DType::i32, {4})); }),
             Contains("grouped_linear_forward: index must be (5) i32"));
  CHECK_THAT(error_of([&] { grouped_linear_backward_input(ctx, y, y, w, offsets, none); }),
             Contains("grouped_linear_backward_input: dx must be (5, 8) f32"));
  CHECK_THAT(error_of([&] { grouped_linear_backward_weight(ctx, y, y, x, offsets, none, none); }),
             Contains("grouped_linear_backward_weight: dw must be (8, 8) f32"));
  const Tensor index = pool.zeros(DType::i32, {5});
  CHECK_THAT(error_of([&] { grouped_linear_backward_weight(ctx, dw, y, x, offsets, index, index); }),
             Contains("grouped_linear_backward_weight: one of dy and x at most is gathered"));
  w.groups = 3;
  CHECK_THAT(error_of([&] { grouped_linear_forward(ctx, y, x, w, offsets, none); }),
             Contains("grouped_linear_forward: weight must be (3 x N, K), got (8, 8) f32"));
}
