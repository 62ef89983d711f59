#pragma once
// Words that configuration and arithmetic share. Enumerators are spelled as in YAML.
#include <cstdint>

namespace sluice {

enum class GateActivation : uint8_t { sigmoid, silu, identity, ns_sigmoid };  // ns: 0.5 + 0.5 sigmoid
/// shared: scores averaged over heads after the activation; shared_before_activation: logits averaged before
/// it (A1).
enum class GateSharing : uint8_t { specific, shared, shared_before_activation };
enum class GateCombine : uint8_t { multiply, add };

/// How attention is computed on a GPU: automatic takes the fastest of the house's own for the card; cudnn is
/// there to race against. On a CPU there is one way, automatic.
enum class AttentionKernel : uint8_t { automatic, mma, hopper, cudnn };

/// What routers are built for (ops/router.h).
constexpr int64_t kMaxExperts = 1024, kMaxExpertsPerToken = 32;

}  // namespace sluice
