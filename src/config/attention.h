#pragma once
// Attention: its kind, gates, head balance, switch heads.
#include <optional>
#include <vector>

#include "config/sparse.h"
#include "core/kinds.h"

namespace sluice {

enum class AttentionKind : uint8_t { softmax, sink, off_by_one, sink_key, kv_bias, softpick, sparse };
enum class GatePosition : uint8_t { query, key, value, sdpa_output, dense_output };
enum class GateGranularity : uint8_t { elementwise, headwise };
enum class GateInput : uint8_t { hidden, none, self };
enum class GateInit : uint8_t { matrix, zero };
enum class ExclusiveAttention : uint8_t { none, full, learned };
enum class OutputNorm : uint8_t { none, rmsnorm, rmsnorm_shared };
enum class OutputActivation : uint8_t { none, silu };
enum class HeadBalanceScope : uint8_t { micro_batch, data_parallel, global_batch, previous_step };
enum class SharedHeads : uint8_t { calibration, online };
enum class SwitchProjections : uint8_t { value, key_value };

SLUICE_ENUM_NAMES(AttentionKind, "softmax", "sink", "off_by_one", "sink_key", "kv_bias", "softpick",
                  "sparse");
SLUICE_ENUM_NAMES(GatePosition, "query", "key", "value", "sdpa_output", "dense_output");
SLUICE_ENUM_NAMES(GateGranularity, "elementwise", "headwise");
SLUICE_ENUM_NAMES(GateSharing, "specific", "shared", "shared_before_activation");
SLUICE_ENUM_NAMES(GateCombine, "multiply", "add");
SLUICE_ENUM_NAMES(GateActivation, "sigmoid", "silu", "identity", "ns_sigmoid", "two_sigmoid");
SLUICE_ENUM_NAMES(GateInput, "hidden", "none", "self");
SLUICE_ENUM_NAMES(GateInit, "matrix", "zero");
SLUICE_ENUM_NAMES(ExclusiveAttention, "none", "full", "learned");
SLUICE_ENUM_NAMES(OutputNorm, "none", "rmsnorm", "rmsnorm_shared");
SLUICE_ENUM_NAMES(OutputActivation, "none", "silu");
SLUICE_ENUM_NAMES(HeadBalanceScope, "micro_batch", "data_parallel", "global_batch", "previous_step");
SLUICE_ENUM_NAMES(SharedHeads, "calibration", "online");
SLUICE_ENUM_NAMES(SwitchProjections, "value", "key_value");
SLUICE_ENUM_NAMES(AttentionKernel, "auto", "mma", "hopper", "cudnn");

struct GateConfig {
  GatePosition position = GatePosition::sdpa_output;
  GateGranularity granularity = GateGranularity::elementwise;
  GateSharing heads = GateSharing::specific;
  GateCombine combine = GateCombine::multiply;
  GateActivation activation = GateActivation::sigmoid;
  GateInput input = GateInput::hidden;
  int64_t input_channels = 0;
  GateInit init = GateInit::matrix;
  std::optional<double> bias = {};

  template <class V>
  void fields(V& f) {
    f("position", position,
      "activation that the gate acts on (in the paper: G4 query, G3 key, G2 value, G1 sdpa_output, G5 "
      "dense_output)");
    f("granularity", granularity, "one score per channel or one per head");
    f("heads", heads,
      "specific: separate scores for each head; shared: scores averaged over the heads, after the activation "
      "or before it");
    f("combine", combine, "x * score or x + score");
    f("activation", activation, "ns_sigmoid is 0.5 + 0.5 sigmoid; two_sigmoid is 2 sigmoid");
    f("input", input,
      "what scores are computed from: hidden, the pre-normalised hidden state of the current token; none, a "
      "learned constant; self, the activation that the gate acts on, all heads of the token");
    f("input_channels", input_channels,
      "input hidden: scores are computed from this many leading channels of the hidden state; 0: all");
    f("init", init, "initial weight: as every matrix (initializer), or zero");
    f("bias", bias, "initial value of a learned bias, added to the projection; null: no bias");
  }
};

/// Attention heads in balance: the auxiliary loss of the sink-aware paper, equations 7 and 8
/// (src/ops/README.md).
struct HeadBalanceConfig {
  double coefficient = 0.0;
  HeadBalanceScope scope = HeadBalanceScope::micro_batch;
  int64_t shared_heads = 0;
  SharedHeads shared_from = SharedHeads::calibration;
  int64_t calibration_samples = 500;
  int64_t ddof = 1;
  bool skip_first = true;

  template <class V>
  void fields(V& f) {
    f("coefficient", coefficient,
      "weight of the head balance loss, which evens out the importance of the heads; 0: off (1e-4 from "
      "scratch, 1e-2 in fine-tuning)");
    f("scope", scope,
      "tokens over which a head's importance is averaged; previous_step: all tokens of the previous step, on "
      "every rank");
    f("shared_heads", shared_heads,
      "number of most important heads per layer that the loss leaves out (equation 8)");
    f("shared_from", shared_from,
      "how shared_heads are chosen: calibrated once on the first samples, or re-ranked in every scope");
    f("calibration_samples", calibration_samples, "samples that the calibration averages over");
    f("ddof", ddof,
      "delta degrees of freedom of the standard deviation over heads: 1 divides by heads - 1, 0 by heads");
    f("skip_first", skip_first,
      "softmax attention: leave out each sequence's first token, which attends only to itself");
  }
};

/// Switch heads (the Gated Attention paper, appendix A.1): a mixture of expert projections in each key/value
/// head.
struct SwitchHeadsConfig {
  int64_t num_experts = 0;
  int64_t num_experts_per_tok = 1;
  SwitchProjections projections = SwitchProjections::value;
  int64_t expert_width = 0;

  template <class V>
  void fields(V& f) {
    f("num_experts", num_experts, "expert projections per key/value head; 0: one projection and no router");
    f("num_experts_per_tok", num_experts_per_tok,
      "experts with the largest sigmoid scores, whose outputs are summed, each weighted by its score");
    f("projections", projections,
      "projections that have experts: values only, or keys and values, each with its own router");
    f("expert_width", expert_width,
      "output channels per expert: expert e writes width channels from e * width on, modulo head_dim; 0: "
      "head_dim");
  }
};

struct AttentionConfig {
  AttentionKind kind = AttentionKind::softmax;
  int64_t window = 0;
  int64_t window_pattern = 0;
  std::vector<GateConfig> gates;
  ExclusiveAttention exclusive = ExclusiveAttention::none;
  OutputNorm output_norm = OutputNorm::none;
  OutputActivation output_activation = OutputActivation::none;
  SwitchHeadsConfig switch_heads;
  HeadBalanceConfig head_balance;
  AttentionKernel kernel = AttentionKernel::automatic;
  SparseConfig sparse;

  template <class V>
  void fields(V& f) {
    f("kind", kind,
      "sink: softmax with one learned logit per head in the denominator (gpt-oss); off_by_one: this logit "
      "fixed at 0; sink_key: it is the query's product with a learned key per head; kv_bias: a learned key "
      "and value per key/value head, seen by every query; softpick: relu(e^s - 1) / sum |e^s - 1|; "
      "sparse: softmax over the keys that an indexer selects");
    f("window", window, "a token sees itself and window - 1 tokens before it; 0: all of its sequence");
    f("window_pattern", window_pattern,
      "every so many layers one has no window, the last of them (2: gpt-oss, 6: Gemma 3); 0: all layers have "
      "it");
    f("gates", gates, "any number of gates; several positions at once are allowed");
    f("exclusive", exclusive,
      "exclusive self attention: subtract from a head's output its projection on the token's own value, "
      "before "
      "output_norm; learned: times a learned scale per head that starts at 0");
    f("output_norm", output_norm,
      "RMSNorm per head before o_proj; rmsnorm_shared uses one weight for all heads");
    f("output_activation", output_activation, "activation on the attention output before o_proj");
    f("switch_heads", switch_heads, "");
    f("head_balance", head_balance, "");
    f("kernel", kernel,
      "attention kernel on a GPU: auto selects the fastest of Sluice's own kernels; cudnn serves as a "
      "comparison");
    f("sparse", sparse, "");
  }

  /// The window of layer `i`; 0: none.
  int64_t window_in_layer(int64_t i) const {
    return window_pattern > 0 && (i + 1) % window_pattern == 0 ? 0 : window;
  }
};

}  // namespace sluice
