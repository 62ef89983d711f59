#pragma once
#include <optional>
#include <string>
#include <vector>

#include "nn/gate.h"
#include "nn/head_balance.h"
#include "nn/layer.h"
#include "nn/rmsnorm.h"
#include "nn/switch_heads.h"
#include "ops/attention.h"

namespace sluice {

/// Keys and values of earlier tokens of one sequence, for generation: gated, normalised and rotated, as
/// attention reads them.
struct KeyValueCache {
  std::vector<Tensor> keys, values;  // per layer (max_tokens, Hkv, D)
  int64_t length = 0;                // tokens held; Transformer::forward advances it
};

/// Evaluation without the values of every sequence's first token (ops/value_zeroing.h): for all heads, or for
/// those that spend more than this share of their attention on it, on average over the tokens of the forward
/// pass.
struct ValueZeroing {
  std::optional<double> sinks_above;
};

/// What attention knows of the tokens besides their hidden states.
struct Sequence {
  Tensor positions;           // (T) i32
  Tensor first_key;           // (T) i32, see ops/attention.h
  Tensor rope_cos, rope_sin;  // (positions, D/2)
  KeyValueCache* cache = nullptr;
  const ValueZeroing* zeroing = nullptr;  // forward only, without a cache
  const HeadLoad* heads =
      nullptr;  // where forward counts how open heads are, and backward finds the gradients of that
};

/// Grouped-query causal attention with gates at any of five positions (src/ops/README.md):
///   q,k,v projections -> [query, key, value gates] -> qk_norm -> rope (or rope, then qk_norm) -> attention
///   -> [sink] -> [norm]
///   -> [SiLU] -> [sdpa_output gates] -> o_proj -> [dense_output gates]
/// Gates of one position apply in the order of the list. Logits come from the layer's input (the
/// pre-normalised hidden state), each through a projection of its own. With switch heads values (and keys)
/// are projections of a few experts of their head (nn/switch_heads.h).
class Attention {
 public:
  /// What backward and analysis read. T tokens, H/Hkv heads, D head_dim, C hidden. Where an option is absent
  /// its tensor is the one before it, so that code below never asks.
  struct Saved {
    Tensor q, k, v;  // (T, H, D), (T, Hkv, D) x 2: projections, or what switch heads make of them
    SwitchHeads::Saved k_switch, v_switch;
    std::vector<Gate::Saved> gates;  // as in the configuration: logits and gated values
    RmsNorm::Saved q_norm, k_norm;   // y is rotated
    Tensor q_rot, k_rot;             // (T, H, D), (T, Hkv, D): what the scores see
    Tensor o;                        // (T, H, D): attention's output
    Tensor lse, z0;                  // (H, T): log-sum-exp of the logits and the first visible key's logit
    Tensor o_sink;               // (T, H, D): sigmoid(lse - sink) o; empty where a gate is fused behind it
    RmsNorm::Saved output_norm;  // y (T, H, D)
    Tensor o_act;                // (T, H, D): after output_activation, before the sdpa_output gates
    Tensor o_gated;              // (T, H, D): input of o_proj
    Tensor dense;                // (T, C): output of o_proj, before the dense_output gates
    Tensor y;                    // (T, C): the layer's output
  };

  Attention(const ModelConfig& config, ParamStore& store, const std::string& prefix, int64_t layer);
  Saved make_saved(Arena& arena, const std::string& name, int64_t num_tokens, DType dtype) const;

  /// s.y from x (T, C). With a cache, appends this batch's keys and values behind cache->length.
  void forward(Context& ctx, const Tensor& x, const Sequence& sequence, Saved& s) const;
  /// dx (T, C) overwritten. Without a cache only.
  void backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Sequence& sequence,
                const Saved& s) const;

  const std::vector<Gate>& gates() const { return gates_; }
  /// Whose scores are in Saved::v_switch and k_switch; empty without.
  const std::optional<SwitchHeads>& v_switch() const { return v_switch_; }
  const std::optional<SwitchHeads>& k_switch() const { return k_switch_; }
  /// (H): the learned sink logits; empty without.
  Tensor sinks() const { return sinks_ ? store_.value(*sinks_) : Tensor(); }
  double scale() const { return scale_; }
  /// What says how open the heads are after a forward: the first gate at sdpa_output, or the sink, or the
  /// softmax by itself. Nothing where that gate's scores do not say it (says_openness).
  std::optional<HeadGate> head_gate(const Saved& s, const Tensor& first_key) const;

 private:
  /// The sink and the one gate at sdpa_output that the attention op applies by itself; nothing where more, or
  /// something else, stands between attention and o_proj.
  AttentionOutput fused_output(const Saved& s) const;
  /// s.o, s.lse, s.z0 and, where something is fused behind attention, y.
  void attend(Context& ctx, const Tensor& keys, const Tensor& values, const Sequence& sequence,
              Saved& s) const;
  bool fuses_gate() const;
  size_t output_gate() const;
  bool has_gate(GatePosition position) const;
  bool norm_after_rope() const { return config_.qk_norm_order == QkNormOrder::after_rope; }
  Tensor after_gates(GatePosition position, const Tensor& x, const Saved& s) const;
  Tensor gates_forward(Context& ctx, GatePosition position, const Tensor& x, const Tensor& hidden,
                       Saved& s) const;
  void gates_backward(Context& ctx, GatePosition position, Tensor d, const Tensor& x, const Tensor& hidden,
                      const Saved& s, Tensor dhidden, Into& into, const Tensor& dhead = {}) const;
  void count_heads(Context& ctx, const Sequence& sequence, const Saved& s) const;

  ModelConfig config_;
  ParamStore& store_;
  int64_t layer_;
  double scale_;
  ParamStore::Id q_proj_ = 0, k_proj_ = 0, v_proj_ = 0, o_proj_ = 0;
  std::optional<SwitchHeads> k_switch_, v_switch_;
  std::vector<Gate> gates_;
  std::optional<RmsNorm> q_norm_, k_norm_, output_norm_;
  std::optional<ParamStore::Id> sinks_;
};
static_assert(Layer<Attention, Sequence>);

}  // namespace sluice
