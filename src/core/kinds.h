#pragma once
// Words that configuration and arithmetic share. Enumerators are spelled as in YAML.
#include <cstdint>

namespace sluice {

enum class GateActivation : uint8_t { sigmoid, silu, identity, ns_sigmoid };  // ns: 0.5 + 0.5 sigmoid
/// shared: scores averaged over heads after the activation; shared_before_activation: logits averaged before it (A1).
enum class GateSharing : uint8_t { specific, shared, shared_before_activation };
enum class GateCombine : uint8_t { multiply, add };

}  // namespace sluice
