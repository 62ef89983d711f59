#pragma once
#include <cstdint>

namespace sluice {

struct Sampling {
  double temperature = 1.0;  // 0: the most probable token
  int64_t top_k = 0;         // 0: all
  double top_p =
      1.0;  // nucleus sampling: the smallest set of most probable tokens with this total probability
  uint64_t seed = 0;
};

}  // namespace sluice
