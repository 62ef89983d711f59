#include "comm/mesh.h"

#include <initializer_list>
#include <utility>

namespace sluice {

Mesh::Mesh(Communicator& world, const MeshShape& shape) : shape_(shape), world_(world) {
  for (const auto& [name, ranks] : std::initializer_list<std::pair<const char*, int>>{
           {"tensor", shape.tensor}, {"context", shape.context}, {"pipeline", shape.pipeline}})
    if (ranks != 1)
      fail(ExitCode::usage, "parallel.{} = {} is not available in this version; use 1", name, ranks);
  if (shape.expert < 1 || world.size() % shape.expert != 0)
    fail(ExitCode::usage, "parallel.expert = {}: {} rank{} cannot be cut into groups of that many",
         shape.expert, world.size(), world.size() == 1 ? "" : "s");
  expert_ = world.axis(1, shape.expert);
  expert_data_ = world.axis(shape.expert, world.size() / shape.expert);
}

}  // namespace sluice
