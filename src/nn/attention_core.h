#pragma once
// The interface common to all attention cores, which compute one output per head from queries, keys and
// values.
#include <concepts>

#include "nn/gate_chain.h"
#include "nn/sequence.h"
#include "ops/attention.h"

namespace sluice {

/// Queries (T, H, D), keys and values (Tk, Hkv, D), as the core reads them: gated, normalised, rotated; with
/// a KV cache, including the earlier ones.
struct Heads {
  Tensor q, k, v;
};

/// A core registers its parameters when constructed. forward writes s.o (T, H, D), the output of the softmax,
/// s.lse and s.z0 (H, T) for analysis, and behind all that the core does to its output s.y (T, H, D), or,
/// with a gate, gate.y instead. backward takes the gradient dy of that, and dimportance (H) f64 or empty, the
/// gradient of every token's importance of each head. head_gate: what measures that importance without a
/// gate. flops: of a token's forward pass in a sequence of that length, on average over its positions.
template <class C>
concept AttentionCore = requires(const C& core, Context& ctx, const Heads& heads, const AttentionGrads& grads,
                                 const Tensor& dy, const Sequence& sequence, const FusedGate& gate,
                                 typename C::Saved& s, const typename C::Saved& saved) {
  requires std::same_as<decltype(s.o), Tensor> && std::same_as<decltype(s.y), Tensor>;
  requires std::same_as<decltype(s.lse), Tensor> && std::same_as<decltype(s.z0), Tensor>;
  { core.forward(ctx, heads, sequence, gate, s) } -> std::same_as<void>;
  { core.backward(ctx, grads, dy, heads, sequence, gate, dy, saved) } -> std::same_as<void>;
  { core.head_gate(saved, sequence.first_key) } -> std::same_as<HeadGate>;
  { core.flops(int64_t{}) } -> std::same_as<Flops>;
};

}  // namespace sluice
