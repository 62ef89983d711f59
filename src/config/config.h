#pragma once
// The configuration = the YAML, section by section. One member and one fields() line per key: name, storage,
// help; the default is the member's initialiser. Reading, writing, printing, comparing and the reference are
// visitors (fields.h). Immutable after load_config().
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
enum class AttentionKind : uint8_t { softmax, sink };
enum class GatePosition : uint8_t { query, key, value, sdpa_output, dense_output };
enum class GateGranularity : uint8_t { elementwise, headwise };
enum class GateInput : uint8_t { hidden, none };
enum class OutputNorm : uint8_t { none, rmsnorm, rmsnorm_shared };
enum class OutputActivation : uint8_t { none, silu };
enum class TokenizerType : uint8_t { byte, sentencepiece };
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
enum class BalanceScope : uint8_t { global_batch, micro_batch, previous_step };
enum class Determinism : uint8_t { same_layout, exact };
enum class ExactSum : uint8_t { tree, fixed64 };
enum class GradientDtype : uint8_t { f32, bf16 };
enum class Transport : uint8_t { automatic, nccl, host };
enum class Schedule : uint8_t { constant, cosine, linear, wsd };
enum class ConsoleMode : uint8_t { automatic, bar, lines, none };

SLUICE_ENUM_NAMES(NormPlacement, "pre", "sandwich");
SLUICE_ENUM_NAMES(RopeScalingType, "none", "yarn");
SLUICE_ENUM_NAMES(AttentionKind, "softmax", "sink");
SLUICE_ENUM_NAMES(GatePosition, "query", "key", "value", "sdpa_output", "dense_output");
SLUICE_ENUM_NAMES(GateGranularity, "elementwise", "headwise");
SLUICE_ENUM_NAMES(GateSharing, "specific", "shared", "shared_before_activation");
SLUICE_ENUM_NAMES(GateCombine, "multiply", "add");
SLUICE_ENUM_NAMES(GateActivation, "sigmoid", "silu", "identity", "ns_sigmoid");
SLUICE_ENUM_NAMES(AttentionKernel, "auto", "mma", "hopper", "cudnn");
SLUICE_ENUM_NAMES(GateInput, "hidden", "none");
SLUICE_ENUM_NAMES(OutputNorm, "none", "rmsnorm", "rmsnorm_shared");
SLUICE_ENUM_NAMES(OutputActivation, "none", "silu");
SLUICE_ENUM_NAMES(TokenizerType, "byte", "sentencepiece");
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
    f("type", type, "context extension of a trained model");
    f("factor", factor, "YaRN: new length / original length");
    f("original_max_position_embeddings", original_max_position_embeddings,
      "YaRN: length the model was trained at");
    f("beta_fast", beta_fast, "YaRN: rotations above which a dimension is left alone");
    f("beta_slow", beta_slow, "YaRN: rotations below which a dimension is interpolated fully");
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

  template <class V>
  void fields(V& f) {
    f("position", position, "what is gated: G4 query, G3 key, G2 value, G1 sdpa_output, G5 dense_output");
    f("granularity", granularity, "one score per channel or per head");
    f("heads", heads,
      "a score of its own per head, or scores averaged over heads (after or before the activation)");
    f("combine", combine, "x * score or x + score");
    f("activation", activation, "ns_sigmoid is 0.5 + 0.5 sigmoid");
    f("input", input,
      "hidden: the pre-normalised hidden state of the current token; none: a learned constant");
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
      "of the loss that evens out how much each head is open; 0: none (1e-4 from scratch, 1e-2 in "
      "fine-tuning)");
    f("scope", scope,
      "tokens that a head's importance is the mean over; previous_step: the gradient sees the step before, "
      "of all ranks");
    f("shared_heads", shared_heads,
      "heads of a layer that are most important and left out of the loss (equation 8)");
    f("shared_from", shared_from, "which those are: told once by the first samples, or by every scope anew");
    f("calibration_samples", calibration_samples, "");
    f("ddof", ddof, "of the deviation over heads: 1 divides by heads - 1, 0 by heads");
    f("skip_first", skip_first,
      "softmax attention: a sequence's first token, which can only see itself, does not count");
  }
};

/// Switch heads (the Gated Attention paper, appendix A.1): each key/value head has experts of its own.
struct SwitchHeadsConfig {
  int64_t num_experts = 0;
  int64_t num_experts_per_tok = 1;
  SwitchProjections projections = SwitchProjections::value;
  int64_t expert_width = 0;

  template <class V>
  void fields(V& f) {
    f("num_experts", num_experts, "value projections of each key/value head; 0: one, without a router");
    f("num_experts_per_tok", num_experts_per_tok,
      "those of largest sigmoid score, whose outputs are added, times their scores");
    f("projections", projections, "what has experts: values, or keys too, with a router of their own");
    f("expert_width", expert_width,
      "channels that an expert writes: expert e those from e * width on, modulo head_dim; 0: head_dim");
  }
};

struct AttentionConfig {
  AttentionKind kind = AttentionKind::softmax;
  std::vector<GateConfig> gates;
  OutputNorm output_norm = OutputNorm::none;
  OutputActivation output_activation = OutputActivation::none;
  SwitchHeadsConfig switch_heads;
  HeadBalanceConfig head_balance;
  AttentionKernel kernel = AttentionKernel::automatic;

  template <class V>
  void fields(V& f) {
    f("kind", kind, "sink adds one learned logit per head to the softmax, without a value");
    f("gates", gates, "any number of gates; several positions at once are allowed");
    f("output_norm", output_norm,
      "RMSNorm per head before o_proj; rmsnorm_shared shares its weight between heads");
    f("output_activation", output_activation, "activation on the attention output before o_proj");
    f("switch_heads", switch_heads, "");
    f("head_balance", head_balance, "");
    f("kernel", kernel,
      "on a GPU: auto takes the fastest of the house's own, cudnn is there to race against");
  }
};

struct LoadBalanceConfig {
  double coefficient = 1e-2;
  BalanceScope scope = BalanceScope::global_batch;

  template <class V>
  void fields(V& f) {
    f("coefficient", coefficient, "of the load-balancing loss, which is 1 at perfect balance; 0: none");
    f("scope", scope,
      "over which tokens experts' shares are counted: the optimizer step's so far, the micro-batch's, or all "
      "of the step before");
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
    f("num_experts", num_experts, "0: every feed-forward network is dense");
    f("num_experts_per_tok", num_experts_per_tok,
      "experts that a token goes to: those of largest probability, ties to the lower id");
    f("moe_intermediate_size", moe_intermediate_size, "width of one expert");
    f("norm_topk_prob", norm_topk_prob, "the chosen experts' probabilities are divided by their sum");
    f("shared_expert_intermediate_size", shared_expert_intermediate_size,
      "width of an expert that every token goes to; 0: none");
    f("shared_expert_gate", shared_expert_gate,
      "a sigmoid of the hidden state scales the shared expert (Qwen3-Next)");
    f("decoder_sparse_step", decoder_sparse_step, "layer i has experts where i + 1 is a multiple of this");
    f("mlp_only_layers", mlp_only_layers, "layers, counted from 0, that stay dense nevertheless");
    f("load_balance", load_balance, "");
    f("router_z_loss_coefficient", router_z_loss_coefficient,
      "of the mean squared log-sum-exp of the router's logits (ST-MoE); 0: none");
  }

  /// Whether layer `i` has experts.
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
  std::optional<double> branch_clip;
  std::optional<int64_t> max_position_embeddings;
  RopeConfig rope;
  AttentionConfig attention;
  MoeConfig moe;
  std::string match_parameters_of;
  int64_t match_multiple = 1;

  template <class V>
  void fields(V& f) {
    f("vocab_size", vocab_size, "0: the tokenizer's");
    f("hidden_size", hidden_size, "");
    f("num_hidden_layers", num_hidden_layers, "");
    f("num_attention_heads", num_attention_heads, "");
    f("num_key_value_heads", num_key_value_heads, "divides num_attention_heads (grouped-query attention)");
    f("head_dim", head_dim, "even; independent of hidden_size / num_attention_heads");
    f("intermediate_size", intermediate_size,
      "width of the SwiGLU feed-forward network of layers without experts");
    f("tie_word_embeddings", tie_word_embeddings, "the head is the embedding");
    f("rms_norm_eps", rms_norm_eps, "");
    f("hidden_act", hidden_act, "silu: SwiGLU; relu2: down(relu(up x)^2), without a gate");
    f("norm_weights", norm_weights, "false: RMSNorm without weights, everywhere");
    f("initializer", initializer,
      "fan_in: matrices by their shape, embedding 1, head and branches' outputs 0 (nanochat)");
    f("initializer_range", initializer_range, "standard deviation of every matrix at step 0, gates included");
    f("scaled_residual_init", scaled_residual_init,
      "o_proj and down_proj start at initializer_range / sqrt(2 layers)");
    f("qk_norm", qk_norm, "RMSNorm of queries and keys per head");
    f("qk_norm_order", qk_norm_order, "where it stands");
    f("embedding_norm", embedding_norm, "RMSNorm of the embedded tokens, before the first block");
    f("final_logit_softcapping", final_logit_softcapping, "c: logits become c tanh(logits / c)");
    f("logit_z_loss_coefficient", logit_z_loss_coefficient,
      "of the mean squared log-sum-exp of the output logits, added to the loss (PaLM); 0: none");
    f("norm_placement", norm_placement,
      "sandwich also normalises each branch's output before the residual addition");
    f("branch_clip", branch_clip,
      "clamp attention and feed-forward outputs to [-c, c] before the residual addition");
    f("max_position_embeddings", max_position_embeddings, "length of the rotary table; null: data.seq_len");
    f("rope", rope, "");
    f("attention", attention, "");
    f("moe", moe, "");
    f("match_parameters_of", match_parameters_of,
      "a configuration whose parameter count this model matches by narrowing intermediate_size (with "
      "experts: theirs)");
    f("match_multiple", match_multiple, "the matched width becomes a multiple of this (rounded down)");
  }
};

/// Low-rank adapters (Hu et al. 2021): W + (alpha / rank) B A with W fixed.
struct LoraConfig {
  int64_t rank = 0;
  double alpha = 32.0;
  std::vector<std::string> targets = {"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                      "gate_proj", "up_proj", "down_proj"};

  template <class V>
  void fields(V& f) {
    f("rank", rank,
      "of the adapters that are trained, everything else being fixed; 0: the model itself is trained");
    f("alpha", alpha, "their output is scaled by alpha / rank");
    f("targets", targets, "matrices that get one, by the last part of their name");
  }
};

struct TokenizerConfig {
  TokenizerType type = TokenizerType::byte;
  std::string path;

  template <class V>
  void fields(V& f) {
    f("type", type, "byte: 256 bytes and <|endoftext|> = 256; sentencepiece: a .model file");
    f("path", path, "the tokenizer's file, relative to the file that names it");
  }
};

struct DataSource {
  std::string name;
  std::string path;
  double weight = 1.0;

  template <class V>
  void fields(V& f) {
    f("name", name, "how the source is called in logs");
    f("path", path, "PREFIX of PREFIX.bin/.idx, or a glob of .bin files, relative to the file that names it");
    f("weight", weight, "share of the samples; weights are normalised (unused for validation)");
  }
};

struct DataConfig {
  TokenizerConfig tokenizer;
  int64_t seq_len = 256;
  std::vector<DataSource> train;
  std::vector<DataSource> validation;
  bool document_mask = false;
  bool allow_overlap = false;

  template <class V>
  void fields(V& f) {
    f("tokenizer", tokenizer, "");
    f("seq_len", seq_len, "tokens per sample");
    f("train", train, "weighted blend of token files");
    f("validation", validation, "each is evaluated and reported under its name");
    f("document_mask", document_mask, "tokens see only their own document");
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
  bool check_limits = true;

  template <class V>
  void fields(V& f) {
    f("device", device, "auto takes a GPU where there is one and this build has CUDA");
    f("threads", threads,
      "CPU threads; 0: the cores that this process may use, shared with the other ranks of its machine");
    f("micro_batch_size", micro_batch_size, "samples computed at once");
    f("global_batch_size", global_batch_size, "samples per optimizer step; a multiple of micro_batch_size");
    f("max_steps", max_steps, "optimizer steps; give this or max_tokens");
    f("max_tokens", max_tokens, "20B, 300M, 1e9: training tokens; steps are computed from it");
    f("seed", seed, "of the initial weights and the data order");
    f("deterministic", deterministic, "on a GPU: no sum whose order varies from run to run; false is faster");
    f("precision", precision,
      "storage of weights and activations; bf16 keeps f32 master weights; f64 is for checks");
    f("recompute", recompute, "activations computed again in backward instead of kept");
    f("max_grad_norm", max_grad_norm, "clip the global gradient norm to this; 0: no clipping");
    f("on_nonfinite", on_nonfinite,
      "a step whose loss or gradient norm is not finite: stop, or skip its update");
    f("on_spike", on_spike,
      "a step whose loss or gradient norm is 6 deviations above the last 128: count, skip or stop");
    f("divergence_factor", divergence_factor,
      "warn when the smoothed loss exceeds its lowest value by this factor; 0: never");
    f("init_from", init_from, "checkpoint or Hugging Face folder to take the first weights from");
    f("init_ignore", init_ignore,
      "keys that may differ from the configuration of init_from, e.g. [model.rope.theta, data.tokenizer]");
    f("check_limits", check_limits,
      "refuse to start where the planned memory or disk space exceeds what this process may use");
  }
};

struct ParameterRule {
  std::string match;
  double lr_multiplier = 1.0;
  std::optional<bool> weight_decay;
  bool trainable = true;

  template <class V>
  void fields(V& f) {
    f("match", match, "the rule holds for parameters whose name contains this; later rules win");
    f("lr_multiplier", lr_multiplier, "");
    f("weight_decay", weight_decay,
      "true or false; null: as the layer says (matrices yes, norms and sinks no)");
    f("trainable", trainable, "false: frozen, without gradients, moments and weight decay");
  }
};

/// Momentum, orthogonalised (Jordan et al. 2024): for the blocks' matrices; the rest, and embedding and head,
/// go to AdamW.
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
    f("lr", lr, "its own peak, in the schedule's shape");
    f("momentum", momentum, "");
    f("initial_momentum", initial_momentum, "at step 0, then linearly to momentum");
    f("momentum_warmup_steps", momentum_warmup_steps, "");
    f("nesterov", nesterov, "");
    f("newton_schulz_steps", newton_schulz_steps, "iterations of the quintic that orthogonalises");
    f("weight_decay", weight_decay, "decoupled");
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
    f("type", type, "muon: for the blocks' matrices, with AdamW for the rest");
    f("lr", lr, "AdamW's peak learning rate");
    f("min_lr", min_lr, "where cosine, linear and wsd end");
    f("beta1", beta1, "");
    f("beta2", beta2, "");
    f("eps", eps, "");
    f("weight_decay", weight_decay, "decoupled; on matrices only unless a rule says otherwise");
    f("schedule", schedule, "shape after the warm-up; wsd holds lr, then falls linearly over decay_steps");
    f("warmup_steps", warmup_steps, "linear from 0");
    f("decay_steps", decay_steps, "wsd: length of the final fall; 0: a fifth of the run");
    f("muon", muon, "");
    f("rules", rules, "learning-rate multipliers and decay masks by parameter name");
  }
};

struct EvalConfig {
  int64_t every_steps = 0;
  int64_t max_tokens = 0;

  template <class V>
  void fields(V& f) {
    f("every_steps", every_steps, "validate this often; 0: only at the end");
    f("max_tokens", max_tokens, "per validation set; 0: all of it");
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
    f("tensor", tensor, "ranks that share every layer; 1 in this version");
    f("context", context, "ranks that share a sequence; 1 in this version");
    f("expert", expert, "ranks that share the experts; divides num_experts and the number of ranks");
    f("expert_capacity", expert_capacity,
      "rows that a rank takes in for its experts at once, times its own; more come in extra rounds");
    f("pipeline", pipeline, "ranks that share the layers; 1 in this version");
    f("zero_stage", zero_stage,
      "what ranks share rather than repeat (ZeRO): 0 nothing, 1 moments, 2 gradients too, 3 weights too");
    f("gradient_dtype", gradient_dtype,
      "how gradients travel between ranks; bf16: rounded up or down at random, summed in f32 all the same");
    f("determinism", determinism,
      "same_layout: the same bits again on as many ranks; exact: on any number of them");
    f("exact_sum", exact_sum,
      "of gradients, when exact: a tree over micro-batches (each rank takes a power of two), or 64-bit fixed "
      "point");
    f("transport", transport,
      "between GPUs; auto: nccl where every rank has one of its own; host: through pinned memory and MPI");
    f("timeout_seconds", timeout_seconds,
      "ranks without progress for so long end, and the one to blame is named; 0: never");
    f("verify_every_steps", verify_every_steps,
      "compare a hash of the weights and moments that ranks hold replicas of this often; 0: never");
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
    f("every_steps", every_steps, "0: only by time and at the end");
    f("every_minutes", every_minutes, "0: only by steps and at the end");
    f("keep_last", keep_last, "older checkpoints are removed once a newer one is complete");
    f("keep_every_steps", keep_every_steps, "checkpoints at multiples of this are never removed; 0: none");
    f("async", async, "write in the background while training goes on");
    f("timeout_seconds", timeout_seconds, "a save that waits longer for the files of a rank has failed");
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
    f("every_steps", every_steps, "metrics.jsonl, TensorBoard and console lines");
    f("tensorboard", tensorboard, "write event files to RUN/tb");
    f("trace_step", trace_step,
      "write RUN/trace.json of this step, op by op, for chrome://tracing or Perfetto; 0: none");
    f("bits", bits,
      "RUN/bits.log: bits of every step's loss and gradient norm, and every so many steps a hash of weights "
      "and moments; 0: none");
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
  CheckpointConfig checkpoint;
  LogConfig log;

  template <class V>
  void fields(V& f) {
    f("name", name, "of the run; empty: the configuration file's name");
    f("run_dir", run_dir, "where the run is kept, relative to the working folder; empty: runs/NAME");
    f("model", model, "");
    f("lora", lora, "");
    f("data", data, "");
    f("train", train, "");
    f("optimizer", optimizer, "");
    f("parallel", parallel, "");
    f("eval", eval, "");
    f("checkpoint", checkpoint, "");
    f("log", log, "");
  }
};

}  // namespace sluice
