#include "params/packed.h"

#include <catch2/catch.hpp>

#include "params/param_store.h"

namespace sluice {
namespace {

/// A store whose values are kept whole, or brought unit by unit.
ParamStore store_of(bool whole, Arena& values, Arena& gradients) {
  ParamStore store;
  store.add({.name = "head", .shape = {64, 32}, .packed = true});
  store.begin_unit(1);
  store.add({.name = "gate", .shape = {64, 32}, .packed = true});
  store.add({.name = "up", .shape = {64, 32}, .packed = true, .joined = true});
  store.add({.name = "plain", .shape = {64, 32}});
  store.begin_unit(2);
  store.add({.name = "other", .shape = {64, 32}, .packed = true});
  Context dry(0);
  store.allocate(dry, DType::bf16, 64, values, &gradients, {.whole_values = whole});
  return store;
}

int64_t bytes_named(const Arena& arena, const std::string& part) {
  int64_t bytes = 0;
  for (const Arena::Entry& entry : arena.entries())
    if (entry.name.find(part) != std::string::npos) bytes += entry.tensor.bytes();
  return bytes;
}

}  // namespace

TEST_CASE("packed copies belong to the first of a joined group, and only to matrices of products",
          "[params]") {
  Arena values("values"), gradients("gradients");
  const ParamStore store = store_of(true, values, gradients);
  CHECK(store.joined(2).packed.empty());
  CHECK(store.joined(3).packed.empty());
  CHECK(store.joined(1).packed.bytes() == 2 * store.joined(0).packed.bytes());
  CHECK(store.joined(0).packed_transposed.bytes() == store.joined(4).packed_transposed.bytes());
}

TEST_CASE("matrices joined in backward have forward copies each, and transposed ones as a group",
          "[params]") {
  for (const bool whole : {true, false}) {
    ParamStore store;
    store.add({.name = "q", .shape = {64, 32}, .packed = true, .joined_in_backward = true});
    store.add({.name = "k", .shape = {32, 32}, .packed = true, .joined = true, .joined_in_backward = true});
    store.add({.name = "alone", .shape = {96, 32}, .packed = true});
    Arena values("values"), gradients("gradients");
    Context dry(0);
    store.allocate(dry, DType::bf16, 64, values, &gradients, {.whole_values = whole});
    CHECK(store.joined(0).value.has_shape({96, 32}));
    CHECK(store.joined(0).packed.empty());
    CHECK(store.joined(0).packed_transposed.bytes() == store.linear(2).packed_transposed.bytes());
    CHECK(store.linear(0).packed.bytes() + store.linear(1).packed.bytes() == store.linear(2).packed.bytes());
    for (const ParamStore::Id id : {0, 1}) {
      CHECK(store.linear(id).packed_transposed.empty());
      CHECK(store.linear(id).joined_in_backward);
    }
  }
}

TEST_CASE("copies that are loaded per unit share the memory of one unit", "[params]") {
  Arena values("values"), gradients("gradients");
  const ParamStore store = store_of(false, values, gradients);
  // Two places for blocks, of the larger one's size, and one for what lies around them.
  int64_t block = 0, around = 0;
  for (const ParamStore::Id id : {0, 1}) {
    int64_t& bytes = id == 0 ? around : block;
    for (const Tensor& t : {store.joined(id).packed, store.joined(id).packed_transposed})
      bytes += (t.bytes() + 63) / 64 * 64;
  }
  CHECK(bytes_named(values, "packed weights of a unit") == 2 * block + around);
  CHECK(bytes_named(values, ".packed") == 0);
}

}  // namespace sluice
