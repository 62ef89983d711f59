// Which ranks belong together on each axis, for shapes that no training has yet.
#include "comm/mesh.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <stdexcept>

#include "comm/threads.h"

using namespace sluice;
using Catch::Contains;
using Ranks = std::vector<int>;

namespace {

constexpr MeshAxis kCoordinates[] = {MeshAxis::tensor, MeshAxis::context, MeshAxis::data, MeshAxis::pipeline};
/// Data and context together are divided into these as well.
constexpr MeshAxis kOfTokens[] = {MeshAxis::expert, MeshAxis::expert_data};

/// The coordinates that ranks of a group may differ in; all others are equal.
std::vector<MeshAxis> varies_on(MeshAxis axis) {
  if (axis == MeshAxis::world) return {std::begin(kCoordinates), std::end(kCoordinates)};
  if (axis == MeshAxis::tokens) return {MeshAxis::context, MeshAxis::data};
  return {axis};
}

bool together(const MeshLayout& layout, MeshAxis axis, int a, int b) {
  const std::vector<MeshAxis> varying = varies_on(axis);
  if (axis == MeshAxis::expert || axis == MeshAxis::expert_data) {
    const MeshAxis same = kOfTokens[axis == MeshAxis::expert];
    return together(layout, MeshAxis::tokens, a, b) &&
           layout.coordinate(same, a) == layout.coordinate(same, b);
  }
  for (const MeshAxis other : kCoordinates)
    if (std::count(varying.begin(), varying.end(), other) == 0 &&
        layout.coordinate(other, a) != layout.coordinate(other, b))
      return false;
  return true;
}

}  // namespace

TEST_CASE("ranks are numbered tensor fastest, then context, data and pipeline", "[comm]") {
  for (const int ranks : {8, 16, 32}) {
    for (const MeshShape& shape :
         {MeshShape{}, MeshShape{.tensor = 2, .pipeline = 2},
          MeshShape{.tensor = 2, .context = 2, .expert = 2},
          MeshShape{.context = 2, .expert = 2, .pipeline = 2},
          MeshShape{.tensor = 2, .context = 2, .expert = ranks / 8, .pipeline = 2}}) {
      const MeshLayout layout(ranks, shape);
      const int data_ranks = ranks / (shape.tensor * shape.context * shape.pipeline);
      int rank = 0;
      for (int pipeline = 0; pipeline < shape.pipeline; ++pipeline)
        for (int data = 0; data < data_ranks; ++data)
          for (int context = 0; context < shape.context; ++context)
            for (int tensor = 0; tensor < shape.tensor; ++tensor, ++rank) {
              INFO(rank << " of " << ranks);
              const int tokens = context + shape.context * data;
              CHECK(layout.coordinate(MeshAxis::world, rank) == rank);
              CHECK(layout.coordinate(MeshAxis::tensor, rank) == tensor);
              CHECK(layout.coordinate(MeshAxis::context, rank) == context);
              CHECK(layout.coordinate(MeshAxis::data, rank) == data);
              CHECK(layout.coordinate(MeshAxis::pipeline, rank) == pipeline);
              CHECK(layout.coordinate(MeshAxis::tokens, rank) == tokens);
              CHECK(layout.coordinate(MeshAxis::expert, rank) == tokens % shape.expert);
              CHECK(layout.coordinate(MeshAxis::expert_data, rank) == tokens / shape.expert);
            }
      CHECK(rank == ranks);
    }
  }
}

TEST_CASE("the groups of eight and of sixteen ranks", "[comm]") {
  const MeshLayout eight(8, {.tensor = 2, .expert = 2});
  CHECK(eight.group(MeshAxis::world, 5) == Ranks{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(eight.group(MeshAxis::tensor, 5) == Ranks{4, 5});
  CHECK(eight.group(MeshAxis::context, 5) == Ranks{5});
  CHECK(eight.group(MeshAxis::pipeline, 5) == Ranks{5});
  CHECK(eight.group(MeshAxis::data, 5) == Ranks{1, 3, 5, 7});
  CHECK(eight.group(MeshAxis::expert, 5) == Ranks{5, 7});
  CHECK(eight.group(MeshAxis::expert_data, 5) == Ranks{1, 5});

  const MeshLayout sixteen(16, {.tensor = 2, .context = 2, .expert = 2, .pipeline = 2});
  CHECK(sixteen.group(MeshAxis::tensor, 13) == Ranks{12, 13});
  CHECK(sixteen.group(MeshAxis::context, 13) == Ranks{13, 15});
  CHECK(sixteen.group(MeshAxis::pipeline, 13) == Ranks{5, 13});
  CHECK(sixteen.group(MeshAxis::data, 13) == Ranks{9, 13});
  CHECK(sixteen.group(MeshAxis::tokens, 13) == Ranks{9, 11, 13, 15});
  CHECK(sixteen.group(MeshAxis::expert, 13) == Ranks{13, 15});
  CHECK(sixteen.group(MeshAxis::expert_data, 13) == Ranks{9, 13});
}

TEST_CASE("every axis of a mesh has a communicator of exactly its ranks", "[comm]") {
  struct Case {
    int ranks;
    MeshShape shape;
  };
  const Case c = GENERATE(Case{1, {}}, Case{4, {}}, Case{4, {.expert = 4}}, Case{4, {.expert = 2}},
                          Case{8, {.tensor = 2, .expert = 2}}, Case{8, {.context = 2, .pipeline = 2}},
                          Case{8, {.tensor = 2, .context = 2, .pipeline = 2}},
                          Case{16, {.tensor = 2, .context = 2, .expert = 2, .pipeline = 2}});
  INFO(c.ranks << " ranks, tensor " << c.shape.tensor << ", context " << c.shape.context << ", expert "
               << c.shape.expert << ", pipeline " << c.shape.pipeline);
  run_thread_ranks(c.ranks, [&](Communicator& world) {
    const Mesh mesh(world, c.shape);
    const MeshLayout& layout = mesh.layout();
    const auto dry = make_dry_communicator(world.rank(), world.size());
    const Mesh planned(*dry, c.shape);
    for (int i = 0; i < kMeshAxes; ++i) {
      const auto axis = static_cast<MeshAxis>(i);
      Communicator& part = mesh.on(axis);
      const int rank = world.rank();
      Ranks members(static_cast<size_t>(part.size())), expected;
      part.all_gather(members.data(), &rank, sizeof rank);
      for (int r = 0; r < world.size(); ++r)
        if (together(layout, axis, rank, r)) expected.push_back(r);
      if (members != expected || layout.group(axis, rank) != expected ||
          part.rank() != layout.coordinate(axis, rank) || planned.on(axis).size() != part.size() ||
          planned.on(axis).rank() != part.rank())
        throw std::runtime_error(fmt::format("rank {}, axis {}: {} instead of {}", rank, i,
                                             fmt::join(members, " "), fmt::join(expected, " ")));
    }
    if (&mesh.world() != &world) throw std::runtime_error("the world is another");
  });
}

TEST_CASE("ranks that a shape does not divide are refused", "[comm]") {
  CHECK_THROWS_WITH(MeshLayout(6, {.expert = 4}),
                    "parallel.expert = 4: 6 ranks cannot be divided into groups of that size");
  CHECK_THROWS_WITH(MeshLayout(1, {.expert = 2}),
                    "parallel.expert = 2: 1 rank cannot be divided into groups of that size");
  CHECK_THROWS_WITH(MeshLayout(8, {.tensor = 2, .expert = 3}),
                    "parallel.expert = 3: 4 ranks cannot be divided into groups of that size");
  CHECK_THROWS_WITH(
      MeshLayout(12, {.tensor = 2, .context = 2, .pipeline = 2}),
      Contains("tensor = 2, context = 2, pipeline = 2: 12 ranks cannot be divided into groups of 8"));
  CHECK_THROWS_WITH(MeshLayout(8, {}).coordinate(MeshAxis::data, 8), "MeshLayout: rank 8 of 8");
}
