#pragma once
// Enumerations that configuration and ops share. Enumerators are spelled as in YAML.
#include <cstdint>

namespace sluice {

/// ns_sigmoid: 0.5 + 0.5 sigmoid; two_sigmoid: 2 sigmoid.
enum class GateActivation : uint8_t { sigmoid, silu, identity, ns_sigmoid, two_sigmoid };
/// shared: scores averaged over heads after the activation; shared_before_activation: logits averaged before
/// it (A1).
enum class GateSharing : uint8_t { specific, shared, shared_before_activation };
enum class GateCombine : uint8_t { multiply, add };

/// Sparse attention's indexer (ops/indexer.h): activation of a head's products, weights of the heads, and the
/// number of keys that a query selects.
enum class IndexActivation : uint8_t { sigmoid, relu };
enum class IndexHeadWeights : uint8_t { sigmoid, linear, none };
enum class BudgetPolicy : uint8_t { fixed, eq8, inverse, entropy, code };

/// The attention kernel on a GPU: automatic selects the fastest of Sluice's own kernels for the GPU; cudnn
/// serves as a comparison. A CPU has only automatic.
enum class AttentionKernel : uint8_t { automatic, mma, hopper, cudnn };

/// How attention turns a query's scores s into weights (ops/attention.h): e^s / sum e^s, or softpick's
/// relu(e^s - 1) / sum |e^s - 1|.
enum class AttentionWeights : uint8_t { softmax, softpick };

/// Limits of the router ops (ops/router.h).
constexpr int64_t kMaxExperts = 1024, kMaxExpertsPerToken = 32;

}  // namespace sluice
