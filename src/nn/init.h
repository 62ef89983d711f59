#pragma once
#include <algorithm>
#include <cmath>

#include "config/config.h"
#include "params/param_store.h"

namespace sluice {

/// Initialiser of a matrix [out, in]: N(0, initializer_range); with fan_in (nanochat, after Yang et al. 2023,
/// "A spectral condition for feature learning") a standard deviation of min(1, sqrt(out / in)) / sqrt(in).
inline Init matrix_init(const ModelConfig& config, int64_t out, int64_t in) {
  if (config.initializer == Initializer::normal) return Init::normal(config.initializer_range);
  const double rows = static_cast<double>(out), columns = static_cast<double>(in);
  return Init::normal(std::min(1.0, std::sqrt(rows / columns)) / std::sqrt(columns));
}

/// Initialiser of o_proj and down_proj, whose outputs the residual stream sums: N(0, range), or range /
/// sqrt(2 layers) (Megatron); with fan_in 0, so that every block starts as the identity.
inline Init residual_init(const ModelConfig& config) {
  if (config.initializer == Initializer::fan_in) return Init::constant(0);
  const double depth = std::sqrt(2.0 * static_cast<double>(config.num_hidden_layers));
  return Init::normal(config.scaled_residual_init ? config.initializer_range / depth
                                                  : config.initializer_range);
}

/// Initialiser of the embedding; with fan_in N(0, 1).
inline Init embedding_init(const ModelConfig& config) {
  return Init::normal(config.initializer == Initializer::fan_in ? 1.0 : config.initializer_range);
}

/// Initialiser of an untied output head; with fan_in 0, so that all tokens are equally likely.
inline Init head_init(const ModelConfig& config) {
  return config.initializer == Initializer::fan_in ? Init::constant(0)
                                                   : Init::normal(config.initializer_range);
}

}  // namespace sluice
