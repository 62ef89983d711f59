#include "params/param_store.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <memory>

#include "core/parallel_for.h"
#include "support/gradcheck.h"

namespace sluice {
namespace {

using test::Pool;

struct Memory {
  explicit Memory(ParamStore& store, DType dtype, bool with_gradients = true) {
    Context dry(0);
    Arena v("values"), g("gradients");
    store.allocate(dry, dtype, 64, v, with_gradients ? &g : nullptr);
    values = std::make_unique<Arena>("values", v.high_water());
    gradients = std::make_unique<Arena>("gradients", g.high_water());
    store.allocate(context, dtype, 64, *values, with_gradients ? gradients.get() : nullptr);
    measured_exactly = values->high_water() == v.high_water();
  }
  Context context{1 << 20};
  std::unique_ptr<Arena> values, gradients;
  bool measured_exactly = false;
};

ParamStore small_store() {
  ParamStore store;
  store.add({.name = "norm", .shape = {7}, .init = Init::constant(1), .weight_decay = false});
  store.add({.name = "gate", .shape = {5, 3}, .init = Init::normal(0.02), .packed = true});
  store.add({.name = "up", .shape = {5, 3}, .init = Init::normal(0.02), .packed = true, .joined = true});
  store.add({.name = "down", .shape = {3, 5}, .init = Init::normal(0.5), .packed = true});
  return store;
}

uintptr_t address(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data); }

}  // namespace

TEST_CASE("parameters are aligned in flat buffers, and joined ones are contiguous", "[params]") {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    ParamStore store = small_store();
    Memory memory(store, dtype);
    CHECK(memory.measured_exactly);
    CHECK(store.total() == 7 + 15 + 15 + 15);
    CHECK(store.flat_values().numel() >= store.total());
    CHECK(store.flat_grads().numel() == store.flat_values().numel());
    CHECK(store.flat_grads().dtype == accumulate_dtype(dtype));
    for (const ParamStore::Id id : {0, 1, 3}) {
      CHECK(address(store.value(id)) % 64 == 0);
      CHECK(address(store.grad(id)) % 64 == 0);
    }
    CHECK(address(store.value(2)) ==
          address(store.value(1)) + static_cast<uintptr_t>(15 * dtype_size(dtype)));
    const Tensor both = store.joined(1).value;
    CHECK(both.has_shape({10, 3}));
    CHECK(both.data == store.value(1).data);
    CHECK(store.joined_grad(1).has_shape({10, 3}));
    CHECK(store.joined_grad(1).data == store.grad(1).data);
    CHECK(store.joined(3).value.data == store.linear(3).value.data);
    CHECK(std::string(store.value(3).name) == "down");
    CHECK(store.value(0).has_shape({7}));
  }
}

TEST_CASE("joined vectors are contiguous, as one vector", "[params]") {
  ParamStore store;
  store.add({.name = "gate.bias", .shape = {5}, .init = Init::constant(0)});
  store.add({.name = "up.bias", .shape = {4}, .init = Init::constant(0), .joined = true});
  Memory memory(store, DType::bf16);
  CHECK(store.joined(0).value.has_shape({9}));
  CHECK(store.joined_grad(0).has_shape({9}));
  CHECK(address(store.value(1)) == address(store.joined(0).value) + 10);
  CHECK(address(store.grad(1)) == address(store.joined_grad(0)) + 20);
  CHECK_THROWS_WITH(ParamStore().add({.name = "first", .shape = {4}, .joined = true}),
                    Catch::Contains("joined needs a vector before it"));
}

TEST_CASE("padding between parameters stays zero, and zero_grads clears all gradients", "[params]") {
  ParamStore store = small_store();
  Memory memory(store, DType::f32);
  store.initialize(memory.context, 1);
  double in_parameters = 0, in_buffer = 0;
  for (ParamStore::Id id = 0; id < 4; ++id)
    for (int64_t i = 0; i < store.numel(id); ++i) in_parameters += std::abs(Pool::get(store.value(id), i));
  for (int64_t i = 0; i < store.flat_values().numel(); ++i)
    in_buffer += std::abs(Pool::get(store.flat_values(), i));
  CHECK(in_parameters > 7);
  CHECK(in_buffer == Approx(in_parameters).epsilon(1e-12));

  for (int64_t i = 0; i < store.flat_grads().numel(); ++i) Pool::set(store.flat_grads(), i, 3);
  store.zero_grads(memory.context);
  for (int64_t i = 0; i < store.flat_grads().numel(); ++i) REQUIRE(Pool::get(store.flat_grads(), i) == 0);
}

TEST_CASE("sums begin with their first product or at zero, whatever memory held", "[params]") {
  ParamStore store;
  ParamSpec matrix{.name = "gate", .shape = {5, 3}, .packed = true, .summed_by_products = true};
  store.add({.name = "norm", .shape = {7}, .init = Init::constant(1)});
  store.add(matrix);
  matrix.name = "up", matrix.joined = true;
  store.add(matrix);
  matrix.name = "down", matrix.joined = false;
  store.add(matrix);
  store.add({.name = "bias", .shape = {5}});
  Memory memory(store, DType::f32);
  for (int64_t i = 0; i < store.flat_grads().numel(); ++i) Pool::set(store.flat_grads(), i, 3);
  store.begin_sums(memory.context, 0);
  CHECK(Pool::get(store.grad(0), 6) == 0);
  CHECK(Pool::get(store.grad(4), 4) == 0);
  for (const ParamStore::Id id : {1, 2, 3})
    CHECK_THROWS_WITH(store.grad(id), Catch::Contains("its gradient has no value before its first product"));

  const ParamStore::Sum first = store.next_sum(1);
  CHECK(first.into == Into::overwrite);
  CHECK(first.to.has_shape({10, 3}));
  CHECK(store.grad(2).data == static_cast<char*>(first.to.data) + 15 * sizeof(float));
  for (int64_t i = 0; i < first.to.numel(); ++i) Pool::set(first.to, i, 5);
  CHECK(store.next_sum(1).into == Into::add);
  store.end_sums(memory.context, 0);
  double sum = 0;
  for (int64_t i = 0; i < store.flat_grads().numel(); ++i) sum += Pool::get(store.flat_grads(), i);
  CHECK(sum == 5 * 30);  // zero everywhere else, in the padding too
  CHECK(Pool::get(store.grad(3), 14) == 0);
  CHECK(store.next_sum(3).into == Into::add);

  store.begin_sums(memory.context, 0);  // and a step that ended early leaves nothing behind
  store.zero_grads(memory.context);
  CHECK(store.next_sum(1).into == Into::add);
}

TEST_CASE("a parameter's initial value depends only on the seed and its name", "[params]") {
  ParamStore a = small_store(), b;
  b.add({.name = "another", .shape = {100}, .init = Init::normal(1)});
  b.add({.name = "down", .shape = {3, 5}, .init = Init::normal(0.5)});
  Memory in_a(a, DType::f32), in_b(b, DType::f32);
  a.initialize(in_a.context, 42);
  b.initialize(in_b.context, 42);
  CHECK(std::memcmp(a.value(3).data, b.value(1).data, 15 * sizeof(float)) == 0);
  CHECK(std::memcmp(a.value(1).data, a.value(2).data, 15 * sizeof(float)) != 0);
  b.initialize(in_b.context, 43);
  CHECK(std::memcmp(a.value(3).data, b.value(1).data, 15 * sizeof(float)) != 0);
}

TEST_CASE("normal initial values have the right deviation for any threads and dtype", "[params]") {
  const int threads = num_threads();
  ParamStore wide, narrow, one_thread;
  for (ParamStore* store : {&wide, &narrow, &one_thread})
    store->add({.name = "w", .shape = {300, 200}, .init = Init::normal(0.02)});
  Memory w(wide, DType::f64), n(narrow, DType::bf16), o(one_thread, DType::f64);
  wide.initialize(w.context, 7);
  narrow.initialize(n.context, 7);
  set_num_threads(1);
  one_thread.initialize(o.context, 7);
  set_num_threads(threads);
  CHECK(std::memcmp(wide.value(0).data, one_thread.value(0).data, 60000 * sizeof(double)) == 0);
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < 60000; ++i) {
    const double x = Pool::get(wide.value(0), i);
    sum += x;
    squares += x * x;
    REQUIRE(Pool::get(narrow.value(0), i) == Approx(x).epsilon(1.0 / 256));
  }
  CHECK(std::abs(sum / 60000) < 4 * 0.02 / std::sqrt(60000.0));
  CHECK(std::sqrt(squares / 60000) == Approx(0.02).epsilon(0.02));
}

TEST_CASE("evaluation needs no gradients", "[params]") {
  ParamStore store = small_store();
  Memory memory(store, DType::f32, false);
  CHECK(store.flat_grads().empty());
  CHECK(store.grad(1).empty());
  CHECK(store.linear(3).packed_transposed.empty());
  store.initialize(memory.context, 1);
  store.pack(memory.context);
}

TEST_CASE("impossible parameters are refused by name", "[params]") {
  ParamStore store = small_store();
  CHECK_THROWS_WITH(store.add({.name = "norm", .shape = {3}}), Catch::Contains("norm is registered twice"));
  CHECK_THROWS_WITH(store.add({.name = "cube", .shape = {3, 3, 3}}), Catch::Contains("rank 1 or 2"));
  CHECK_THROWS_WITH(store.add({.name = "none", .shape = {0, 3}}), Catch::Contains("none"));
  CHECK_THROWS_WITH(store.add({.name = "wide", .shape = {2, 9}, .joined = true}), Catch::Contains("joined"));
  Memory memory(store, DType::f32);
  CHECK_THROWS_WITH(store.add({.name = "late", .shape = {3}}),
                    Catch::Contains("after the store was allocated"));
}

}  // namespace sluice
