#pragma once
// What tests may ask of the emulated cuBLASLt.
#include <cstdint>

namespace emu {

/// How often so far its heuristic was asked for one algorithm, which is to compute a product without having
/// been timed; and for several.
struct HeuristicCalls {
  int64_t for_one, for_several;
};
HeuristicCalls heuristic_calls();

}  // namespace emu
