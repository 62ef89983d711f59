#pragma once
// Bitwise comparison of two checkpoints and the first difference. Whole tensors are compared, whatever their
// layout in files: slices saved by eight ranks compare with tensors saved by one rank.
#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct TensorDifference {
  std::string name;
  std::string problem;              // present in only one, or another shape or type; empty if values differ
  int64_t elements = 0;             // of the tensor
  int64_t differing = 0;            // elements whose bits differ
  int64_t first = 0;                // index of the first one
  double value_a = 0, value_b = 0;  // values at that index (floating-point types)
  double largest = 0;               // largest |a - b| (floating-point types)
};

struct Comparison {
  int64_t tensors = 0;                        // compared
  int64_t elements = 0;                       // compared
  std::vector<TensorDifference> differences;  // weights first, in order of the model
  int64_t differing_elements() const;
};

/// Whether tensor a comes before tensor b in the model: embedding, layers by number in order of computation,
/// final norm, output head; unknown names last, in alphabetical order.
bool before_in_model(const std::string& a, const std::string& b);

/// Compares the weights, and the optimizer state if both have one. Each path is a checkpoint, a folder with
/// model.safetensors or its shards and their index, or a .safetensors file. Throws what reading them throws.
Comparison compare_checkpoints(const std::string& a, const std::string& b);

}  // namespace sluice
