#pragma once
// The interface common to all attention cores, which compute one output per head from queries, keys and
// values.
#include <concepts>
#include <string>

#include "nn/gate_chain.h"
#include "nn/sequence.h"
#include "ops/attention.h"

namespace sluice {

/// Queries (T, H, D), keys and values (Tk, Hkv, D), as the core reads them: gated, normalised, rotated; with
/// a KV cache, including the earlier ones; where ranks share sequences, those of all ranks, and then own_key
/// (T) says which are the queries' own (ops/attention.h). x (T, C): the layer's input, for a core that reads
/// it too.
struct Heads {
  Tensor q, k, v, x = {};
  Tensor own_key = {};
};

/// Row i of tokens of which each is the next one of a sequence (Sequence::caches): its inputs, with its key
/// and value behind the earlier ones in caches[i].
struct NextToken {
  Sequence sequence;
  Heads heads;
  FusedGate gate;

  NextToken(Context& ctx, const Heads& all, const Sequence& sequences, const FusedGate& gates, int64_t layer,
            int64_t i);
  /// An empty tensor stays empty.
  static Tensor row(const Tensor& all, int64_t i) { return all.empty() ? all : all.rows(i, 1); }
};

/// What every core leaves for backward and analysis. T tokens, H heads, D head_dim.
struct CoreSaved {
  Tensor o;        // (T, H, D): the output of the softmax
  Tensor lse, z0;  // (H, T): log-sum-exp of the logits and the first visible key's logit
  Tensor y;        // (T, H, D): after all that the core does to o; o itself where that is nothing; empty if
                   // a gate is fused
};

/// A core registers its parameters when constructed. make_saved: gated says whether forward gets a gate.
/// forward writes s.o, s.lse, s.z0, and s.y or, with a gate, gate.y instead. backward takes the gradient dy
/// of that, going on to grads.queries where that is given, and dimportance (H) f64 or empty, the gradient of
/// every token's importance of each head. backward_input, after it: what heads.x has to do with; dx (T, C) is
/// written according to `into`. head_gate: what measures the importance without a gate. flops: of a token's
/// forward pass in a sequence of that length, on average over its positions. sink_logits: logits that compete
/// with the keys, (H), or (H, T) of an extra key; empty without a sink. sink_value (Hkv, D): what their share
/// of attention adds to the output; empty where it is nothing. weight: of a key with this logit, in a row
/// with this lse, before a sink takes its share; scale: of the logits.
template <class C>
concept AttentionCore = requires(const C& core, Context& ctx, const Heads& heads, const AttentionGrads& grads,
                                 const Tensor& dy, const Sequence& sequence, const FusedGate& gate,
                                 Into& into, Arena& arena, typename C::Saved& s,
                                 const typename C::Saved& saved) {
  requires std::derived_from<typename C::Saved, CoreSaved>;
  { core.make_saved(arena, std::string(), int64_t{}, DType{}, bool{}) } -> std::same_as<typename C::Saved>;
  { core.forward(ctx, heads, sequence, gate, s) } -> std::same_as<void>;
  { core.backward(ctx, grads, dy, heads, sequence, gate, dy, saved) } -> std::same_as<void>;
  { core.backward_input(ctx, dy, into, heads, sequence, saved) } -> std::same_as<void>;
  { core.sink_logits(saved) } -> std::same_as<Tensor>;
  { core.sink_value() } -> std::same_as<Tensor>;
  { core.weight(double{}, double{}) } -> std::same_as<double>;
  { core.scale() } -> std::same_as<double>;
  { core.head_gate(saved, sequence.first_key) } -> std::same_as<HeadGate>;
  { core.flops(int64_t{}) } -> std::same_as<Flops>;
};

}  // namespace sluice
