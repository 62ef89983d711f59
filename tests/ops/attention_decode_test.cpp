// Attention of one query behind many keys, as generation computes it: against the definition in f64.
#include <catch2/catch.hpp>
#include <cstring>

#include "core/parallel_for.h"
#include "ops/attention.h"
#include "support/gradcheck.h"

using namespace sluice;
using namespace sluice::test;

namespace {

struct Shape {
  int64_t keys, heads, kv_heads, depth;
};

/// One query that sees the keys from `first` on.
struct Query {
  Shape shape;
  Tensor q, k, v, first_key;

  Query(Pool& pool, const Shape& s, int32_t first, DType dtype) : shape(s) {
    q = pool.copy(pool.normal(DType::f64, {1, s.heads, s.depth}, 2.0), dtype);
    k = pool.copy(pool.normal(DType::f64, {s.keys, s.kv_heads, s.depth}), dtype);
    v = pool.copy(pool.normal(DType::f64, {s.keys, s.kv_heads, s.depth}), dtype);
    first_key = pool.zeros(DType::i32, {1});
    first_key.as<int32_t>()[0] = first;
  }
  AttentionInputs inputs() const {
    return {q, k, v, first_key, 1 / std::sqrt(static_cast<double>(shape.depth))};
  }
};

AttentionState state(Pool& pool, const Shape& s, DType dtype) {
  const DType wide = accumulate_dtype(dtype);
  return {pool.normal(dtype, {1, s.heads, s.depth}), pool.normal(wide, {s.heads, 1}),
          pool.normal(wide, {s.heads, 1})};
}

AttentionState by_definition(Pool& pool, const Query& query) {
  const auto& [keys, heads, kv_heads, depth] = query.shape;
  const AttentionInputs in = query.inputs();
  const AttentionState s = state(pool, query.shape, DType::f64);
  std::vector<double> z(static_cast<size_t>(keys));
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t g = h / (heads / kv_heads), first = in.first_key.as<int32_t>()[0];
    double sum = 0;
    for (int64_t j = first; j < keys; ++j) {
      double product = 0;
      for (int64_t d = 0; d < depth; ++d)
        product += Pool::get(in.q, h * depth + d) * Pool::get(in.k, (j * kv_heads + g) * depth + d);
      z[static_cast<size_t>(j)] = in.scale * product;
      sum += std::exp(z[static_cast<size_t>(j)]);
    }
    Pool::set(s.lse, h, std::log(sum));
    Pool::set(s.z0, h, z[static_cast<size_t>(first)]);
    for (int64_t d = 0; d < depth; ++d) {
      double o = 0;
      for (int64_t j = first; j < keys; ++j)
        o += std::exp(z[static_cast<size_t>(j)]) / sum * Pool::get(in.v, (j * kv_heads + g) * depth + d);
      Pool::set(s.o, h * depth + d, o);
    }
  }
  return s;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0;
}

struct Tolerance {
  DType dtype;
  double o, statistics;
};
constexpr Tolerance kTolerances[] = {
    {DType::f64, 1e-13, 1e-13}, {DType::f32, 2e-6, 1e-6}, {DType::bf16, 4e-3, 1e-6}};

}  // namespace

TEST_CASE("one query behind many keys equals the definition: lengths, groups of heads, depths, windows",
          "[attention]") {
  Context ctx(int64_t{16} << 20);
  for (const Tolerance& tolerance : kTolerances)
    for (const auto& [keys, heads, kv_heads, depth, first] : {std::tuple{2, 1, 1, 16, 0},
                                                              {2, 2, 1, 64, 1},
                                                              {127, 3, 1, 64, 0},
                                                              {128, 6, 2, 64, 0},
                                                              {129, 5, 1, 128, 0},
                                                              {129, 4, 4, 48, 128},
                                                              {700, 9, 1, 32, 0},
                                                              {700, 6, 2, 80, 131},
                                                              {391, 2, 2, 20, 7},
                                                              {1000, 12, 12, 64, 255},
                                                              {513, 14, 2, 192, 256},
                                                              {200, 40, 1, 32, 5},
                                                              {260, 40, 20, 48, 3},
                                                              {300, 80, 2, 16, 0}}) {
      Pool pool(static_cast<uint32_t>(keys + depth));
      const Query query(pool, {keys, heads, kv_heads, depth}, first, tolerance.dtype);
      INFO(keys << " keys from " << first << " on, " << heads << " heads of " << kv_heads << ", depth "
                << depth << ", " << dtype_name(tolerance.dtype));
      const AttentionState expected = by_definition(pool, query),
                           got = state(pool, query.shape, tolerance.dtype);
      attention_forward(ctx, got, query.inputs());
      CHECK(relative_error(got.o, expected.o) < tolerance.o);
      CHECK(relative_error(got.lse, expected.lse) < tolerance.statistics);
      CHECK(relative_error(got.z0, expected.z0) < tolerance.statistics);
      for (int64_t h = 0; h < heads; ++h) REQUIRE(Pool::get(got.z0, h) <= Pool::get(got.lse, h));
    }
}

TEST_CASE("one query gets the same bits for any number of threads, and whatever masked keys hold",
          "[attention]") {
  Context ctx(int64_t{16} << 20);
  const int before = num_threads();
  for (const Tolerance& tolerance : kTolerances) {
    Pool pool(3);
    const Query query(pool, {3000, 6, 2, 64}, 130, tolerance.dtype);
    const AttentionState one = state(pool, query.shape, tolerance.dtype);
    set_num_threads(1);
    attention_forward(ctx, one, query.inputs());
    for (int64_t i = 0; i < int64_t{130} * 2 * 64; ++i)
      Pool::set(query.k, i, NAN), Pool::set(query.v, i, NAN);
    for (const int threads : {2, 3, 8}) {
      set_num_threads(threads);
      const AttentionState many = state(pool, query.shape, tolerance.dtype);
      attention_forward(ctx, many, query.inputs());
      CHECK((same_bits(one.o, many.o) && same_bits(one.lse, many.lse) && same_bits(one.z0, many.z0)));
    }
    set_num_threads(before);
    // NaN in a visible key is not hidden.
    Pool::set(query.k, int64_t{2999} * 2 * 64, NAN);
    attention_forward(ctx, one, query.inputs());
    CHECK(std::isnan(Pool::get(one.o, 0)));
    CHECK(std::isnan(Pool::get(one.lse, 0)));
  }
}
