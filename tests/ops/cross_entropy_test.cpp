#include "ops/cross_entropy.h"

#include <catch2/catch.hpp>

#include "core/targets.h"
#include "ops/elementwise.h"
#include "ops/op_support.h"
#include "support/gradcheck.h"

using namespace sluice;
using namespace sluice::test;

namespace {

double unit = 1, quarter = 0.25;  // gradient scales

constexpr int64_t kScratch = 128 << 20;
constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f64};

struct Problem {
  Tensor hidden, targets, losses, dhidden, dweight;
  LinearWeight head;
};

/// Logits of about unit scale; every seventh token has no target.
Problem make_problem(Pool& pool, DType type, int64_t rows, int64_t width, int64_t vocabulary) {
  Problem p;
  const double scale = 1.0 / std::sqrt(static_cast<double>(width));
  p.hidden = pool.normal(type, {rows, width});
  p.head.value = pool.normal(type, {vocabulary, width}, 2 * scale);
  p.targets = pool.integers({rows}, 0, static_cast<int32_t>(vocabulary - 1));
  for (int64_t t = 3; t < rows; t += 7) p.targets.as<int32_t>()[t] = t % 2 ? kNoTarget : kPadding;
  p.losses = pool.normal(accumulate_dtype(type), {rows}, 100);
  p.dhidden = pool.normal(type, {rows, width}, 100);
  p.dweight = pool.normal(accumulate_dtype(type), {vocabulary, width}, 1e-3);
  return p;
}

void allocate_packed(Pool& pool, Context& ctx, LinearWeight& w) {
  const LinearPackedBytes bytes = linear_packed_bytes(ctx, w.value.dtype, w.value.dim(0), w.value.dim(1), 64);
  if (bytes.forward > 0) w.packed = pool.zeros(DType::u8, {bytes.forward});
  if (bytes.transposed > 0) w.packed_transposed = pool.zeros(DType::u8, {bytes.transposed});
  linear_pack(ctx, w);
}

/// The definition, in f64 loops over the stored values. dweight starts from what p.dweight holds.
struct Expected {
  Tensor losses, dhidden, dweight;
};
Expected naive(Pool& pool, const Problem& p, double gradient_scale) {
  const int64_t rows = p.hidden.dim(0), width = p.hidden.dim(1), vocabulary = p.head.value.dim(0);
  Expected e{pool.zeros(DType::f64, {rows}), pool.zeros(DType::f64, {rows, width}),
             pool.copy(p.dweight, DType::f64)};
  const Tensor hidden = pool.copy(p.hidden, DType::f64), head = pool.copy(p.head.value, DType::f64);
  const double *x = hidden.as<double>(), *w = head.as<double>();
  std::vector<double> z(static_cast<size_t>(vocabulary));
  for (int64_t t = 0; t < rows; ++t) {
    const int32_t target = p.targets.as<int32_t>()[t];
    if (target < 0) continue;
    double sum = 0;
    for (int64_t v = 0; v < vocabulary; ++v) {
      double s = 0;
      for (int64_t c = 0; c < width; ++c) s += x[t * width + c] * w[v * width + c];
      sum += std::exp(z[static_cast<size_t>(v)] = s);
    }
    e.losses.as<double>()[t] = std::log(sum) - z[static_cast<size_t>(target)];
    for (int64_t v = 0; v < vocabulary; ++v) {
      const double d = gradient_scale * (std::exp(z[static_cast<size_t>(v)]) / sum - (v == target ? 1 : 0));
      for (int64_t c = 0; c < width; ++c) {
        e.dhidden.as<double>()[t * width + c] += d * w[v * width + c];
        e.dweight.as<double>()[v * width + c] += d * x[t * width + c];
      }
    }
  }
  return e;
}

}  // namespace

TEST_CASE("cross-entropy equals the definition, with and without packed copies", "[cross_entropy]") {
  Context ctx(160 << 20);
  const int64_t sizes[][3] = {{1, 8, 5},    {3, 17, 33},     {70, 24, 1003},
                              {300, 9, 64}, {140, 3, 40007}, {140, 3, 262144}};
  for (const DType type : kTypes)
    for (const auto& [rows, width, vocabulary] : sizes)
      for (const bool packed : {false, true}) {
        // Two chunks, the first of two parts, in bf16 alone: the others have chunks of no parts.
        if (vocabulary > 100000 && (type != DType::bf16 || packed)) continue;
        CAPTURE(dtype_name(type), rows, width, vocabulary, packed);
        Pool pool;
        Problem p = make_problem(pool, type, rows, width, vocabulary);
        if (packed) allocate_packed(pool, ctx, p.head);
        const Expected e = naive(pool, p, 0.25);
        const double exact = type == DType::f64 ? 1e-13 : 2e-6;
        cross_entropy_forward(ctx, p.losses, p.hidden, p.head, p.targets);
        CHECK(relative_error(p.losses, e.losses) < exact);
        for (int64_t t = 0; t < rows; ++t) Pool::set(p.losses, t, -1);
        cross_entropy_forward_backward(ctx, p.losses, p.dhidden, p.dweight, p.hidden, p.head, p.targets,
                                       scalar(quarter));
        CHECK(relative_error(p.losses, e.losses) < exact);
        CHECK(relative_error(p.dhidden, e.dhidden) < (type == DType::bf16 ? 4e-3 : exact));
        CHECK(relative_error(p.dweight, e.dweight) < (type == DType::bf16 ? 4e-3 : exact));
        const Tensor added = pool.zeros(p.dweight.dtype, {vocabulary, width}),
                     overwritten = pool.zeros(p.dweight.dtype, {vocabulary, width});
        for (int64_t i = 0; i < overwritten.numel(); ++i) Pool::set(overwritten, i, NAN);
        for (const Into into : {Into::add, Into::overwrite})
          cross_entropy_forward_backward(ctx, p.losses, p.dhidden, into == Into::add ? added : overwritten,
                                         p.hidden, p.head, p.targets, scalar(quarter), 0, {}, into);
        CHECK(same_bits(overwritten, added));
        for (int64_t t = 3; t < rows; t += 7) {
          CHECK(Pool::get(p.losses, t) == 0);
          for (int64_t c = 0; c < width; ++c) CHECK(Pool::get(p.dhidden, t * width + c) == 0);
        }
      }
}

TEST_CASE("cross-entropy under a soft cap is that of capped logits, in every precision", "[cross_entropy]") {
  Context ctx(kScratch);
  const int64_t rows = 9, width = 24, vocabulary = 1003;
  for (const DType type : kTypes) {
    CAPTURE(dtype_name(type));
    Pool pool, pool64;
    Problem p = make_problem(pool, type, rows, width, vocabulary);
    const double cap = 3;
    const Tensor logits = pool.zeros(DType::f64, {rows, vocabulary});
    LinearWeight wide;
    wide.value = pool.copy(p.head.value, DType::f64);
    linear_forward(ctx, logits, pool.copy(p.hidden, DType::f64), wide);
    soft_cap_forward(ctx, logits, logits, cap);
    const Tensor expected = pool.zeros(DType::f64, {rows});
    for (int64_t t = 0; t < rows; ++t) {
      const int32_t target = p.targets.as<int32_t>()[t];
      double sum = 0;
      for (int64_t v = 0; v < vocabulary; ++v) {
        CHECK(std::abs(Pool::get(logits, t * vocabulary + v)) <= cap);
        sum += std::exp(Pool::get(logits, t * vocabulary + v));
      }
      if (target >= 0) Pool::set(expected, t, std::log(sum) - Pool::get(logits, t * vocabulary + target));
    }
    cross_entropy_forward(ctx, p.losses, p.hidden, p.head, p.targets, cap);
    CHECK(relative_error(p.losses, expected) < (type == DType::f64 ? 1e-13 : 2e-6));
    const Tensor again = pool.zeros(p.losses.dtype, {rows});
    cross_entropy_forward_backward(ctx, again, p.dhidden, p.dweight, p.hidden, p.head, p.targets,
                                   scalar(quarter), cap);
    CHECK(relative_error(again, p.losses) < (type == DType::f64 ? 1e-13 : 1e-6));
  }
}

TEST_CASE("cross-entropy gradients agree with central differences in f64", "[cross_entropy]") {
  const double cap = GENERATE(0.0, 1.5);
  Context ctx(kScratch);
  Pool pool;
  Problem p = make_problem(pool, DType::f64, 11, 6, 13);
  double scale = 0.125;
  p.dweight = pool.zeros(DType::f64, {13, 6});
  const Tensor losses = pool.zeros(DType::f64, {11});
  const auto loss = [&] {
    cross_entropy_forward(ctx, losses, p.hidden, p.head, p.targets, cap);
    double s = 0;
    for (int64_t t = 0; t < 11; ++t) s += scale * Pool::get(losses, t);
    return s;
  };
  cross_entropy_forward_backward(ctx, p.losses, p.dhidden, p.dweight, p.hidden, p.head, p.targets,
                                 scalar(scale), cap);
  CHECK(gradient_error(p.hidden, p.dhidden, loss) < 1e-7);
  CHECK(gradient_error(p.head.value, p.dweight, loss) < 1e-7);
}

TEST_CASE("the z-loss adds the squared log-sum-exp of counted rows, in every precision", "[cross_entropy]") {
  Context ctx(kScratch);
  const double cap = GENERATE(0.0, 3.0);
  const int64_t rows = 140, width = 3, vocabulary = GENERATE(33, 40007);  // the latter in two chunks of rows
  for (const DType type : kTypes) {
    CAPTURE(dtype_name(type), cap, vocabulary);
    Pool pool;
    Problem p = make_problem(pool, type, rows, width, vocabulary);
    const double tolerance = type == DType::f64 ? 1e-13 : 2e-6;
    const Tensor logits = pool.zeros(DType::f64, {rows, vocabulary});
    LinearWeight wide;
    wide.value = pool.copy(p.head.value, DType::f64);
    linear_forward(ctx, logits, pool.copy(p.hidden, DType::f64), wide);
    if (cap > 0) soft_cap_forward(ctx, logits, logits, cap);
    const Tensor expected = pool.zeros(DType::f64, {rows});
    for (int64_t t = 0; t < rows; ++t) {
      double sum = 0;
      for (int64_t v = 0; v < vocabulary; ++v) sum += std::exp(Pool::get(logits, t * vocabulary + v));
      if (p.targets.as<int32_t>()[t] >= 0) Pool::set(expected, t, std::log(sum) * std::log(sum));
    }
    const Tensor plain = pool.zeros(p.losses.dtype, {rows}),
                 squares = pool.normal(p.losses.dtype, {rows}, 100);
    const Tensor dhidden = pool.zeros(type, {rows, width}), dweight = pool.copy(p.dweight, p.dweight.dtype);
    cross_entropy_forward_backward(ctx, plain, dhidden, dweight, p.hidden, p.head, p.targets, scalar(quarter),
                                   cap);
    const auto bits = [](const Tensor& t) {
      return std::string(static_cast<const char*>(t.data), static_cast<size_t>(t.bytes()));
    };
    const std::string dhidden_bits = bits(dhidden), dweight_bits = bits(dweight);
    // The losses stay those of the text; with coefficient 0 so do the gradients.
    for (const double coefficient : {0.0, 0.5}) {
      const Tensor dweight_now = pool.copy(p.dweight, p.dweight.dtype);
      cross_entropy_forward_backward(ctx, p.losses, dhidden, dweight_now, p.hidden, p.head, p.targets,
                                     scalar(quarter), cap, {coefficient, squares});
      CHECK(bits(p.losses) == bits(plain));
      CHECK((bits(dhidden) == dhidden_bits) == (coefficient == 0));
      CHECK((bits(dweight_now) == dweight_bits) == (coefficient == 0));
      CHECK(relative_error(squares, expected) < tolerance);
      for (int64_t t = 3; t < rows; t += 7) CHECK(Pool::get(squares, t) == 0);
    }
  }
}

TEST_CASE("gradients of the z-loss agree with central differences in f64", "[cross_entropy]") {
  const double cap = GENERATE(0.0, 1.5), coefficient = 0.7;
  Context ctx(kScratch);
  Pool pool;
  Problem p = make_problem(pool, DType::f64, 11, 6, 13);
  double scale = 0.125;
  p.dweight = pool.zeros(DType::f64, {13, 6});
  const Tensor losses = pool.zeros(DType::f64, {11}), squares = pool.zeros(DType::f64, {11}),
               unused = pool.zeros(DType::f64, {11, 6});
  const auto run = [&](const Tensor& dhidden, const Tensor& dweight) {
    cross_entropy_forward_backward(ctx, losses, dhidden, dweight, p.hidden, p.head, p.targets, scalar(scale),
                                   cap, {coefficient, squares});
  };
  const auto loss = [&] {
    run(unused, Tensor());
    double s = 0;
    for (int64_t t = 0; t < 11; ++t)
      s += scale * (Pool::get(losses, t) + coefficient * Pool::get(squares, t));
    return s;
  };
  run(p.dhidden, p.dweight);
  CHECK(gradient_error(p.hidden, p.dhidden, loss) < 1e-7);
  CHECK(gradient_error(p.head.value, p.dweight, loss) < 1e-7);
}

TEST_CASE("cross-entropy stays finite for huge logits", "[cross_entropy]") {
  Context ctx(kScratch);
  for (const DType type : kTypes) {
    Pool pool;
    Problem p = make_problem(pool, type, 4, 16, 50);
    for (int64_t i = 0; i < p.hidden.numel(); ++i) Pool::set(p.hidden, i, 1000 * Pool::get(p.hidden, i));
    cross_entropy_forward_backward(ctx, p.losses, p.dhidden, p.dweight, p.hidden, p.head, p.targets,
                                   scalar(unit));
    for (const Tensor& t : {p.losses, p.dhidden, p.dweight})
      for (int64_t i = 0; i < t.numel(); ++i) REQUIRE(std::isfinite(Pool::get(t, i)));
    CHECK(Pool::get(p.losses, 0) > 0);
  }
}

TEST_CASE("a NaN logit makes the loss NaN", "[cross_entropy]") {
  Context ctx(kScratch);
  for (const DType type : kTypes)
    for (const int64_t bad_word : {0, 70, 99}) {
      Pool pool;
      Problem p = make_problem(pool, type, 2, 4, 100);
      Pool::set(p.head.value, bad_word * 4, NAN);
      cross_entropy_forward(ctx, p.losses, p.hidden, p.head, p.targets);
      CHECK(std::isnan(Pool::get(p.losses, 0)));
    }
}

TEST_CASE("logits need bounded scratch memory, measured by a dry run", "[cross_entropy]") {
  for (const DType type : {DType::f32, DType::bf16}) {
    Context dry(0);
    Problem p;
    const auto shaped = [](DType t, std::initializer_list<int64_t> dims) { return Tensor(nullptr, t, dims); };
    p.hidden = p.dhidden = shaped(type, {16384, 64});
    p.head.value = shaped(type, {32000, 64});
    p.losses = shaped(DType::f32, {16384}), p.targets = shaped(DType::i32, {16384});
    p.dweight = shaped(DType::f32, {32000, 64});
    cross_entropy_forward_backward(dry, p.losses, p.dhidden, p.dweight, p.hidden, p.head, p.targets,
                                   scalar(unit));
    CHECK(dry.scratch.used() == 0);
    CHECK(dry.scratch.high_water() < int64_t{80} << 20);  // all logits at once would be 2 GiB
    Context real(dry.scratch.high_water());
    Pool pool;
    p = make_problem(pool, type, 300, 64, 32000);
    CHECK_NOTHROW(cross_entropy_forward_backward(real, p.losses, p.dhidden, p.dweight, p.hidden, p.head,
                                                 p.targets, scalar(unit)));
  }
}

TEST_CASE("cross-entropy refuses tokens outside the vocabulary and wrong shapes", "[cross_entropy]") {
  Context ctx(kScratch);
  Pool pool;
  Problem p = make_problem(pool, DType::f32, 5, 8, 10);
  for (const int32_t bad : {10, -3}) {
    p.targets.as<int32_t>()[2] = bad;
    try {
      cross_entropy_forward(ctx, p.losses, p.hidden, p.head, p.targets);
      FAIL("no error");
    } catch (const Error& e) {
      CHECK(e.code() == ExitCode::data);
      CHECK_THAT(e.what(), Catch::Contains("target " + std::to_string(bad) + " at row 2") &&
                               Catch::Contains("10 words"));
    }
  }
  CHECK_THROWS_WITH(cross_entropy_forward(ctx, p.losses, pool.zeros(DType::f32, {5, 7}), p.head, p.targets),
                    Catch::Contains("cross_entropy_forward: head must be (10, 7) f32"));
  CHECK_THROWS_WITH(cross_entropy_forward_backward(ctx, p.losses, p.dhidden, p.dhidden, p.hidden, p.head,
                                                   p.targets, scalar(unit)),
                    Catch::Contains("dweight must be (10, 8) f32"));
  CHECK_THROWS_WITH(cross_entropy_forward(ctx, p.losses, p.hidden, p.head, pool.zeros(DType::f32, {5})),
                    Catch::Contains("targets must be (5) i32"));
}
