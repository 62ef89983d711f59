#include "core/arena.h"

#include <catch2/catch.hpp>
#include <cstring>
#include <string>

using namespace sluice;

namespace {

/// The allocations of a step: named and temporary ones, which are released.
void use(Arena& arena) {
  arena.alloc("weights", DType::f32, {3, 5});
  arena.alloc("tokens", DType::i32, {1});
  {
    ScratchScope scope(arena);
    scope.alloc("wide", DType::f64, {100, 7});
    ScratchScope inner(arena);
    inner.alloc("narrow", DType::bf16, {13});
  }
  arena.alloc("mask", DType::u8, {65});
  arena.alloc("nothing", DType::f32, {0, 4});
}

std::string message(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

}  // namespace

TEST_CASE("an arena's tensors are aligned, zeroed, disjoint and named", "[arena]") {
  Arena arena("model", 1 << 16);
  CHECK_FALSE(arena.measuring());
  const Tensor a = arena.alloc("a", DType::bf16, {3, 7}), b = arena.alloc("b", DType::f64, {2, 2, 2});
  for (const Tensor& t : {a, b}) {
    CHECK(reinterpret_cast<uintptr_t>(t.data) % 64 == 0);
    for (int64_t i = 0; i < t.bytes(); ++i) CHECK(static_cast<const char*>(t.data)[i] == 0);
  }
  CHECK(static_cast<char*>(b.data) >= static_cast<char*>(a.data) + a.bytes());
  CHECK(std::string(a.name) == "a");
  CHECK(a.describe() == "(3, 7) bf16");
  REQUIRE(arena.entries().size() == 2);
  CHECK(arena.entries()[1].name == "b");
  CHECK(arena.entries()[1].tensor.data == b.data);
  CHECK(arena.entries()[1].offset == 64);
}

TEST_CASE("a measuring arena reports exactly what a real one uses", "[arena]") {
  Arena measure("measure");
  CHECK(measure.measuring());
  use(measure);
  CHECK(measure.alloc("extra", DType::f32, {4}).data == nullptr);
  Arena real("real", measure.high_water());
  use(real);
  CHECK(real.alloc("extra", DType::f32, {4}).data != nullptr);
  CHECK(real.high_water() == measure.high_water());
  CHECK(real.used() == measure.used());
  REQUIRE(real.entries().size() == measure.entries().size());
  for (size_t i = 0; i < real.entries().size(); ++i) {
    CHECK(real.entries()[i].name == measure.entries()[i].name);
    CHECK(real.entries()[i].offset == measure.entries()[i].offset);
  }
  // One cache line less does not suffice.
  Arena tight("tight", measure.high_water() - 64);
  CHECK_THROWS_AS(use(tight), Error);
}

TEST_CASE("rewinding frees memory, drops names, and keeps the high-water mark", "[arena]") {
  Arena arena("a", 4096);
  arena.alloc("kept", DType::f32, {16});
  const int64_t mark = arena.mark();
  const Tensor first = arena.alloc("dropped", DType::f32, {100});
  CHECK(arena.entries().size() == 2);
  const int64_t high = arena.high_water();
  arena.rewind(mark);
  CHECK(arena.entries().size() == 1);
  CHECK(arena.used() == mark);
  CHECK(arena.high_water() == high);
  CHECK(arena.alloc("again", DType::f32, {100}).data == first.data);
  {
    ScratchScope scope(arena);
    const Tensor t = scope.alloc("t", DType::bf16, {2, 3}), other = scope.like("other", t);
    CHECK(other.describe() == t.describe());
    CHECK(other.data != t.data);
    CHECK(std::string(other.name) == "other");
    CHECK(arena.entries().size() == 2);  // temporaries are not listed
  }
  CHECK(arena.used() == mark + 448);
}

TEST_CASE("a full arena reports its name, the tensor and the sizes", "[arena]") {
  Arena arena("activations", 256);
  arena.alloc("first", DType::f32, {16});
  CHECK(message([&] { arena.alloc("second", DType::f32, {1000}); }) ==
        "arena activations: second needs 4032 bytes, 192 of 256 are free");
  CHECK(arena.used() == 64);
  CHECK(message([&] { Arena(std::string("bad"), -1); }) == "arena bad: capacity -1");
}

TEST_CASE("an allocation larger than the machine's memory is refused by name", "[arena]") {
  try {
    Arena arena("moon", int64_t{1} << 60);
    FAIL("an exbibyte was granted");
  } catch (const Error& e) {
    CHECK(e.code() == ExitCode::out_of_memory);
    CHECK(std::string(e.what()) == "out of memory: arena 'moon' needs 1073741824.00 GiB");
  }
}

TEST_CASE("what no machine can hold is refused while it is measured", "[arena]") {
  const int64_t many = int64_t{1} << 31;
  const std::string too_many =
      "would be needed; the model, data.seq_len or train.micro_batch_size is too large";
  Arena sum("weights", 0);
  CHECK(sum.measuring());
  // Of 2^56 bytes each: the sum of 200 overflows.
  std::string refused = "no error";
  for (int i = 0; i < 200 && refused == "no error"; ++i)
    refused = message([&] { sum.alloc("t" + std::to_string(i), DType::f32, {many, many / 256}); });
  CHECK(refused == "arena weights: with t4 more than 2^58 bytes (256 PiB) " + too_many);
  CHECK(sum.used() == int64_t{1} << 58);
  // The product of the dimensions overflows to 0.
  Arena product("activations", 0);
  CHECK(message([&] {
          product.alloc("t", DType::f64, {many, many, 4});
        }) == "arena activations: with t more than 2^58 bytes (256 PiB) " + too_many);
  CHECK(message([&] {
          product.alloc_temporary("t", DType::bf16, {many, many, many});
        }) == "arena activations: with t more than 2^58 bytes (256 PiB) " + too_many);
  CHECK(product.alloc("empty", DType::f32, {0, many, many}).numel() == 0);
}

TEST_CASE("a moved arena keeps its tensors", "[arena]") {
  Arena arena("a", 4096);
  const Tensor t = arena.alloc("t", DType::f32, {4});
  t.as<float>()[3] = 5;
  const Arena moved(std::move(arena));
  CHECK(moved.used() == 64);
  CHECK(t.as<float>()[3] == 5);
  CHECK(std::string(moved.entries()[0].name) == t.name);
}
