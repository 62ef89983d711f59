#include "params/init.h"

#include <catch2/catch.hpp>
#include <cstring>

#include "support/gradcheck.h"

namespace sluice {

TEST_CASE("A slice's initial values are those of the whole parameter at its place", "[params]") {
  const ParamSpec spec{.name = "w", .shape = {40, 50}, .init = Init::normal(0.3)};
  Context ctx(1 << 16);
  test::Pool pool;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    const Tensor whole = pool.zeros(dtype, {2000}), slice = pool.zeros(dtype, {300});
    write_initial_values(ctx, spec, 0, 2000, whole, 7);
    write_initial_values(ctx, spec, 1234, 300, slice, 7);
    const Tensor same = whole.rows(1234, 300);
    CHECK(std::memcmp(slice.data, same.data, static_cast<size_t>(slice.bytes())) == 0);
  }
  const Tensor constant = pool.zeros(DType::f32, {5});
  write_initial_values(ctx, {.name = "norm", .shape = {5}, .init = Init::constant(1)}, 0, 5, constant, 7);
  for (int64_t i = 0; i < 5; ++i) CHECK(test::Pool::get(constant, i) == 1);
}

}  // namespace sluice
