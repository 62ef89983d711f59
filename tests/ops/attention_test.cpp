// Attention and the sink logit: against an explicit T x T computation in f64, and against central
// differences.
#include "ops/attention.h"

#include <catch2/catch.hpp>
#include <chrono>
#include <cstring>

#include "core/parallel_for.h"
#include "ops/some_queries.h"
#include "support/gradcheck.h"

using namespace sluice;
using namespace sluice::test;

namespace {

struct Shape {
  int64_t tokens, heads, kv_heads, depth;
};

std::string describe(const Shape& s) {
  return fmt::format("T {} H {} Hkv {} D {}", s.tokens, s.heads, s.kv_heads, s.depth);
}

enum class Documents { one, short_ones, sequences, alone, window };

/// first_key of every token; `window` is not a document mask, but one that moves by one key per query.
Tensor make_first_key(Pool& pool, int64_t tokens, Documents kind) {
  Tensor f = pool.zeros(DType::i32, {tokens}, "first_key");
  int64_t begin = 0, length = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const bool starts = (kind == Documents::short_ones && t - begin == 3 + length % 23) ||
                        (kind == Documents::sequences && t - begin == 160) || kind == Documents::alone;
    if (starts) begin = t, length += 7;
    f.as<int32_t>()[t] =
        static_cast<int32_t>(kind == Documents::window ? std::max<int64_t>(0, t - 40) : begin);
  }
  return f;
}

struct Problem {
  Shape shape;
  double scale;
  Tensor q, k, v, first_key, d_o, dlse, coef0;

  Problem(Pool& pool, const Shape& s, Documents documents)
      : shape(s), scale(1 / std::sqrt(static_cast<double>(s.depth))) {
    q = pool.normal(DType::f64, {s.tokens, s.heads, s.depth}, 1.0, "q");
    k = pool.normal(DType::f64, {s.tokens, s.kv_heads, s.depth}, 1.0, "k");
    v = pool.normal(DType::f64, {s.tokens, s.kv_heads, s.depth}, 1.0, "v");
    d_o = pool.normal(DType::f64, {s.tokens, s.heads, s.depth}, 1.0, "d_o");
    dlse = pool.normal(DType::f64, {s.heads, s.tokens}, 1.0, "dlse");
    coef0 = pool.normal(DType::f64, {s.heads, s.tokens}, 1.0, "coef0");
    first_key = make_first_key(pool, s.tokens, documents);
  }
  AttentionInputs inputs() const { return {q, k, v, first_key, scale}; }
  /// The same values rounded to dtype (statistics to its accumulate type).
  Problem as(Pool& pool, DType dtype) const {
    Problem p = *this;
    for (Tensor Problem::*m : {&Problem::q, &Problem::k, &Problem::v, &Problem::d_o})
      p.*m = pool.copy(this->*m, dtype);
    for (Tensor Problem::*m : {&Problem::dlse, &Problem::coef0})
      p.*m = pool.copy(this->*m, accumulate_dtype(dtype));
    return p;
  }
};

struct Results {
  Tensor o, lse, z0, dq, dk, dv;

  Results(Pool& pool, const Problem& p, DType dtype) {
    const Shape& s = p.shape;
    o = pool.zeros(dtype, {p.q.dim(0), s.heads, s.depth}, "o");
    lse = pool.zeros(accumulate_dtype(dtype), {s.heads, p.q.dim(0)}, "lse");
    z0 = pool.zeros(accumulate_dtype(dtype), {s.heads, p.q.dim(0)}, "z0");
    // Overwritten tensors start with arbitrary values.
    dq = pool.normal(dtype, {s.tokens, s.heads, s.depth}, 1.0, "dq");
    dk = pool.normal(dtype, {s.tokens, s.kv_heads, s.depth}, 1.0, "dk");
    dv = pool.normal(dtype, {s.tokens, s.kv_heads, s.depth}, 1.0, "dv");
  }
  void forward(Context& ctx, const Problem& p) { attention_forward(ctx, {o, lse, z0}, p.inputs()); }
  void backward(Context& ctx, const Problem& p, bool dlse = true, bool coef0 = true) {
    attention_backward(ctx, {dq, dk, dv}, p.d_o, p.inputs(), {o, lse},
                       {dlse ? p.dlse : Tensor(), coef0 ? p.coef0 : Tensor()});
  }
};

/// The definition, with the whole T x T matrix, in f64: outputs and all gradients.
Results explicit_attention(Pool& pool, const Problem& p) {
  Results r(pool, p, DType::f64);
  const auto [tokens, heads, kv_heads, depth] = p.shape;
  const double *q = p.q.as<double>(), *k = p.k.as<double>(), *v = p.v.as<double>(), *d_o = p.d_o.as<double>();
  for (Tensor t : {r.dq, r.dk, r.dv}) std::memset(t.data, 0, static_cast<size_t>(t.bytes()));
  std::vector<double> a(static_cast<size_t>(tokens)), z(a), da(a);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t g = h / (heads / kv_heads), first = p.first_key.as<int32_t>()[t];
      const auto row = [&](const double* x, int64_t j, int64_t n, int64_t i) {
        return x + (j * n + i) * depth;
      };
      const auto dot_rows = [&](const double* x, const double* y) {
        double s = 0;
        for (int64_t d = 0; d < depth; ++d) s += x[d] * y[d];
        return s;
      };
      double largest = -INFINITY, sum = 0;
      for (int64_t j = first; j <= t; ++j) {
        z[j] = p.scale * dot_rows(row(q, t, heads, h), row(k, j, kv_heads, g));
        largest = std::max(largest, z[j]);
      }
      for (int64_t j = first; j <= t; ++j) sum += std::exp(z[j] - largest);
      const double lse = largest + std::log(sum);
      r.lse.as<double>()[h * tokens + t] = lse;
      r.z0.as<double>()[h * tokens + t] = z[first];
      double mean = 0;
      double* o = r.o.as<double>() + (t * heads + h) * depth;
      for (int64_t j = first; j <= t; ++j) {
        a[j] = std::exp(z[j] - lse);
        da[j] = dot_rows(row(d_o, t, heads, h), row(v, j, kv_heads, g));
        mean += a[j] * da[j];
        for (int64_t d = 0; d < depth; ++d) o[d] += a[j] * row(v, j, kv_heads, g)[d];
      }
      for (int64_t j = first; j <= t; ++j) {
        // The softmax's Jacobian, then the direct terms of lse (d lse / d z_j = a_j) and z0.
        double dz = a[j] * (da[j] - mean) + a[j] * p.dlse.as<double>()[h * tokens + t];
        if (j == first) dz += p.coef0.as<double>()[h * tokens + t];
        for (int64_t d = 0; d < depth; ++d) {
          r.dq.as<double>()[(t * heads + h) * depth + d] += p.scale * dz * row(k, j, kv_heads, g)[d];
          r.dk.as<double>()[(j * kv_heads + g) * depth + d] += p.scale * dz * row(q, t, heads, h)[d];
          r.dv.as<double>()[(j * kv_heads + g) * depth + d] += a[j] * row(d_o, t, heads, h)[d];
        }
      }
    }
  return r;
}

const std::vector<Shape> kShapes = {
    {1, 1, 1, 8},   {3, 4, 1, 64},   {17, 3, 3, 8},    {64, 4, 2, 64},  {65, 3, 1, 128},
    {65, 4, 1, 8},  {257, 4, 1, 64}, {257, 3, 3, 128}, {257, 1, 1, 4},  {130, 6, 2, 20},
    {66, 2, 2, 80}, {150, 4, 2, 40}, {70, 2, 1, 192},  {300, 6, 2, 64}, {641, 2, 1, 16},
};

/// Norm-wise relative errors against f64; bf16: of outputs rounded to 8 bits, from inputs given in bf16.
struct Tolerance {
  DType dtype;
  double o, statistics, gradients;
};
const std::vector<Tolerance> kTolerances = {
    {DType::f64, 1e-13, 1e-13, 1e-12}, {DType::f32, 2e-6, 1e-6, 4e-6}, {DType::bf16, 4e-3, 1e-6, 6e-3}};

Context make_context() { return Context(int64_t{64} << 20); }

/// Runs body with n threads.
template <class Body>
void with_threads(int n, Body&& body) {
  const int before = num_threads();
  set_num_threads(n);
  body();
  set_num_threads(before);
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0;
}

}  // namespace

TEST_CASE("attention equals the explicit T x T computation for awkward shapes, masks and dtypes",
          "[attention]") {
  Context ctx = make_context();
  constexpr Documents kMasks[] = {Documents::short_ones, Documents::window, Documents::alone,
                                  Documents::sequences};
  size_t next_mask = 0;
  for (const Shape& shape : kShapes)
    for (Documents documents : {Documents::one, kMasks[next_mask++ % 4]})
      for (const Tolerance& tolerance : kTolerances) {
        Pool pool(static_cast<uint32_t>(shape.tokens * 31 + shape.depth));
        const Problem rounded = Problem(pool, shape, documents).as(pool, tolerance.dtype);
        const Results expected = explicit_attention(pool, rounded.as(pool, DType::f64));
        Results got(pool, rounded, tolerance.dtype);
        got.forward(ctx, rounded);
        got.backward(ctx, rounded);
        INFO(describe(shape) << " documents " << static_cast<int>(documents) << " "
                             << dtype_name(tolerance.dtype));
        CHECK(relative_error(got.o, expected.o) < tolerance.o);
        CHECK(relative_error(got.lse, expected.lse) < tolerance.statistics);
        CHECK(relative_error(got.z0, expected.z0) < tolerance.statistics);
        CHECK(relative_error(got.dq, expected.dq) < tolerance.gradients);
        CHECK(relative_error(got.dk, expected.dk) < tolerance.gradients);
        CHECK(relative_error(got.dv, expected.dv) < tolerance.gradients);
      }
}

TEST_CASE("attention gradients equal central differences, with those of lse and z0", "[attention]") {
  Context ctx = make_context();
  const Shape shape = {70, 4, 2, 6};
  for (Documents documents : {Documents::one, Documents::short_ones, Documents::window})
    for (int terms = 0; terms < 4; ++terms) {
      const bool with_lse = terms & 1, with_z0 = terms & 2;
      Pool pool(5);
      Problem p(pool, shape, documents);
      Results r(pool, p, DType::f64);
      const Tensor weights = p.d_o;
      // <w, o> + sum_i a_i lse_i^2 / 2 + sum_i b_i sin(z0_i)
      const Tensor a = pool.normal(DType::f64, {shape.heads, shape.tokens});
      const Tensor b = pool.normal(DType::f64, {shape.heads, shape.tokens});
      const auto loss = [&] {
        r.forward(ctx, p);
        double s = dot(weights, r.o);
        for (int64_t i = 0; i < a.numel(); ++i) {
          if (with_lse) s += Pool::get(a, i) * Pool::get(r.lse, i) * Pool::get(r.lse, i) / 2;
          if (with_z0) s += Pool::get(b, i) * std::sin(Pool::get(r.z0, i));
        }
        return s;
      };
      loss();
      for (int64_t i = 0; i < a.numel(); ++i) {
        Pool::set(p.dlse, i, Pool::get(a, i) * Pool::get(r.lse, i));
        Pool::set(p.coef0, i, Pool::get(b, i) * std::cos(Pool::get(r.z0, i)));
      }
      r.backward(ctx, p, with_lse, with_z0);
      INFO("documents " << static_cast<int>(documents) << " lse " << with_lse << " z0 " << with_z0);
      CHECK(gradient_error(p.q, r.dq, loss, 24) < 1e-7);
      CHECK(gradient_error(p.k, r.dk, loss, 24) < 1e-7);
      CHECK(gradient_error(p.v, r.dv, loss, 24) < 1e-7);
    }
}

TEST_CASE("exp(z0 - lse) is the attention to the first visible key, and z0 never exceeds lse",
          "[attention]") {
  Context ctx = make_context();
  for (DType dtype : {DType::f64, DType::f32, DType::bf16})
    for (Documents documents : {Documents::one, Documents::short_ones, Documents::alone})
      for (double spread : {0.1, 1.0, 30.0}) {
        Pool pool(9);
        Problem p(pool, {150, 4, 2, 16}, documents);
        for (int64_t i = 0; i < p.q.numel(); ++i) Pool::set(p.q, i, spread * Pool::get(p.q, i));
        p = p.as(pool, dtype);
        Results r(pool, p, dtype);
        r.forward(ctx, p);
        // One value channel that is 1 at first keys and 0 elsewhere makes o the first-token attention.
        for (int64_t i = 0; i < p.v.numel(); ++i) Pool::set(p.v, i, 0);
        for (int64_t t = 0; t < p.shape.tokens; ++t)
          for (int64_t i = 0; i < p.shape.kv_heads * p.shape.depth; ++i)
            Pool::set(p.v, p.first_key.as<int32_t>()[t] * p.shape.kv_heads * p.shape.depth + i, 1);
        r.forward(ctx, p);
        double worst = 0;
        for (int64_t t = 0; t < p.shape.tokens; ++t)
          for (int64_t h = 0; h < p.shape.heads; ++h) {
            const double lse = Pool::get(r.lse, h * p.shape.tokens + t),
                         z0 = Pool::get(r.z0, h * p.shape.tokens + t);
            REQUIRE(z0 <= lse);
            if (p.first_key.as<int32_t>()[t] == t) REQUIRE(z0 == lse);  // one visible key, one arithmetic
            worst = std::max(worst, std::abs(std::exp(z0 - lse) -
                                             Pool::get(r.o, (t * p.shape.heads + h) * p.shape.depth)));
          }
        CHECK(worst < (dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 1e-4 : 4e-3));
      }
}

TEST_CASE("attention with earlier keys equals the last rows of the full computation", "[attention]") {
  Context ctx = make_context();
  for (const Tolerance& tolerance : kTolerances)
    for (Documents documents : {Documents::one, Documents::short_ones})
      for (int64_t queries : {1, 2, 65, 200}) {
        Pool pool(11);
        Problem p = Problem(pool, {203, 6, 2, 24}, documents).as(pool, tolerance.dtype);
        Results whole(pool, p, tolerance.dtype);
        whole.forward(ctx, p);
        Problem tail = p;
        const int64_t skipped = p.shape.tokens - queries;
        tail.q = p.q.rows(skipped, queries);
        tail.first_key = p.first_key.rows(skipped, queries);
        Results part(pool, tail, tolerance.dtype);
        part.forward(ctx, tail);
        INFO(queries << " queries, " << dtype_name(tolerance.dtype));
        CHECK(relative_error(part.o, whole.o.rows(skipped, queries)) < tolerance.o);
        for (int64_t h = 0; h < p.shape.heads; ++h)
          for (int64_t t = 0; t < queries; ++t) {
            const int64_t i = h * queries + t, j = h * p.shape.tokens + skipped + t;
            REQUIRE(std::abs(Pool::get(part.lse, i) - Pool::get(whole.lse, j)) < 1e-5);
            REQUIRE(std::abs(Pool::get(part.z0, i) - Pool::get(whole.z0, j)) < 1e-5);
          }
      }
}

TEST_CASE("attention gives the same bits for any number of threads", "[attention]") {
  Context ctx = make_context();
  struct Case {
    Shape shape;
    Documents documents;
  };
  // Many chunks, few chunks (dq and dk, dv computed apart with several threads), one kv head.
  for (const Case& c :
       {Case{{700, 4, 2, 64}, Documents::sequences}, Case{{500, 3, 1, 32}, Documents::one},
        Case{{600, 4, 1, 20}, Documents::short_ones}, Case{{333, 2, 2, 64}, Documents::window}})
    for (DType dtype : {DType::f32, DType::bf16, DType::f64}) {
      Pool pool(13);
      const Problem p = Problem(pool, c.shape, c.documents).as(pool, dtype);
      Results one(pool, p, dtype);
      with_threads(1, [&] {
        one.forward(ctx, p);
        one.backward(ctx, p);
      });
      for (int threads : {2, 3, 8}) {
        Results many(pool, p, dtype);
        with_threads(threads, [&] {
          many.forward(ctx, p);
          many.backward(ctx, p);
        });
        INFO(describe(c.shape) << " " << dtype_name(dtype) << " threads " << threads);
        CHECK((same_bits(one.o, many.o) && same_bits(one.lse, many.lse) && same_bits(one.z0, many.z0)));
        CHECK((same_bits(one.dq, many.dq) && same_bits(one.dk, many.dk) && same_bits(one.dv, many.dv)));
      }
    }
}

TEST_CASE("attention ignores masked keys, even NaN ones", "[attention]") {
  Context ctx = make_context();
  Pool pool(15);
  Problem p = Problem(pool, {100, 2, 1, 16}, Documents::one).as(pool, DType::f32);
  for (int64_t t = 50; t < 100; ++t) p.first_key.as<int32_t>()[t] = 50;
  Results clean(pool, p, DType::f32), broken(pool, p, DType::f32);
  clean.forward(ctx, p);
  for (int64_t i = 0; i < 16; ++i) p.k.as<float>()[10 * 16 + i] = NAN;
  broken.forward(ctx, p);
  CHECK(same_bits(clean.o.rows(0, 10), broken.o.rows(0, 10)));
  CHECK(same_bits(clean.o.rows(50, 50), broken.o.rows(50, 50)));
  // It does not mask visible keys.
  for (int64_t t = 10; t < 50; ++t) REQUIRE(std::isnan(Pool::get(broken.lse, t)));
}

TEST_CASE("a dry run of attention allocates the scratch memory of a real one and touches no data",
          "[attention]") {
  for (DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    Pool pool(17);
    const Problem p = Problem(pool, {140, 4, 2, 40}, Documents::one).as(pool, dtype);
    Results r(pool, p, dtype);
    Context dry(0);
    Problem nothing = p;
    Results none = r;
    for (Tensor* t : {&nothing.q, &nothing.k, &nothing.v, &nothing.first_key, &nothing.d_o, &nothing.dlse,
                      &nothing.coef0, &none.o, &none.lse, &none.z0, &none.dq, &none.dk, &none.dv})
      t->data = nullptr;
    none.forward(dry, nothing);
    none.backward(dry, nothing);
    Context exact(dry.scratch.high_water());
    r.forward(exact, p);
    r.backward(exact, p);
    CHECK(exact.scratch.high_water() == dry.scratch.high_water());
    CHECK(exact.scratch.used() == 0);
  }
}

TEST_CASE("attention's errors name the op and the wrong argument", "[attention]") {
  Context ctx = make_context();
  Pool pool(19);
  const Problem p = Problem(pool, {8, 4, 2, 8}, Documents::one).as(pool, DType::f32);
  Results r(pool, p, DType::f32);
  const auto with = [&](Tensor Problem::*member, const Tensor& t) {
    Problem bad = p;
    bad.*member = t;
    return message_of([&] { r.forward(ctx, bad); });
  };
  using Catch::Contains;
  CHECK_THAT(with(&Problem::q, pool.zeros(DType::f32, {8, 3, 8})),
             Contains("attention_forward: 3 query heads cannot share 2 key heads"));
  CHECK_THAT(with(&Problem::k, pool.zeros(DType::f32, {8, 2, 4})),
             Contains("attention_forward: k must be (8, 2, 8) f32"));
  CHECK_THAT(with(&Problem::v, pool.zeros(DType::bf16, {8, 2, 8})),
             Contains("attention_forward: v must be (8, 2, 8) f32, got (8, 2, 8) bf16"));
  CHECK_THAT(with(&Problem::first_key, pool.zeros(DType::i32, {7})),
             Contains("attention_forward: first_key must be (8) i32"));
  CHECK_THAT(with(&Problem::first_key, pool.integers({8}, 7, 7)),
             Contains("attention_forward: first_key[0] = 7"));
  Results wrong = r;
  wrong.lse = pool.zeros(DType::f64, {4, 8});
  CHECK_THAT(message_of([&] { wrong.forward(ctx, p); }),
             Contains("attention_forward: lse must be (4, 8) f32"));
  wrong = r;
  wrong.dk = pool.zeros(DType::f32, {8, 4, 8});
  CHECK_THAT(message_of([&] { wrong.backward(ctx, p); }),
             Contains("attention_backward: dk must be (8, 2, 8) f32"));
  Tensor sink = pool.zeros(DType::f32, {3});
  CHECK_THAT(message_of([&] { sink_forward(ctx, r.o, r.o, r.lse, sink); }),
             Contains("sink_forward: sink must be (4) f32"));
}

TEST_CASE("a sink logit adds to the softmax denominator like a key without a value", "[attention][sink]") {
  Context ctx = make_context();
  for (DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    Pool pool(21);
    const Problem p = Problem(pool, {40, 4, 2, 8}, Documents::short_ones).as(pool, dtype);
    Results r(pool, p, dtype);
    r.forward(ctx, p);
    Tensor sink = pool.normal(dtype, {4}, 2.0), y = pool.zeros(dtype, {40, 4, 8});
    sink_forward(ctx, y, r.o, r.lse, sink);
    // sum_j e^z_j v_j / (sum_j e^z_j + e^s)
    double worst = 0;
    for (int64_t t = 0; t < 40; ++t)
      for (int64_t h = 0; h < 4; ++h) {
        const double e = std::exp(Pool::get(r.lse, h * 40 + t)), s = std::exp(Pool::get(sink, h));
        for (int64_t d = 0; d < 8; ++d) {
          const int64_t i = (t * 4 + h) * 8 + d;
          worst = std::max(worst, std::abs(Pool::get(y, i) - Pool::get(r.o, i) * e / (e + s)));
        }
      }
    CHECK(worst < (dtype == DType::f64 ? 1e-13 : dtype == DType::f32 ? 2e-6 : 2e-2));
    // Minus infinity, as far as any storage holds it: no sink.
    for (int64_t h = 0; h < 4; ++h) Pool::set(sink, h, -1e30);
    sink_forward(ctx, y, r.o, r.lse, sink);
    CHECK(same_bits(y, r.o));
  }
}

TEST_CASE("sink gradients equal central differences, also through attention", "[attention][sink]") {
  Context ctx = make_context();
  Pool pool(23);
  const Shape shape = {70, 4, 2, 8};
  Problem p(pool, shape, Documents::short_ones);
  Results r(pool, p, DType::f64);
  const Tensor sink = pool.normal(DType::f64, {4}), y = pool.zeros(DType::f64, {70, 4, 8});
  const Tensor dy = pool.normal(DType::f64, {70, 4, 8});
  const auto loss = [&] {
    r.forward(ctx, p);
    sink_forward(ctx, y, r.o, r.lse, sink);
    return dot(dy, y);
  };
  loss();
  const Tensor before = pool.normal(DType::f64, {4}), dsink = pool.copy(before, DType::f64);
  const Tensor d_o = pool.copy(dy, DType::f64);
  sink_backward(ctx, d_o, p.dlse, dsink, d_o, r.o, r.lse, sink);  // d_o in place of dy
  p.d_o = d_o;
  r.backward(ctx, p, true, false);
  for (int64_t h = 0; h < 4; ++h) Pool::set(dsink, h, Pool::get(dsink, h) - Pool::get(before, h));
  CHECK(gradient_error(sink, dsink, loss) < 1e-7);
  CHECK(gradient_error(p.q, r.dq, loss, 24) < 1e-7);
  CHECK(gradient_error(p.k, r.dk, loss, 24) < 1e-7);
  CHECK(gradient_error(p.v, r.dv, loss, 24) < 1e-7);
}

TEST_CASE("speed of attention", "[.bench]") {
  using Clock = std::chrono::steady_clock;
  struct Case {
    int64_t batch;
    Shape shape;
  };
  Context ctx(int64_t{512} << 20);
  for (const Case& c : {Case{4, {256, 6, 2, 64}}, Case{1, {2048, 8, 4, 128}}})
    for (DType dtype : {DType::f32, DType::bf16}) {
      Pool pool(1);
      Shape all = c.shape;
      all.tokens *= c.batch;
      Problem p = Problem(pool, all, Documents::one).as(pool, dtype);
      for (int64_t t = 0; t < all.tokens; ++t)
        p.first_key.as<int32_t>()[t] = static_cast<int32_t>(t / c.shape.tokens * c.shape.tokens);
      Results r(pool, p, dtype);
      const auto t = static_cast<double>(c.shape.tokens);
      const double pairs = static_cast<double>(c.batch * all.heads) * t * (t + 1) / 2;
      const double flops = 4 * pairs * static_cast<double>(all.depth);
      const auto best_of = [&](auto&& body) {
        double best = INFINITY;
        for (int i = 0; i < 15; ++i) {
          const auto start = Clock::now();
          body();
          best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
        }
        return best;
      };
      const double forward = best_of([&] { r.forward(ctx, p); });
      const double backward = best_of([&] { r.backward(ctx, p, false, false); });
      WARN(fmt::format(
          "B {} {} {} threads {}: forward {:.2f} ms {:.1f} GFLOP/s, backward {:.2f} ms {:.1f} GFLOP/s",
          c.batch, describe(c.shape), dtype_name(dtype), num_threads(), forward * 1e3, flops / forward * 1e-9,
          backward * 1e3, 2.5 * flops / backward * 1e-9));
    }
}

TEST_CASE(
    "attention of queries that are any of the keys: as that of all queries, row by row, and its gradients "
    "add up to theirs",
    "[attention][context]") {
  const auto documents = GENERATE(Documents::one, Documents::short_ones, Documents::sequences,
                                  Documents::alone, Documents::window);
  const Shape shape = GENERATE(Shape{16, 2, 1, 8}, Shape{480, 4, 2, 20});
  INFO(describe(shape) << ", documents " << static_cast<int>(documents));
  Pool pool;
  Context ctx(int64_t{1} << 26);
  const Problem all(pool, shape, documents);
  const Results expected = explicit_attention(pool, all);
  const Tensor dk = pool.zeros(DType::f64, {shape.tokens, shape.kv_heads, shape.depth}),
               dv = pool.zeros(DType::f64, {shape.tokens, shape.kv_heads, shape.depth});
  // Head and tail, and what is between.
  const int64_t chunk = shape.tokens / 4;
  for (const auto& halves : {std::pair<int64_t, int64_t>{0, 3}, {1, 2}}) {
    Problem part = all;
    const int64_t rows = 2 * chunk, row = shape.heads * shape.depth;
    part.q = pool.zeros(DType::f64, {rows, shape.heads, shape.depth});
    part.d_o = pool.zeros(DType::f64, {rows, shape.heads, shape.depth});
    part.dlse = pool.zeros(DType::f64, {shape.heads, rows});
    part.coef0 = pool.zeros(DType::f64, {shape.heads, rows});
    part.first_key = pool.zeros(DType::i32, {rows});
    const Tensor own = pool.zeros(DType::i32, {rows});
    for (int64_t t = 0; t < rows; ++t) {
      const int64_t from = (t < chunk ? halves.first : halves.second) * chunk + t % chunk;
      own.as<int32_t>()[t] = static_cast<int32_t>(from);
      part.first_key.as<int32_t>()[t] = static_cast<int32_t>(all.first_key.as<int32_t>()[from] - from + t);
      for (int64_t i = 0; i < row; ++i) {
        Pool::set(part.q, t * row + i, Pool::get(all.q, from * row + i));
        Pool::set(part.d_o, t * row + i, Pool::get(all.d_o, from * row + i));
      }
      for (int64_t h = 0; h < shape.heads; ++h) {
        Pool::set(part.dlse, h * rows + t, Pool::get(all.dlse, h * shape.tokens + from));
        Pool::set(part.coef0, h * rows + t, Pool::get(all.coef0, h * shape.tokens + from));
      }
    }
    AttentionInputs in = part.inputs();
    in.own_key = own;
    Results r(pool, part, DType::f64);
    r.dq = pool.normal(DType::f64, {rows, shape.heads, shape.depth}, 1.0);
    attention_forward(ctx, {r.o, r.lse, r.z0}, in);
    attention_backward(ctx, {r.dq, r.dk, r.dv}, part.d_o, in, {r.o, r.lse}, {part.dlse, part.coef0});
    double worst = 0;
    const auto compare = [&](const Tensor& of_part, int64_t a, const Tensor& of_all, int64_t b) {
      const double expected_value = Pool::get(of_all, b);
      worst =
          std::max(worst, std::abs(Pool::get(of_part, a) - expected_value) / (1 + std::abs(expected_value)));
    };
    for (int64_t t = 0; t < rows; ++t) {
      const int64_t from = own.as<int32_t>()[t];
      for (int64_t i = 0; i < row; ++i) {
        compare(r.o, t * row + i, expected.o, from * row + i);
        compare(r.dq, t * row + i, expected.dq, from * row + i);
      }
      for (int64_t h = 0; h < shape.heads; ++h) {
        compare(r.z0, h * rows + t, expected.z0, h * shape.tokens + from);
        compare(r.lse, h * rows + t, expected.lse, h * shape.tokens + from);
      }
    }
    CHECK(worst < 1e-11);
    for (int64_t i = 0; i < dk.numel(); ++i) {
      Pool::set(dk, i, Pool::get(dk, i) + Pool::get(r.dk, i));
      Pool::set(dv, i, Pool::get(dv, i) + Pool::get(r.dv, i));
    }
  }
  double worst = 0;
  for (int64_t i = 0; i < dk.numel(); ++i) {
    worst = std::max(worst, std::abs(Pool::get(dk, i) - Pool::get(expected.dk, i)));
    worst = std::max(worst, std::abs(Pool::get(dv, i) - Pool::get(expected.dv, i)));
  }
  CHECK(worst < 1e-11);
}

TEST_CASE(
    "attention of independent rows: a query has the same bits among all queries and among those of two "
    "chunks",
    "[attention][context]") {
  const DType dtype = GENERATE(DType::f32, DType::bf16, DType::f64);
  const auto weights = GENERATE(AttentionWeights::softmax, AttentionWeights::softpick);
  const auto documents = GENERATE(Documents::one, Documents::short_ones, Documents::sequences,
                                  Documents::alone, Documents::window);
  // The second has as many channels as tiles multiply.
  const Shape shape = GENERATE(Shape{500, 4, 2, 20}, Shape{612, 6, 2, 32}, Shape{16, 2, 1, 8});
  INFO(describe(shape) << " " << dtype_name(dtype) << ", documents " << static_cast<int>(documents));
  Pool pool;
  Context ctx(int64_t{1} << 26);
  ctx.independent_rows = true;
  Problem drawn(pool, shape, documents);
  // Alike weights, and large values that cancel each other: the order of the sum is most of the result.
  const bool cancels = GENERATE(false, true);
  for (int64_t i = 0; i < drawn.q.numel() && cancels; ++i) drawn.q.as<double>()[i] = 0;
  const int64_t row = shape.kv_heads * shape.depth;
  for (int64_t i = 0; i < drawn.v.numel() && cancels; ++i)
    if (i / row % 2 == 0) drawn.v.as<double>()[i] = i / row % 4 == 0 ? 32768 : -32768;
  const Problem all = drawn.as(pool, dtype);
  const auto attend = [&](const AttentionInputs& in) {
    const int64_t rows = in.q.dim(0);
    const AttentionState out = {pool.zeros(dtype, {rows, shape.heads, shape.depth}),
                                pool.zeros(accumulate_dtype(dtype), {shape.heads, rows}),
                                pool.zeros(accumulate_dtype(dtype), {shape.heads, rows})};
    attention_forward(ctx, out, in);
    return out;
  };
  AttentionInputs in = all.inputs();
  in.weights = weights;
  const AttentionState whole = attend(in);
  for (const auto& chunks : kChunks) {
    const SomeQueries some(pool, shape.tokens, chunks, all.first_key);
    AttentionInputs part = in;
    part.q = some.of(pool, all.q), part.first_key = some.first_key, part.own_key = some.own_key;
    const AttentionState mine = attend(part);
    const auto same = [&](const Tensor& a, const Tensor& b) {
      return std::memcmp(a.data, b.data, static_cast<size_t>(b.bytes())) == 0;
    };
    CHECK(same(mine.o, some.of(pool, whole.o)));
    CHECK(same(mine.lse, some.of(pool, whole.lse, 1)));
    CHECK(same(mine.z0, some.of(pool, whole.z0, 1)));
  }
}
