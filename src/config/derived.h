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
/// Rows of the rotary table.
inline int64_t max_positions(const Config& config) {
  return config.model.max_position_embeddings.value_or(config.data.seq_len);
}

}  // namespace sluice
