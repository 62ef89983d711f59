// Products of bf16 in tiles, by the unit of this process (core/cpu_features.h), and by AMX's emulation where
// it has none.
#include "ops/tile_product.h"

#include "core/cpu_features.h"
#include "ops/elementwise.h"
#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;
using Layout = cpu::Product::Layout;

namespace {

constexpr int64_t kScratch = 64 << 20;

struct Operands {
  Tensor a, b, packed;  // a (m, k) or (k, m); b (k, n) or (n, k)
};

Operands operands(Pool& pool, Context& ctx, const cpu::Product& p) {
  Operands o;
  o.a = p.a_transposed ? pool.normal(DType::bf16, {p.k, p.m}) : pool.normal(DType::bf16, {p.m, p.k});
  o.b =
      p.b == Layout::transposed ? pool.normal(DType::bf16, {p.n, p.k}) : pool.normal(DType::bf16, {p.k, p.n});
  if (p.b == Layout::packed) {
    o.packed = pool.zeros(DType::f32, {tile_packed_bytes(p.k, p.n) / 4});
    tile_pack(ctx, p.k, p.n, false, o.b.as<bf16>(), o.packed.as<float>());
  }
  return o;
}

Tensor product(Context& ctx, const cpu::Product& p, const Operands& o, const Tensor& c) {
  tile_product(ctx, p, o.a.data, p.b == Layout::packed ? o.packed.data : o.b.data, c.data);
  return c;
}

/// The same in f64 loops, added to `before` if p accumulates.
Tensor loops(Pool& pool, const cpu::Product& p, const Operands& o, const Tensor& before) {
  const Tensor c = pool.zeros(DType::f64, {p.m, p.n});
  for (int64_t i = 0; i < p.m; ++i)
    for (int64_t j = 0; j < p.n; ++j) {
      double sum = p.accumulate ? Pool::get(before, i * p.n + j) : 0;
      for (int64_t l = 0; l < p.k; ++l)
        sum += Pool::get(o.a, p.a_transposed ? l * p.m + i : i * p.k + l) *
               Pool::get(o.b, p.b == Layout::transposed ? j * p.k + l : l * p.n + j);
      c.as<double>()[i * p.n + j] = sum;
    }
  return c;
}

/// FNV-1a of the words of a tensor of f32.
uint64_t hash_of(const Tensor& t) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (int64_t i = 0; i < t.numel(); ++i)
    hash = (hash ^ std::bit_cast<uint32_t>(t.as<float>()[i])) * 0x100000001b3u;
  return hash;
}

struct Size {
  int64_t m, n, k;
};
// Tails of rows, of columns and of the depth; more rows than a unit has, and more depth than is packed at a
// time.
constexpr Size kSizes[] = {{1, 1, 1},     {16, 32, 32},   {17, 33, 31},   {33, 40, 65},  {70, 64, 96},
                           {300, 97, 67}, {48, 31, 2100}, {5, 200, 1056}, {40, 48, 1100}};

}  // namespace

TEST_CASE("products in tiles equal f64 loops in every layout", "[tile_product]") {
  Context ctx(kScratch);
  for (const auto& [m, n, k] : kSizes)
    for (const DType out : {DType::f32, DType::bf16})
      for (const Layout b : {Layout::plain, Layout::transposed, Layout::packed})
        for (const bool a_transposed : {false, true})
          for (const bool accumulate : {false, true}) {
            CAPTURE(m, n, k, dtype_name(out), static_cast<int>(b), a_transposed, accumulate);
            Pool pool;
            const cpu::Product p{DType::bf16, out, m, n, k, a_transposed, b, accumulate, 0};
            const Operands o = operands(pool, ctx, p);
            const Tensor c = pool.normal(out, {m, n}, 3), expected = loops(pool, p, o, c);
            CHECK(relative_error(product(ctx, p, o, c), expected) < (out == DType::f32 ? 4e-6 : 4e-3));
          }
}

TEST_CASE("bits of products in tiles depend on neither threads, packing, nor other rows", "[tile_product]") {
  Context ctx(kScratch);
  for (const DType out : {DType::f32, DType::bf16})
    for (const bool accumulate : {false, true}) {
      CAPTURE(dtype_name(out), accumulate);
      Pool pool;
      // So long that several strips of columns are computed together, and more columns than those.
      cpu::Product p{DType::bf16, out, 301, 550, 3000, false, Layout::packed, accumulate, 0};
      const Operands o = operands(pool, ctx, p);
      const auto again = [&] {
        const Tensor c = pool.zeros(out, {p.m, p.n});
        fill(ctx, c, 3);
        return product(ctx, p, o, c);
      };
      const Tensor c = again();
      for (const int threads : {1, 3}) {
        const Threads scope(threads);
        CHECK(same_bits(again(), c));
      }
      p.b = Layout::plain;
      CHECK(same_bits(again(), c));
      p.m = 19;
      CHECK(same_bits(again(), c.rows(0, p.m)));
    }
}

TEST_CASE("the emulated unit has the bits of AMX, for denormal numbers too", "[tile_product]") {
  // The golden was computed by AMX on an Intel Xeon (avx512_bf16, amx_bf16), and this test runs with both.
  // AVX512-BF16 adds in another order; where a process has that, ctest's ops_emulated_amx checks the golden.
  if (bf16_unit() == Bf16Unit::avx512_bf16) return;
  Context ctx(kScratch);
  Pool pool;
  const cpu::Product p{DType::bf16, DType::f32, 40, 48, 320, false, Layout::plain, false, 0};
  uint64_t state = 1;
  const auto any = [&state](Tensor t, uint32_t first_exponent, uint32_t exponents) {
    for (int64_t i = 0; i < t.numel(); ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const auto random = static_cast<uint32_t>(state >> 33);
      t.as<bf16>()[i].bits =
          static_cast<uint16_t>((random & 0x807fu) | (first_exponent + (random >> 16) % exponents) << 7);
    }
    return t;
  };
  uint64_t all = 0;
  for (const auto& [exponent, other] :
       {std::pair{120u, 120u}, std::pair{0u, 100u}, std::pair{40u, 20u}, std::pair{180u, 180u}}) {
    const Operands o{any(pool.zeros(DType::bf16, {p.m, p.k}), exponent, 8),
                     any(pool.zeros(DType::bf16, {p.k, p.n}), other, 8),
                     {}};
    const Tensor c = product(ctx, p, o, pool.zeros(DType::f32, {p.m, p.n}));
    all = all * 31 + hash_of(c);
  }
  CHECK(all == 0x5f5188bcb58bb899u);
}

TEST_CASE("products in tiles refuse types that they do not have", "[tile_product]") {
  Context ctx(kScratch);
  Pool pool;
  const Tensor x = pool.zeros(DType::f32, {4, 4});
  CHECK_THAT(error_of([&] {
               tile_product(ctx, {DType::f32, DType::f32, 4, 4, 4}, x.data, x.data, x.data);
             }),
             Catch::Contains("operands are bf16"));
}
