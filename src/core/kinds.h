#pragma once
// Enumerations that configuration and ops share. Enumerators are spelled as in YAML.
#include <cstdint>

namespace sluice {

enum class GateActivation : uint8_t { sigmoid, silu, identity, ns_sigmoid };  // ns: 0.5 + 0.5 sigmoid
/// shared: scores averaged over heads after the activation; shared_before_activation: logits averaged before
/// it (A1).
enum class GateSharing : uint8_t { specific, shared, shared_before_activation };
enum class GateCombine : uint8_t { multiply, add };

/// The attention kernel on a GPU: automatic selects the fastest of Sluice's own kernels for the GPU; cudnn
/// serves as a comparison. A CPU has only automatic.
enum class AttentionKernel : uint8_t { automatic, mma, hopper, cudnn };

/// Limits of the router ops (ops/router.h).
constexpr int64_t kMaxExperts = 1024, kMaxExpertsPerToken = 32;

}  // namespace sluice
