#pragma once
// Are two checkpoints the same, bit for bit? If not, where does it begin? Whole tensors are compared, whoever
// wrote them: what eight ranks saved in slices against what one rank saved.
#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

struct TensorDifference {
  std::string name;
  std::string problem;              // only in one of them, other shape or type; empty when values differ
  int64_t elements = 0;             // of the tensor
  int64_t differing = 0;            // elements whose bits differ
  int64_t first = 0;                // index of the first of them
  double value_a = 0, value_b = 0;  // there (floating-point types)
  double largest = 0;               // largest |a - b| (floating-point types)
};

struct Comparison {
  int64_t tensors = 0;                        // compared
  int64_t elements = 0;                       // compared
  std::vector<TensorDifference> differences;  // weights first, in order of the model
  int64_t differing_elements() const;
};

/// Whether the tensor named a comes before that named b in a model: embedding, layers by number and each as
/// it computes, final norm, head; names of other kinds last, by their letters.
bool before_in_model(const std::string& a, const std::string& b);

/// Compares the weights, and the optimizer state where both have one. Each path is a checkpoint, a folder
/// with model.safetensors or its shards and their index, or a .safetensors file. Errors as the reader's.
Comparison compare_checkpoints(const std::string& a, const std::string& b);

}  // namespace sluice
