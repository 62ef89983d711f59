#pragma once
// Quantities that follow from the configuration, each computed in one place.
#include "config/config.h"
#include "core/device.h"
#include "core/dtype.h"

namespace sluice {

/// Where train.device computes. Error(usage) for cuda without a backend in the program or without a card.
Device resolve_device(DeviceChoice choice);
/// Storage of weights and activations.
DType storage_dtype(Precision precision);
inline int64_t tokens_per_step(const Config& config) {
  return config.train.global_batch_size * config.data.seq_len;
}
/// The first sample of a step's micro-batch, counted over all ranks: all there is to the position in the
/// data.
inline int64_t first_sample(const Config& config, int64_t step, int64_t micro_batch) {
  return step * config.train.global_batch_size + micro_batch * config.train.micro_batch_size;
}
/// Rows of the rotary table.
inline int64_t max_positions(const Config& config) {
  return config.model.max_position_embeddings.value_or(config.data.seq_len);
}

}  // namespace sluice
