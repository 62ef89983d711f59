#pragma once
// A state of tensors that many ranks save and load with arbitrary sharding.
#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "checkpoint/store.h"

namespace sluice::test {

/// Every value follows from the step.
struct ShardedState {
  struct Whole {
    std::string name;
    DType dtype;
    std::vector<int64_t> shape;
    std::vector<char> bytes;
    int64_t elements() const { return std::ssize(bytes) / dtype_size(dtype); }
  };
  int64_t step;
  std::vector<Whole> weights, optimizer;

  explicit ShardedState(int64_t step_) : step(step_) {
    uint32_t x = static_cast<uint32_t>(step) * 2654435761u + 12345u;
    const auto add = [&](std::vector<Whole>& to, const std::string& name, DType dtype,
                         std::vector<int64_t> shape) {
      int64_t n = 1;
      for (const int64_t dim : shape) n *= dim;
      std::vector<char> bytes(static_cast<size_t>(n * dtype_size(dtype)));
      for (int64_t i = 0; i < n; ++i) {
        x = x * 1664525u + 1013904223u;
        const float value = static_cast<float>(static_cast<int32_t>(x)) * 0x1p-20f;
        const double wide = static_cast<double>(value) / 3;
        const bf16 narrow(value);
        const void* from = dtype == DType::f32   ? static_cast<const void*>(&value)
                           : dtype == DType::f64 ? static_cast<const void*>(&wide)
                                                 : static_cast<const void*>(&narrow);
        std::memcpy(bytes.data() + i * dtype_size(dtype), from, static_cast<size_t>(dtype_size(dtype)));
      }
      to.push_back({name, dtype, std::move(shape), std::move(bytes)});
    };
    const std::pair<const char*, std::vector<int64_t>> model[] = {
        {"model.embed_tokens.weight", {7, 5}},
        {"model.layers.2.mlp.up_proj.weight", {6, 4}},
        {"model.layers.10.mlp.up_proj.weight", {3, 2, 4}},
        {"model.norm.weight", {5}}};
    for (const auto& [name, shape] : model) {
      add(weights, name, DType::bf16, shape);
      add(optimizer, std::string(name) + ".m", DType::f32, shape);
      add(optimizer, std::string(name) + ".v", DType::f64, shape);
    }
  }
  /// Another state of the same shapes with arbitrary content.
  ShardedState blank() const {
    ShardedState other = *this;
    for (auto* tensors : {&other.weights, &other.optimizer})
      for (Whole& w : *tensors) std::fill(w.bytes.begin(), w.bytes.end(), '\x5a');
    return other;
  }
  std::string bits() const {
    std::string all;
    for (const auto* tensors : {&weights, &optimizer})
      for (const Whole& w : *tensors) all.append(w.bytes.data(), w.bytes.size());
    return all;
  }
  WholeModel model() const {
    WholeModel all;
    for (const Whole& w : weights) all.weights.push_back({w.name, w.shape, w.dtype});
    for (const Whole& w : optimizer) all.optimizer.push_back({w.name, w.shape, w.dtype});
    return all;
  }
};

/// The sharding: tensors of `weights`, then of `optimizer`.
struct Cut {
  int rank;
  size_t tensor;
  int64_t begin, count;  // elements; count -1: a whole tensor
};
struct Layout {
  int ranks;
  std::vector<Cut> cuts;
};

/// Some tensors whole, others in up to five slices, some of them empty, assigned to ranks at random.
inline Layout random_layout(std::mt19937& random, const ShardedState& state, int ranks, bool slice_weights) {
  Layout layout{ranks, {}};
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (size_t i = 0; i < state.weights.size() + state.optimizer.size(); ++i) {
    const bool weight = i < state.weights.size();
    const int64_t n = (weight ? state.weights[i] : state.optimizer[i - state.weights.size()]).elements();
    if ((weight && !slice_weights) || below(4) == 0) {
      layout.cuts.push_back({static_cast<int>(below(ranks)), i, 0, -1});
      continue;
    }
    std::vector<int64_t> at = {0, n};
    for (int64_t k = below(5); k > 0; --k) at.push_back(below(n + 1));
    std::sort(at.begin(), at.end());
    for (size_t k = 0; k + 1 < at.size(); ++k)
      if (at[k + 1] > at[k] ||
          below(3) == 0)  // two empty slices at one offset would request the same tensor twice
        layout.cuts.push_back({static_cast<int>(below(ranks)), i, at[k], at[k + 1] - at[k]});
  }
  std::shuffle(layout.cuts.begin(), layout.cuts.end(), random);
  return layout;
}

/// Every optimizer tensor in equal slices, weights assigned in turn, as training shards them.
inline Layout even_layout(const ShardedState& state, int ranks) {
  Layout layout{ranks, {}};
  for (size_t i = 0; i < state.weights.size(); ++i)
    layout.cuts.push_back({static_cast<int>(i) % ranks, i, 0, -1});
  for (size_t i = 0; i < state.optimizer.size(); ++i)
    for (int64_t r = 0, n = state.optimizer[i].elements(); r < ranks; ++r)
      layout.cuts.push_back({static_cast<int>(r), state.weights.size() + i, n * r / ranks,
                             n * (r + 1) / ranks - n * r / ranks});
  return layout;
}

/// The content of one rank of a layout, as views of the state.
inline CheckpointContent content_of(ShardedState& state, const Layout& layout, int rank) {
  CheckpointContent content;
  content.step = state.step;
  for (const Cut& cut : layout.cuts) {
    if (cut.rank != rank) continue;
    const bool weight = cut.tensor < state.weights.size();
    ShardedState::Whole& w =
        weight ? state.weights[cut.tensor] : state.optimizer[cut.tensor - state.weights.size()];
    NamedTensor t{w.name, Tensor(w.bytes.data() + std::max<int64_t>(cut.count < 0 ? 0 : cut.begin, 0) *
                                                      dtype_size(w.dtype),
                                 w.dtype, {cut.count})};
    if (cut.count < 0) {
      t.tensor.rank = static_cast<int>(w.shape.size());
      std::copy(w.shape.begin(), w.shape.end(), t.tensor.shape.begin());
    } else {
      t.shape = w.shape;
      t.begin = cut.begin;
    }
    (weight ? content.weights : content.optimizer).push_back(std::move(t));
  }
  if (rank > 0) return content;
  content.state = {{"step", state.step}};
  content.config_yaml = "name: toy\n";
  content.hf_config = {{"model_type", "toy"}};
  return content;
}

inline CheckpointConfig checkpoint_config_of(bool async, double timeout_seconds = 20) {
  CheckpointConfig config;
  config.async = async;
  config.timeout_seconds = timeout_seconds;
  return config;
}

}  // namespace sluice::test
