#pragma once
#include "nn/transformer.h"

namespace sluice {

/// The four parts of a tensor (4, T) i32.
inline Batch batch_of(const Tensor& samples) {
  const auto part = [&](int64_t i) { return samples.rows(i, 1).view({samples.dim(1)}); };
  return {part(0), part(1), part(2), part(3)};
}

/// Buffers of a forward pass with losses: one micro-batch, its activations and losses. The host fills `host`
/// and uploads it; on a CPU both are the same memory.
struct ForwardBuffers {
  Tensor samples, host_samples;  // (4, T) i32: tokens, targets, positions, first_key
  Batch batch, host;             // their parts
  Transformer::Saved saved;
  Tensor losses;  // (T)

  /// `host_memory` is used only if `memory` is on a GPU.
  void allocate_batch(Arena& memory, Arena& host_memory, int64_t num_tokens) {
    samples = memory.alloc("batch", DType::i32, {4, num_tokens});
    host_samples =
        memory.device() == Device::cpu ? samples : host_memory.alloc("batch", DType::i32, {4, num_tokens});
    batch = batch_of(samples);
    host = batch_of(host_samples);
  }
  void upload(Context& ctx) const { copy(ctx, samples, host_samples); }
};

}  // namespace sluice
