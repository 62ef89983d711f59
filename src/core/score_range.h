#pragma once
#include <optional>

#include "core/kinds.h"

namespace sluice {

/// Scores low + (high - low) sigmoid(z), within [low, high], which lies within [0, 1].
struct ScoreRange {
  double low, high;
};

/// Empty for an activation of any other form: its scores are not known to lie within [0, 1].
constexpr std::optional<ScoreRange> score_range(GateActivation activation) {
  if (activation == GateActivation::sigmoid) return ScoreRange{0, 1};
  if (activation == GateActivation::ns_sigmoid) return ScoreRange{0.5, 1};
  return std::nullopt;
}

}  // namespace sluice
