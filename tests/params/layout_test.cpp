#include "params/layout.h"

#include <catch2/catch.hpp>
#include <set>

namespace sluice {
namespace {

/// Two units with experts in the second, and a frozen parameter in each.
std::vector<ParamSpec> specs() {
  std::vector<ParamSpec> specs = {
      {.name = "embed", .shape = {10, 7}},   {.name = "frozen", .shape = {33}},
      {.name = "norm", .shape = {5}},        {.name = "gate", .shape = {3, 3}},
      {.name = "up", .shape = {3, 3}},       {.name = "expert", .shape = {9, 9}},
      {.name = "frozen too", .shape = {40}}, {.name = "expert down", .shape = {9, 3}}};
  for (size_t i = 2; i < specs.size(); ++i) specs[i].unit = 1;
  specs[4].joined = true;
  specs[5].split.axis = specs[7].split.axis = SplitAxis::expert;
  specs[1].trainable = specs[6].trainable = false;
  return specs;
}

}  // namespace

TEST_CASE("units are in ascending order, replicated parameters before experts, joined parameters contiguous",
          "[params]") {
  const FlatLayout flat(specs(), {});
  REQUIRE(flat.units().size() == 2);
  CHECK(flat.offset(0) == 0);
  CHECK(flat.offset(2) == 96);  // behind 70 elements
  CHECK(flat.offset(3) == 96 + 32);
  CHECK(flat.offset(4) == 96 + 32 + 9);  // joined
  CHECK(flat.offset(5) == 96 + 64);      // the experts' bucket
  CHECK(flat.offset(7) == 96 + 64 + 96);
  CHECK(flat.unit(1).begin == 96);
  CHECK(flat.unit(1).expert_begin == 160);
  CHECK(flat.unit(1).experts() == 128);
  CHECK(flat.size() == 288);
  REQUIRE(flat.buckets().size() == 3);
  CHECK(flat.buckets()[2].split == SplitAxis::expert);
  // Frozen parameters lie by themselves, and in no bucket.
  CHECK(flat.frozen().ids == std::vector<ParamId>{1, 6});
  CHECK(flat.offset(1) == 0);
  CHECK(flat.offset(6) == 64);
  CHECK(flat.frozen().end == 104);
}

TEST_CASE("the ranks' shards are equal parts of each bucket and together cover every element once",
          "[params]") {
  const std::vector<ParamSpec> all = specs();
  const FlatLayout flat(all, {.dense_ranks = 4, .expert_ranks = 2});
  std::vector<std::set<int64_t>> held(all.size());
  for (int rank = 0; rank < 4; ++rank) {
    int64_t at = 0;
    for (const BucketPiece& piece : flat.pieces(rank, rank / 2)) {
      const int ranks = piece.of.split == SplitAxis::expert ? 2 : 4;
      CHECK(piece.count * ranks == piece.of.end - piece.of.begin);
      CHECK(piece.count % 32 == 0);
      CHECK(piece.at == at);
      at += piece.count;
      if (piece.of.split == SplitAxis::expert && rank % 2 == 1) continue;  // of the same experts as rank - 1
      for (const PieceSlice& slice : flat.slices(piece))
        for (int64_t i = 0; i < slice.count; ++i) {
          CHECK(piece.begin + slice.at == flat.offset(slice.id) + slice.begin);
          CHECK(held[static_cast<size_t>(slice.id)].insert(slice.begin + i).second);
        }
    }
  }
  for (size_t i = 0; i < all.size(); ++i)
    CHECK(std::ssize(held[i]) == (all[i].trainable ? all[i].numel() : 0));
}

}  // namespace sluice
