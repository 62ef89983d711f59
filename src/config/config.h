#pragma once
// The configuration, with the same sections as the YAML. Each key is one member, whose initialiser is the
// default, and one fields() line with its name and help text. Reading, writing, comparing and documenting the
// configuration are visitors (fields.h). Immutable after load_config().
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/kinds.h"

namespace sluice {

/// Spellings of an enum, in the order of its enumerators; specialised beside each enum.
template <class E>
struct EnumNames;

#define SLUICE_ENUM_NAMES(E, ...)                                                 \
  template <>                                                                     \
  struct EnumNames<E> {                                                           \
    static constexpr auto names = std::to_array<std::string_view>({__VA_ARGS__}); \
  }

enum class NormPlacement : uint8_t { pre, sandwich };
enum class RopeScalingType : uint8_t { none, yarn };
enum class AttentionKind : uint8_t { softmax, sink, off_by_one, sink_key, kv_bias, softpick, sparse };
enum class IndexScope : uint8_t { all_heads, kv_head };
enum class SparsePhase : uint8_t { dense_warm_up, sparse };
enum class GatePosition : uint8_t { query, key, value, sdpa_output, dense_output };
enum class GateGranularity : uint8_t { elementwise, headwise };
enum class GateInput : uint8_t { hidden, none, self };
enum class GateInit : uint8_t { matrix, zero };
enum class ExclusiveAttention : uint8_t { none, full, learned };
enum class OutputNorm : uint8_t { none, rmsnorm, rmsnorm_shared };
enum class OutputActivation : uint8_t { none, silu };
enum class TokenizerType : uint8_t { byte, sentencepiece, bpe };
enum class Packing : uint8_t { stream, documents };
enum class DeviceChoice : uint8_t { automatic, cpu, cuda };
enum class Precision : uint8_t { f32, bf16, f64 };
enum class Recompute : uint8_t { none, mlp, block };
enum class BadStepPolicy : uint8_t { stop, skip, count };
enum class HiddenAct : uint8_t { silu, relu2 };
enum class QkNormOrder : uint8_t { before_rope, after_rope };
enum class Initializer : uint8_t { normal, fan_in };
enum class HeadBalanceScope : uint8_t { micro_batch, data_parallel, global_batch, previous_step };
enum class SharedHeads : uint8_t { calibration, online };
enum class SwitchProjections : uint8_t { value, key_value };
enum class OptimizerType : uint8_t { adamw, muon };
enum class InitMissing : uint8_t { refuse, fresh };
enum class BalanceScope : uint8_t { global_batch, micro_batch, previous_step };
enum class Determinism : uint8_t { same_layout, exact };
enum class ExactSum : uint8_t { tree, fixed64 };
enum class GradientDtype : uint8_t { f32, bf16 };
enum class Transport : uint8_t { automatic, nccl, host };
enum class Schedule : uint8_t { constant, cosine, linear, wsd };
enum class ConsoleMode : uint8_t { automatic, bar, lines, none };

SLUICE_ENUM_NAMES(NormPlacement, "pre", "sandwich");
SLUICE_ENUM_NAMES(RopeScalingType, "none", "yarn");
SLUICE_ENUM_NAMES(AttentionKind, "softmax", "sink", "off_by_one", "sink_key", "kv_bias", "softpick", "sparse");
SLUICE_ENUM_NAMES(IndexScope, "all_heads", "kv_head");
SLUICE_ENUM_NAMES(IndexActivation, "sigmoid", "relu");
SLUICE_ENUM_NAMES(IndexHeadWeights, "sigmoid", "linear", "none");
SLUICE_ENUM_NAMES(BudgetPolicy, "fixed", "eq8", "inverse", "entropy", "code");
SLUICE_ENUM_NAMES(SparsePhase, "dense_warm_up", "sparse");
SLUICE_ENUM_NAMES(GatePosition, "query", "key", "value", "sdpa_output", "dense_output");
SLUICE_ENUM_NAMES(GateGranularity, "elementwise", "headwise");
SLUICE_ENUM_NAMES(GateSharing, "specific", "shared", "shared_before_activation");
SLUICE_ENUM_NAMES(GateCombine, "multiply", "add");
SLUICE_ENUM_NAMES(GateActivation, "sigmoid", "silu", "identity", "ns_sigmoid", "two_sigmoid");
SLUICE_ENUM_NAMES(AttentionKernel, "auto", "mma", "hopper", "cudnn");
SLUICE_ENUM_NAMES(GateInput, "hidden", "none", "self");
SLUICE_ENUM_NAMES(GateInit, "matrix", "zero");
SLUICE_ENUM_NAMES(ExclusiveAttention, "none", "full", "learned");
SLUICE_ENUM_NAMES(OutputNorm, "none", "rmsnorm", "rmsnorm_shared");
SLUICE_ENUM_NAMES(OutputActivation, "none", "silu");
SLUICE_ENUM_NAMES(TokenizerType, "byte", "sentencepiece", "bpe");
SLUICE_ENUM_NAMES(Packing, "stream", "documents");
SLUICE_ENUM_NAMES(DeviceChoice, "auto", "cpu", "cuda");
SLUICE_ENUM_NAMES(Precision, "f32", "bf16", "f64");
SLUICE_ENUM_NAMES(Recompute, "none", "mlp", "block");
SLUICE_ENUM_NAMES(BadStepPolicy, "stop", "skip", "count");
SLUICE_ENUM_NAMES(HiddenAct, "silu", "relu2");
SLUICE_ENUM_NAMES(QkNormOrder, "before_rope", "after_rope");
SLUICE_ENUM_NAMES(Initializer, "normal", "fan_in");
SLUICE_ENUM_NAMES(HeadBalanceScope, "micro_batch", "data_parallel", "global_batch", "previous_step");
SLUICE_ENUM_NAMES(SharedHeads, "calibration", "online");
SLUICE_ENUM_NAMES(SwitchProjections, "value", "key_value");
SLUICE_ENUM_NAMES(OptimizerType, "adamw", "muon");
SLUICE_ENUM_NAMES(InitMissing, "refuse", "fresh");
SLUICE_ENUM_NAMES(BalanceScope, "global_batch", "micro_batch", "previous_step");
SLUICE_ENUM_NAMES(Determinism, "same_layout", "exact");
SLUICE_ENUM_NAMES(ExactSum, "tree", "fixed64");
SLUICE_ENUM_NAMES(GradientDtype, "f32", "bf16");
SLUICE_ENUM_NAMES(Transport, "auto", "nccl", "host");
SLUICE_ENUM_NAMES(Schedule, "constant", "cosine", "linear", "wsd");
SLUICE_ENUM_NAMES(ConsoleMode, "auto", "bar", "lines", "none");

struct RopeScalingConfig {
  RopeScalingType type = RopeScalingType::none;
  double factor = 1.0;
  int64_t original_max_position_embeddings = 4096;
  double beta_fast = 32.0;
  double beta_slow = 1.0;

  template <class V>
  void fields(V& f) {
    f("type", type, "context extension of a pretrained model");
    f("factor", factor, "YaRN: new length / original length");
    f("original_max_position_embeddings", original_max_position_embeddings,
      "YaRN: length the model was trained at");
    f("beta_fast", beta_fast,
      "YaRN: dimensions that rotate more often than this within the original length keep their frequency");
    f("beta_slow", beta_slow,
      "YaRN: dimensions that rotate less often than this within the original length are fully interpolated");
  }
};

struct RopeConfig {
  double theta = 10000.0;
  RopeScalingConfig scaling;

  template <class V>
  void fields(V& f) {
    f("theta", theta, "base of the rotary frequencies");
    f("scaling", scaling, "");
  }
};

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

/// The indexer of sparse attention, which scores every key for every query (src/ops/indexer.h).
struct IndexerConfig {
  int64_t heads = 4;
  int64_t head_dim = 64;
  IndexActivation activation = IndexActivation::sigmoid;
  IndexHeadWeights head_weights = IndexHeadWeights::sigmoid;
  bool bias = true;
  std::optional<double> scale;
  bool rope = false;
  bool key_norm = false;
  bool detach_input = true;

  template <class V>
  void fields(V& f) {
    f("heads", heads, "query heads of the indexer, which share one key per token");
    f("head_dim", head_dim, "even if the indexer has rope");
    f("activation", activation,
      "of every head's scaled product of query and key: sigmoid (GSA) or relu (DSA)");
    f("head_weights", head_weights,
      "weights of the heads in the sum over them: sigmoid of a projection of the hidden state, that "
      "projection itself, or 1");
    f("bias", bias, "a learned bias per head, of the products, and another of the head weights");
    f("scale", scale, "factor on the products; null: 1 / sqrt(head_dim)");
    f("rope", rope, "rotary embedding of the indexer's queries and keys, with theta of model.rope");
    f("key_norm", key_norm, "RMSNorm of the indexer's keys");
    f("detach_input", detach_input,
      "the indexer's loss trains the indexer alone; false: also the layers below");
  }
};

/// How many keys, or blocks of keys, a query selects (002, equation 8; src/ops/README.md).
struct BudgetConfig {
  BudgetPolicy policy = BudgetPolicy::fixed;
  int64_t base = 2048;
  int64_t min = 256;
  int64_t max = 4096;
  double temperature = 1.0;
  double momentum = 0.99;

  template <class V>
  void fields(V& f) {
    f("policy", policy,
      "fixed: base; by the variance of a query's scores relative to its running mean over training: eq8 "
      "grows "
      "with it (the paper's equation 8), inverse falls (its text), code falls within (0.5, 1.5] base; "
      "entropy: "
      "by the entropy of the scores' softmax");
    f("base", base, "keys, or blocks, per query");
    f("min", min, "lower bound of an adaptive k");
    f("max", max, "upper bound of an adaptive k");
    f("temperature", temperature, "code and entropy: factor on the relative variance, or on the entropy");
    f("momentum", momentum, "momentum of the running mean of the variance");
  }
};

/// The indexer's loss: the divergence of the indexer's distribution over keys from that of attention.
struct IndexLossConfig {
  double coefficient = 1.0;
  double temperature = 1.0;
  bool learn_temperature = false;

  template <class V>
  void fields(V& f) {
    f("coefficient", coefficient,
      "weight of KL(p || softmax(temperature * scores)) over the selected keys, or all of them in the dense "
      "warm-up, where p is the mean of attention over heads; mean over counted tokens and layers; 0: off");
    f("temperature", temperature, "factor on the scores, or its initial value");
    f("learn_temperature", learn_temperature, "train the temperature of every layer");
  }
};

/// Sparse attention over the keys that an indexer selects: GSA (002), DSA, QSA, MSA.
struct SparseConfig {
  IndexScope scope = IndexScope::all_heads;
  int64_t block = 1;
  IndexerConfig indexer;
  BudgetConfig k;
  bool force_self = false;
  bool sink = false;
  IndexLossConfig loss;
  SparsePhase phase = SparsePhase::sparse;
  int64_t phase_steps = 0;

  template <class V>
  void fields(V& f) {
    f("scope", scope, "one set of keys per query for all heads, or one per key/value head");
    f("block", block,
      "keys are selected in blocks of this many tokens, counted from the start of a document, by the mean of "
      "their index keys; above 1 a query always sees its own block, in addition to k others");
    f("indexer", indexer, "");
    f("k", k, "");
    f("force_self", force_self, "block 1: a query always selects its own key, as one of its k");
    f("sink", sink, "one learned logit per head in the denominator of the softmax, as with kind: sink");
    f("loss", loss, "");
    f("phase", phase, "dense_warm_up: attention sees every key while the indexer learns from it");
    f("phase_steps", phase_steps, "steps of dense warm-up at the start of a run in the sparse phase");
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

/// GatedNorm (Qiu et al. 2026, arXiv 2601.22966): the norm's output n becomes n * sigmoid(U silu(D n)).
struct GatedNormConfig {
  int64_t rank = 0;
  GateInit init = GateInit::matrix;

  template <class V>
  void fields(V& f) {
    f("rank", rank,
      "rows of D, columns of U: a low-rank gate on the norms before attention and before the feed-forward "
      "network; 0: none");
    f("init", init, "initial U: as every matrix (initializer), or zero, when the gate starts at 1/2");
  }
};

struct LoadBalanceConfig {
  double coefficient = 1e-2;
  BalanceScope scope = BalanceScope::global_batch;

  template <class V>
  void fields(V& f) {
    f("coefficient", coefficient, "weight of the load-balancing loss, which is 1 at perfect balance; 0: off");
    f("scope", scope,
      "tokens over which the experts' token fractions are counted: the optimizer step so far, one "
      "micro-batch, or the whole previous step");
  }
};

struct MoeConfig {
  int64_t num_experts = 0;
  int64_t num_experts_per_tok = 8;
  int64_t moe_intermediate_size = 768;
  bool norm_topk_prob = true;
  int64_t shared_expert_intermediate_size = 0;
  bool shared_expert_gate = false;
  int64_t decoder_sparse_step = 1;
  std::vector<int64_t> mlp_only_layers;
  LoadBalanceConfig load_balance;
  double router_z_loss_coefficient = 1e-3;

  template <class V>
  void fields(V& f) {
    f("num_experts", num_experts, "experts per MoE layer; 0: every feed-forward network is dense");
    f("num_experts_per_tok", num_experts_per_tok,
      "experts per token: those with the largest router probabilities; ties go to the lower index");
    f("moe_intermediate_size", moe_intermediate_size, "width of one expert");
    f("norm_topk_prob", norm_topk_prob, "divide the selected experts' probabilities by their sum");
    f("shared_expert_intermediate_size", shared_expert_intermediate_size,
      "width of the shared expert, which processes every token; 0: none");
    f("shared_expert_gate", shared_expert_gate,
      "scale the shared expert's output by a sigmoid gate computed from the hidden state (Qwen3-Next)");
    f("decoder_sparse_step", decoder_sparse_step, "layer i is an MoE layer if i + 1 is a multiple of this");
    f("mlp_only_layers", mlp_only_layers,
      "layers, counted from 0, that are dense regardless of decoder_sparse_step");
    f("load_balance", load_balance, "");
    f("router_z_loss_coefficient", router_z_loss_coefficient,
      "weight of the router z-loss, the mean squared log-sum-exp of the router's logits (ST-MoE); 0: off");
  }

  /// Whether layer `i` is an MoE layer.
  bool in_layer(int64_t i) const {
    for (const int64_t dense : mlp_only_layers)
      if (dense == i) return false;
    return num_experts > 0 && (i + 1) % decoder_sparse_step == 0;
  }
};

struct ModelConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 256;
  int64_t num_hidden_layers = 4;
  int64_t num_attention_heads = 4;
  int64_t num_key_value_heads = 2;
  int64_t head_dim = 64;
  int64_t intermediate_size = 768;
  bool tie_word_embeddings = true;
  double rms_norm_eps = 1e-6;
  HiddenAct hidden_act = HiddenAct::silu;
  bool norm_weights = true;
  Initializer initializer = Initializer::normal;
  double initializer_range = 0.02;
  bool scaled_residual_init = false;
  bool qk_norm = true;
  QkNormOrder qk_norm_order = QkNormOrder::before_rope;
  bool embedding_norm = false;
  std::optional<double> final_logit_softcapping;
  double logit_z_loss_coefficient = 0.0;
  NormPlacement norm_placement = NormPlacement::pre;
  GatedNormConfig gated_norm;
  std::optional<double> branch_clip;
  std::optional<int64_t> max_position_embeddings;
  RopeConfig rope;
  AttentionConfig attention;
  MoeConfig moe;
  std::string match_parameters_of;
  int64_t match_multiple = 1;

  template <class V>
  void fields(V& f) {
    f("vocab_size", vocab_size, "0: the vocabulary size of the tokenizer");
    f("hidden_size", hidden_size, "");
    f("num_hidden_layers", num_hidden_layers, "");
    f("num_attention_heads", num_attention_heads, "");
    f("num_key_value_heads", num_key_value_heads, "divides num_attention_heads (grouped-query attention)");
    f("head_dim", head_dim, "even; independent of hidden_size / num_attention_heads");
    f("intermediate_size", intermediate_size, "width of the feed-forward network in dense layers");
    f("tie_word_embeddings", tie_word_embeddings, "the output head uses the embedding matrix");
    f("rms_norm_eps", rms_norm_eps, "");
    f("hidden_act", hidden_act, "silu: SwiGLU; relu2: down(relu(up x)^2), without a gate projection");
    f("norm_weights", norm_weights, "false: no RMSNorm has a weight");
    f("initializer", initializer,
      "fan_in (nanochat): standard deviation by matrix shape, embedding with deviation 1, output head and "
      "branch outputs 0");
    f("initializer_range", initializer_range, "initial standard deviation of every matrix, gates included");
    f("scaled_residual_init", scaled_residual_init,
      "initialise o_proj and down_proj with initializer_range / sqrt(2 layers)");
    f("qk_norm", qk_norm, "RMSNorm of queries and keys per head");
    f("qk_norm_order", qk_norm_order, "position of this norm relative to the rotary embedding");
    f("embedding_norm", embedding_norm, "RMSNorm of the token embeddings before the first block");
    f("final_logit_softcapping", final_logit_softcapping, "c: logits become c tanh(logits / c)");
    f("logit_z_loss_coefficient", logit_z_loss_coefficient,
      "weight of the z-loss, the mean squared log-sum-exp of the output logits (PaLM); 0: off");
    f("norm_placement", norm_placement,
      "sandwich also normalises each branch's output before the residual addition");
    f("gated_norm", gated_norm, "");
    f("branch_clip", branch_clip,
      "clamp attention and feed-forward outputs to [-c, c] before the residual addition");
    f("max_position_embeddings", max_position_embeddings, "length of the rotary table; null: data.seq_len");
    f("rope", rope, "");
    f("attention", attention, "");
    f("moe", moe, "");
    f("match_parameters_of", match_parameters_of,
      "configuration whose parameter count this model matches by narrowing intermediate_size (with experts, "
      "moe_intermediate_size)");
    f("match_multiple", match_multiple, "the matched width is rounded down to a multiple of this");
  }
};

/// Low-rank adapters (Hu et al. 2021): W + (alpha / rank) B A, where W is frozen.
struct LoraConfig {
  int64_t rank = 0;
  double alpha = 32.0;
  std::vector<std::string> targets = {"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                      "gate_proj", "up_proj", "down_proj"};

  template <class V>
  void fields(V& f) {
    f("rank", rank,
      "rank of the adapters; all other weights are then frozen; 0: no adapters, the whole model is trained");
    f("alpha", alpha, "adapter outputs are scaled by alpha / rank");
    f("targets", targets, "matrices that get an adapter, by the last part of their name");
  }
};

struct TokenizerConfig {
  TokenizerType type = TokenizerType::byte;
  std::string path;
  std::string end_of_document;

  template <class V>
  void fields(V& f) {
    f("type", type,
      "byte: 256 bytes and <|endoftext|> = 256; sentencepiece: a .model file; bpe: a tokenizer.json of Hugging "
      "Face with byte-level BPE");
    f("path", path, "tokenizer file, relative to the configuration file that names it");
    f("end_of_document", end_of_document,
      "bpe: the token that ends a document; empty: <|endoftext|>, <|end_of_text|>, </s> or <eos>, the first "
      "that the file has");
  }
};

struct DataSource {
  std::string name;
  std::string path;
  double weight = 1.0;

  template <class V>
  void fields(V& f) {
    f("name", name, "name of the source in logs");
    f("path", path,
      "PREFIX of PREFIX.bin/.idx, or a glob of .bin files, relative to the configuration file that names it");
    f("weight", weight,
      "relative share of the training samples; weights are normalised (unused for validation)");
  }
};

struct DataConfig {
  TokenizerConfig tokenizer;
  int64_t seq_len = 256;
  std::vector<DataSource> train;
  std::vector<DataSource> validation;
  Packing packing = Packing::stream;
  bool document_mask = false;
  bool document_positions = false;
  std::optional<int64_t> begin_token;
  bool allow_overlap = false;

  template <class V>
  void fields(V& f) {
    f("tokenizer", tokenizer, "");
    f("seq_len", seq_len, "tokens per sample");
    f("train", train, "weighted blend of token files");
    f("validation", validation, "list of validation sets; each is evaluated and reported under its name");
    f("packing", packing,
      "stream: samples are consecutive pieces of the stream of documents; documents: whole documents, of "
      "which only those longer than seq_len are cut, are packed into samples by best fit (Ding et al. 2024)");
    f("document_mask", document_mask, "tokens attend only to tokens of their own document");
    f("document_positions", document_positions,
      "positions count from the first token of the document within the sample, not from the sample's; needs "
      "document_mask");
    f("begin_token", begin_token,
      "every sample starts with this token and continues with a document from its start; null: samples are "
      "consecutive pieces of the stream of documents");
    f("allow_overlap", allow_overlap,
      "accept a validation set that shares a file or its contents with the training data");
  }
};

struct TrainConfig {
  DeviceChoice device = DeviceChoice::automatic;
  int64_t threads = 0;
  int64_t micro_batch_size = 4;
  int64_t global_batch_size = 16;
  int64_t max_steps = 0;
  int64_t max_tokens = 0;
  uint64_t seed = 1234;
  bool deterministic = true;
  Precision precision = Precision::f32;
  Recompute recompute = Recompute::none;
  double max_grad_norm = 1.0;
  BadStepPolicy on_nonfinite = BadStepPolicy::skip;
  BadStepPolicy on_spike = BadStepPolicy::count;
  double divergence_factor = 1.5;
  std::string init_from;
  std::vector<std::string> init_ignore;
  InitMissing init_missing = InitMissing::refuse;
  std::vector<std::string> init_missing_names;
  bool check_limits = true;

  template <class V>
  void fields(V& f) {
    f("device", device, "auto: a GPU if one is visible and this build has CUDA, else the CPU");
    f("threads", threads,
      "CPU threads per rank; 0: the cores available to this process, divided among the ranks on its machine");
    f("micro_batch_size", micro_batch_size, "samples per forward and backward pass");
    f("global_batch_size", global_batch_size, "samples per optimizer step; a multiple of micro_batch_size");
    f("max_steps", max_steps, "optimizer steps; give either this or max_tokens");
    f("max_tokens", max_tokens,
      "training tokens (20B, 300M, 1e9), from which the number of steps is computed");
    f("seed", seed, "seed of the initial weights and of the data order");
    f("deterministic", deterministic,
      "on a GPU: use only kernels with a deterministic reduction order; false is faster");
    f("precision", precision,
      "storage of weights and activations; bf16 keeps f32 master weights; f64 is for checks");
    f("recompute", recompute, "activations that backward recomputes instead of storing them");
    f("max_grad_norm", max_grad_norm, "clip the global gradient norm to this; 0: no clipping");
    f("on_nonfinite", on_nonfinite,
      "reaction to a loss or gradient norm that is not finite: stop, or skip the update");
    f("on_spike", on_spike,
      "reaction to a loss or gradient norm more than 6 standard deviations above the mean of the last 128 "
      "steps: count, skip or stop");
    f("divergence_factor", divergence_factor,
      "warn when the smoothed loss exceeds its lowest value by this factor; 0: never");
    f("init_from", init_from, "checkpoint or Hugging Face folder that initialises the weights");
    f("init_ignore", init_ignore,
      "keys that may differ from the configuration of init_from, e.g. [model.rope.theta, data.tokenizer]");
    f("init_missing", init_missing,
      "parameters that init_from lacks: refuse, or fresh: new gates, sinks and shared experts start so that "
      "the function of the weights is kept, all others as in a training from scratch");
    f("init_missing_names", init_missing_names,
      "parts of names; only parameters whose name contains one of them may be missing; empty: any");
    f("check_limits", check_limits,
      "refuse to start if the planned memory or disk space exceeds what is available to this process");
  }
};

struct ParameterRule {
  std::string match;
  double lr_multiplier = 1.0;
  std::optional<bool> weight_decay;
  bool trainable = true;

  template <class V>
  void fields(V& f) {
    f("match", match, "the rule applies to parameters whose name contains this text; later rules win");
    f("lr_multiplier", lr_multiplier, "factor on the learning rate");
    f("weight_decay", weight_decay,
      "true or false; null: the layer's own setting (matrices yes, norms and sinks no)");
    f("trainable", trainable, "false: frozen, without gradients, moments or weight decay");
  }
};

/// Muon (Jordan et al. 2024): orthogonalised momentum for the matrices of the blocks. Embedding, output head
/// and all other parameters use AdamW.
struct MuonConfig {
  double lr = 0.02;
  double momentum = 0.95;
  double initial_momentum = 0.85;
  int64_t momentum_warmup_steps = 300;
  bool nesterov = true;
  int64_t newton_schulz_steps = 5;
  double weight_decay = 0.0;

  template <class V>
  void fields(V& f) {
    f("lr", lr, "Muon's peak learning rate; it follows the same schedule");
    f("momentum", momentum, "");
    f("initial_momentum", initial_momentum, "momentum at step 0; it rises linearly to momentum");
    f("momentum_warmup_steps", momentum_warmup_steps, "steps over which it rises");
    f("nesterov", nesterov, "");
    f("newton_schulz_steps", newton_schulz_steps,
      "iterations of the quintic Newton-Schulz orthogonalisation");
    f("weight_decay", weight_decay, "decoupled weight decay of the matrices that Muon updates");
  }
};

struct OptimizerConfig {
  OptimizerType type = OptimizerType::adamw;
  double lr = 1e-3;
  double min_lr = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  Schedule schedule = Schedule::cosine;
  int64_t warmup_steps = 0;
  int64_t decay_steps = 0;
  MuonConfig muon;
  std::vector<ParameterRule> rules;

  template <class V>
  void fields(V& f) {
    f("type", type, "muon: Muon for the matrices of the blocks, AdamW for all other parameters");
    f("lr", lr, "AdamW's peak learning rate");
    f("min_lr", min_lr, "final learning rate of cosine, linear and wsd");
    f("beta1", beta1, "");
    f("beta2", beta2, "");
    f("eps", eps, "");
    f("weight_decay", weight_decay, "decoupled; applied to matrices only unless a rule says otherwise");
    f("schedule", schedule, "shape after the warm-up; wsd holds lr, then decays linearly over decay_steps");
    f("warmup_steps", warmup_steps, "steps of linear warm-up from 0");
    f("decay_steps", decay_steps, "wsd: steps of the final decay; 0: a fifth of the run");
    f("muon", muon, "");
    f("rules", rules, "learning-rate multipliers, weight decay and freezing by parameter name");
  }
};

/// RULER's needles (Hsieh et al. 2024, arXiv 2404.06654) as an evaluation during training
/// (eval/ruler_choice.h).
struct RulerEvalConfig {
  int64_t samples = 0;
  std::vector<std::string> tasks = {"niah_single_1"};
  std::vector<int64_t> lengths;

  template <class V>
  void fields(V& f) {
    f("samples", samples,
      "prompts per task and length, each scored by the log-likelihood of the true value against nine others; "
      "0: off");
    f("tasks", tasks, "niah_single_1, niah_multikey_2 or niah_multikey_3: the needles that need no text");
    f("lengths", lengths, "tokens of a prompt with its value, at most data.seq_len; empty: data.seq_len");
  }
};

struct EvalConfig {
  int64_t every_steps = 0;
  int64_t max_tokens = 0;
  std::vector<std::string> tasks;
  int64_t shots = 0;
  int64_t max_questions = 0;
  std::vector<std::string> prompts;
  int64_t prompt_tokens = 64;
  RulerEvalConfig ruler;

  template <class V>
  void fields(V& f) {
    f("every_steps", every_steps, "steps between validations; 0: validate only at the end");
    f("max_tokens", max_tokens, "tokens evaluated per validation set; 0: all of it");
    f("tasks", tasks,
      "files of multiple-choice questions (JSONL), answered by log-likelihood at every validation");
    f("shots", shots, "solved questions that stand before each question of a task");
    f("max_questions", max_questions, "questions of each task that are answered; 0: all of them");
    f("prompts", prompts, "texts that the model continues at every validation, most probable token first");
    f("prompt_tokens", prompt_tokens, "tokens by which each prompt is continued");
    f("ruler", ruler, "");
  }
};

/// Token ids whose queries and losses are reported apart, such as the triggers of Bigram-Backcopy.
struct QueryClassConfig {
  std::string name;
  std::vector<int64_t> tokens;

  template <class V>
  void fields(V& f) {
    f("name", name, "name of the class in tables and logs");
    f("tokens", tokens, "token ids; each id belongs to at most one class");
  }
};

struct AnalysisConfig {
  std::vector<QueryClassConfig> query_classes;
  double sink_threshold = 0.3;
  int64_t sink_length = 64;

  template <class V>
  void fields(V& f) {
    f("query_classes", query_classes,
      "first-token attention and loss are reported for the queries of each class, and for all others as "
      "\"other\"");
    f("sink_threshold", sink_threshold,
      "a head is counted as a sink if its mean attention on the first token exceeds this (Sink^eps of Gu et "
      "al. 2024)");
    f("sink_length", sink_length,
      "the sink measure is also taken over the first queries of a sample up to this length");
  }
};

struct ParallelConfig {
  int64_t tensor = 1;
  int64_t context = 1;
  int64_t expert = 1;
  double expert_capacity = 2;
  int64_t pipeline = 1;
  int64_t zero_stage = 0;
  GradientDtype gradient_dtype = GradientDtype::f32;
  Determinism determinism = Determinism::same_layout;
  ExactSum exact_sum = ExactSum::tree;
  Transport transport = Transport::automatic;
  double timeout_seconds = 300;
  int64_t verify_every_steps = 50;

  template <class V>
  void fields(V& f) {
    f("tensor", tensor, "tensor-parallel size; 1 in this version");
    f("context", context, "context-parallel size; 1 in this version");
    f("expert", expert, "expert-parallel size; divides num_experts and the number of ranks");
    f("expert_capacity", expert_capacity,
      "receive-buffer capacity per round, as a multiple of the rank's own tokens; overflow takes extra "
      "rounds");
    f("pipeline", pipeline, "pipeline-parallel size; 1 in this version");
    f("zero_stage", zero_stage,
      "state that is sharded over the data-parallel ranks (ZeRO): 0 none, 1 moments, 2 gradients too, 3 "
      "weights too");
    f("gradient_dtype", gradient_dtype,
      "type of gradients in transit between ranks; bf16: stochastic rounding, with sums still in f32");
    f("determinism", determinism,
      "same_layout: bitwise reproducible on the same number of ranks; exact: on any number of ranks");
    f("exact_sum", exact_sum,
      "gradient reduction under exact: a tree over micro-batches (a power of two of them per rank), or "
      "64-bit fixed point");
    f("transport", transport,
      "transport between GPUs; auto: nccl if every rank has its own GPU, else host; host: pinned memory and "
      "MPI");
    f("timeout_seconds", timeout_seconds,
      "end the run after this time without progress and name the rank responsible; 0: never");
    f("verify_every_steps", verify_every_steps,
      "steps between hash comparisons of replicated weights and moments across ranks; 0: never");
  }
};

struct CheckpointConfig {
  int64_t every_steps = 0;
  double every_minutes = 15.0;
  int64_t keep_last = 2;
  int64_t keep_every_steps = 0;
  bool async = true;
  double timeout_seconds = 600.0;

  template <class V>
  void fields(V& f) {
    f("every_steps", every_steps, "steps between checkpoints; 0: only by time and at the end");
    f("every_minutes", every_minutes, "minutes between checkpoints; 0: only by steps and at the end");
    f("keep_last", keep_last,
      "number of checkpoints to keep; older ones are removed once a newer one is complete");
    f("keep_every_steps", keep_every_steps, "checkpoints at multiples of this are never removed; 0: none");
    f("async", async, "write in the background while training continues");
    f("timeout_seconds", timeout_seconds,
      "a save fails if it waits longer than this for the files of another rank");
  }
};

struct LogConfig {
  int64_t every_steps = 10;
  bool tensorboard = true;
  int64_t trace_step = 0;
  int64_t bits = 0;
  ConsoleMode console = ConsoleMode::automatic;

  template <class V>
  void fields(V& f) {
    f("every_steps", every_steps, "steps between entries in metrics.jsonl, TensorBoard and the console");
    f("tensorboard", tensorboard, "write TensorBoard event files to RUN/tb");
    f("trace_step", trace_step,
      "step whose ops are traced to RUN/trace.json, for chrome://tracing or Perfetto; 0: none");
    f("bits", bits,
      "RUN/bits.log: the exact bits of every step's loss and gradient norm, and every this many steps a hash "
      "of weights and moments; 0: off");
    f("console", console, "bar: one rewritten line; auto: bar in a terminal outside a launcher, else lines");
  }
};

struct Config {
  std::string name;
  std::string run_dir;
  ModelConfig model;
  LoraConfig lora;
  DataConfig data;
  TrainConfig train;
  OptimizerConfig optimizer;
  ParallelConfig parallel;
  EvalConfig eval;
  AnalysisConfig analysis;
  CheckpointConfig checkpoint;
  LogConfig log;

  template <class V>
  void fields(V& f) {
    f("name", name, "name of the run; empty: the configuration file's name");
    f("run_dir", run_dir, "run folder, relative to the working folder; empty: runs/NAME");
    f("model", model, "");
    f("lora", lora, "");
    f("data", data, "");
    f("train", train, "");
    f("optimizer", optimizer, "");
    f("parallel", parallel, "");
    f("eval", eval, "");
    f("analysis", analysis, "");
    f("checkpoint", checkpoint, "");
    f("log", log, "");
  }
};

}  // namespace sluice
