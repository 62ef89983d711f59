#pragma once
// The indexer's arguments on a GPU (ops/indexer.h), as its kernels take them.
#include "attention/visible_keys.cuh"
#include "common/math.cuh"
#include "ops/indexer.h"

namespace sluice::cuda {

template <class T>
struct Index {
  const T *q, *k, *w, *bias, *w_bias;  // w, bias, w_bias: or null
  const int* first_key;                // counted among the keys
  OwnKeys own;
  int64_t queries, keys;
  int heads, depth, sets, block;
  float scale;
  bool by_sigmoid, weights_by_sigmoid;  // activation and head weights: sigmoid, or ReLU and linear

  DEVICE_INLINE int per_set() const { return heads / sets; }
  DEVICE_INLINE int last(int64_t t) const { return own.of(t); }
  /// The number of blocks that query t can choose from; the i-th begins at first_key[t] + i block.
  DEVICE_INLINE int candidates(int64_t t) const {
    const int before = last(t) - first_key[t];
    return block == 1 ? before + 1 : before / block;
  }
  /// An index head's activation, where NaN stays NaN, and its slope by its value.
  DEVICE_INLINE float activate(float u) const {
    if (by_sigmoid) return sigmoid(u);
    return u <= 0 ? 0.0f : u;
  }
  DEVICE_INLINE float slope(float u, float value) const {
    return by_sigmoid ? value * (1.0f - value) : u > 0 ? 1.0f : 0.0f;
  }
  DEVICE_INLINE float head_weight(int64_t t, int head) const {
    if (!w) return 1;
    const float x = to_float(w[t * heads + head]) + (w_bias ? to_float(w_bias[head]) : 0.0f);
    return weights_by_sigmoid ? sigmoid(x) : x;
  }
  DEVICE_INLINE float bias_of(int head) const { return bias ? to_float(bias[head]) : 0.0f; }
};

template <class T>
Index<T> index_of(const IndexInputs& in, const VisibleKeys& visible) {
  Index<T> x = {};
  x.q = device_data<T>(in.q), x.k = device_data<T>(in.k);
  x.w = in.w ? device_data<T>(in.w) : nullptr;
  x.bias = in.bias ? device_data<T>(in.bias) : nullptr;
  x.w_bias = in.w_bias ? device_data<T>(in.w_bias) : nullptr;
  x.first_key = visible.first, x.own = visible.own;
  x.queries = in.q.dim(0), x.keys = in.k.dim(0);
  x.heads = static_cast<int>(in.q.dim(1)), x.depth = static_cast<int>(in.q.dim(2));
  x.sets = static_cast<int>(in.sets), x.block = static_cast<int>(in.block);
  x.scale = static_cast<float>(in.scale);
  x.by_sigmoid = in.activation == IndexActivation::sigmoid;
  x.weights_by_sigmoid = in.head_weights == IndexHeadWeights::sigmoid;
  return x;
}

/// The most blocks that a query can choose from.
inline int64_t most_candidates(const IndexInputs& in) { return (in.k.dim(0) + in.block - 1) / in.block; }

constexpr int64_t kSecondCacheBytes = int64_t{32} << 20;

/// How many queries to take at a time, so that `row_bytes` for each are not more than `bytes`; 64 at least.
inline int64_t queries_at_once(int64_t queries, int64_t row_bytes, int64_t bytes = kSecondCacheBytes) {
  const int64_t n = bytes / (row_bytes > 0 ? row_bytes : 1) / 64 * 64;
  return n < 64 ? (queries < 64 ? queries : 64) : n < queries ? n : queries;
}

/// x (1) of any floating dtype, in a kernel.
struct Scalar {
  const void* data = nullptr;
  DType dtype = DType::f32;
  Scalar() = default;
  explicit Scalar(const Tensor& t) : data(t ? t.data : nullptr), dtype(t ? t.dtype : DType::f32) {}
  DEVICE_INLINE double value(double otherwise) const {
    if (!data) return otherwise;
    if (dtype == DType::f64) return *static_cast<const double*>(data);
    if (dtype == DType::f32) return static_cast<double>(*static_cast<const float*>(data));
    return static_cast<double>(to_float(*static_cast<const nv_bf16*>(data)));
  }
};

}  // namespace sluice::cuda
