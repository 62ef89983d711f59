#include "comm/mesh.h"

namespace sluice {

MeshLayout::MeshLayout(int ranks, const MeshShape& shape) : ranks_(ranks), shape_(shape) {
  SLUICE_CHECK(ranks > 0 && shape.tensor > 0 && shape.context > 0 && shape.pipeline > 0,
               "MeshLayout: {} ranks, tensor {}, context {}, pipeline {}", ranks, shape.tensor, shape.context,
               shape.pipeline);
  const char* plural = ranks == 1 ? "" : "s";
  const int model = shape.tensor * shape.context * shape.pipeline;
  if (ranks % model != 0)
    fail(ExitCode::usage,
         "parallel.tensor = {}, context = {}, pipeline = {}: {} rank{} cannot be divided into groups of {}",
         shape.tensor, shape.context, shape.pipeline, ranks, plural, model);
  const int tokens = ranks / (shape.tensor * shape.pipeline);
  if (shape.expert < 1 || tokens % shape.expert != 0)
    fail(ExitCode::usage, "parallel.expert = {}: {} rank{} cannot be divided into groups of that size",
         shape.expert, tokens, tokens == 1 ? "" : "s");
}

MeshLayout::Span MeshLayout::span(MeshAxis axis) const {
  const auto& [tensor, context, expert, pipeline] = shape_;
  const int tokens = ranks_ / (tensor * pipeline);  // ranks that compute different tokens
  switch (axis) {
    case MeshAxis::world:
      return {1, ranks_};
    case MeshAxis::tensor:
      return {1, tensor};
    case MeshAxis::context:
      return {tensor, context};
    case MeshAxis::pipeline:
      return {tensor * tokens, pipeline};
    case MeshAxis::tokens:
      return {tensor, tokens};
    case MeshAxis::data:
      return {tensor * context, tokens / context};
    case MeshAxis::expert:
      return {tensor, expert};
    case MeshAxis::expert_data:
      return {tensor * expert, tokens / expert};
  }
  fail(ExitCode::internal, "unknown mesh axis");
}

int MeshLayout::coordinate(MeshAxis axis, int rank) const {
  SLUICE_CHECK(rank >= 0 && rank < ranks_, "MeshLayout: rank {} of {}", rank, ranks_);
  const Span s = span(axis);
  return rank / s.stride % s.size;
}

std::vector<int> MeshLayout::group(MeshAxis axis, int rank) const {
  const Span s = span(axis);
  const int first = rank - coordinate(axis, rank) * s.stride;
  std::vector<int> ranks;
  for (int i = 0; i < s.size; ++i) ranks.push_back(first + i * s.stride);
  return ranks;
}

Mesh::Mesh(Communicator& world, const MeshShape& shape) : layout_(world.size(), shape) {
  Communicator* alone = nullptr;
  const auto part = [&](MeshLayout::Span span) {
    return parts_.emplace_back(world.axis(span.stride, span.size)).get();
  };
  for (int i = 0; i < kMeshAxes; ++i) {
    const MeshLayout::Span span = layout_.span(static_cast<MeshAxis>(i));
    Communicator*& axis = axes_[static_cast<size_t>(i)];
    if (span.size == world.size())
      axis = &world;
    else if (span.size > 1)
      axis = part(span);
    else
      axis = alone = alone ? alone : part(span);
  }
}

}  // namespace sluice
