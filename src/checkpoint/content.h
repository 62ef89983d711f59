#pragma once
// What a checkpoint holds: the tensors and texts that one rank writes or reads, and what is known of a
// checkpoint on disk.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace sluice {

struct NamedTensor {
  std::string name;
  Tensor tensor;  // what is held here of it
  std::vector<int64_t> shape =
      {};             // of the whole, where `tensor` (rank 1) is a slice of it; empty: it is the whole
  int64_t begin = 0;  // first element of the slice, in the whole's row-major order
};

inline bool is_slice(const NamedTensor& t) { return !t.shape.empty(); }
/// Shape of the whole.
std::vector<int64_t> whole_shape(const NamedTensor& t);
/// Contract check: a slice is rank 1 and lies within its whole.
void check_slice(const NamedTensor& t);

/// What one rank writes of a checkpoint, or reads. Together the ranks hold every tensor exactly once. Tensors
/// are views of live memory. What is not a tensor is rank 0's; the other ranks' is not looked at.
struct CheckpointContent {
  int64_t step = 0;
  std::vector<NamedTensor> weights;    // model.safetensors: whole tensors
  std::vector<NamedTensor> optimizer;  // optim.safetensors: NAME.m, NAME.v, NAME.master, whole or slices
  nlohmann::json state;                // state.json: counters, spike window, skip list, data fingerprint
  std::string config_yaml;             // the resolved configuration
  nlohmann::json hf_config;            // config.json
  std::string tokenizer_model = {};    // tokenizer.model; empty: the tokenizer is built in
};

/// A checkpoint on disk whose manifest and checksums hold.
struct CheckpointInfo {
  std::string path;
  int64_t step = 0;
  nlohmann::json state;
  std::string config_yaml;
  std::string tokenizer_model =
      {};  // path of its copy; empty: built in, or written before checkpoints held one
};

/// A tensor of a model, wherever its values are.
struct TensorShape {
  std::string name;
  std::vector<int64_t> shape;
  DType dtype = DType::f32;
};
/// Everything a checkpoint of a training holds, whoever holds it.
struct WholeModel {
  std::vector<TensorShape> weights, optimizer;
};

}  // namespace sluice
