#pragma once
// Quantities that follow from the configuration, each computed in one place.
#include "config/config.h"
#include "core/device.h"
#include "core/dtype.h"

namespace sluice {

/// The device that train.device selects. Error(usage) for cuda if this build has no CUDA or no GPU is
/// visible.
Device resolve_device(DeviceChoice choice);
/// Storage of weights and activations.
DType storage_dtype(Precision precision);
inline int64_t tokens_per_step(const Config& config) {
  return config.train.global_batch_size * config.data.seq_len;
}
/// Index of the first sample of a step's micro-batch, counted over all ranks. It determines the position in
/// the data completely.
inline int64_t first_sample(const Config& config, int64_t step, int64_t micro_batch) {
  return step * config.train.global_batch_size + micro_batch * config.train.micro_batch_size;
}
/// Rows that a rank has room for in its receive buffer, per round of the experts' all-to-all, where `ranks`
/// share the experts: `capacity` (parallel.expert_capacity) times its own tokens' rows, but at least one row
/// per token, and no more than all ranks together can send it.
int64_t receive_rows(int64_t tokens, int64_t experts_per_token, int64_t experts, int64_t ranks,
                     double capacity);
/// Tokens of a micro-batch that one rank computes: all of them, or its part where ranks share every sequence.
inline int64_t tokens_per_micro_batch(const Config& config) {
  return config.train.micro_batch_size * config.data.seq_len / config.parallel.context;
}
/// Rows of the rotary table.
inline int64_t max_positions(const Config& config) {
  return config.model.max_position_embeddings.value_or(config.data.seq_len);
}

}  // namespace sluice
