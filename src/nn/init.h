#pragma once
#include <cmath>

#include "config/config.h"
#include "params/param_store.h"

namespace sluice {

/// Of o_proj and down_proj, whose outputs the residual stream sums: N(0, range), or range / sqrt(2 layers)
/// (Megatron).
inline Init residual_init(const ModelConfig& config) {
  const double depth = std::sqrt(2.0 * static_cast<double>(config.num_hidden_layers));
  return Init::normal(config.scaled_residual_init ? config.initializer_range / depth
                                                  : config.initializer_range);
}

}  // namespace sluice
