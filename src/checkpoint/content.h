#pragma once
// The content of a checkpoint: the tensors and texts that one rank writes or reads, and the description of a
// checkpoint on disk.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace sluice {

struct NamedTensor {
  std::string name;
  Tensor tensor;  // the part held by this rank
  std::vector<int64_t> shape =
      {};             // of the whole tensor if `tensor` is a slice (rank 1) of it; empty if it is the whole
  int64_t begin = 0;  // first element of the slice, in the whole's row-major order
};

inline bool is_slice(const NamedTensor& t) { return !t.shape.empty(); }
/// Shape of the whole tensor.
std::vector<int64_t> whole_shape(const NamedTensor& t);
/// Contract check: a slice has rank 1 and lies within the whole tensor.
void check_slice(const NamedTensor& t);

/// The part of a checkpoint that one rank writes or reads. Together the ranks hold every element exactly
/// once. Tensors are views of live memory. Everything that is not a tensor is taken from rank 0 only.
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
  std::string tokenizer_model = {};  // path of the copy; empty: built in, or a checkpoint of an older version
};

/// Name, type and shape of a tensor of the model.
struct TensorShape {
  std::string name;
  std::vector<int64_t> shape;
  DType dtype = DType::f32;
};
/// All tensors of a training checkpoint, over all ranks.
struct WholeModel {
  std::vector<TensorShape> weights, optimizer;
};

}  // namespace sluice
