#pragma once
#include <cstdint>
#include <span>

namespace sluice {

struct Sampling {
  double temperature = 1.0;  // 0: the most probable token
  int64_t top_k = 0;         // 0: all
  double top_p =
      1.0;  // nucleus sampling: the smallest set of most probable tokens with this total probability
  uint64_t seed = 0;
};

/// Error(numeric) where a logit is NaN or infinite, so that no token is the most probable one.
void require_numbers(std::span<const float> logits);

/// The token of the largest logit, the lower id of equal ones. Error(numeric) as for require_numbers.
int32_t most_probable(std::span<const float> logits);

}  // namespace sluice
