#include "config/validate.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "config/attention_rules.h"
#include "config/gate_rules.h"
#include "config/load.h"
#include "config/model_function.h"
#include "config/sparse_rules.h"
#include "config/task_rules.h"
#include "core/device.h"
#include "core/error.h"
#include "core/score_range.h"

namespace sluice {
namespace {

constexpr int64_t kMaxLayers = 10000;

void check_sizes(const ModelConfig& m, const DataConfig& data, Checks& check) {
  check.size("model.vocab_size", m.vocab_size, 0);
  check.require(
      m.vocab_size == 0 || data.tokenizer.type != TokenizerType::byte || m.vocab_size >= 257,
      {"model.vocab_size", "data.tokenizer.type"},
      fmt::format("model.vocab_size is {}, but the byte tokenizer has 257 tokens; use 0 or at least 257",
                  m.vocab_size));
  check.size("model.hidden_size", m.hidden_size);
  check.size("model.num_hidden_layers", m.num_hidden_layers);
  check.require(m.num_hidden_layers <= kMaxLayers || m.num_hidden_layers > kMaxSize,
                {"model.num_hidden_layers"},
                fmt::format("model.num_hidden_layers = {} is above the {} that this version is built for",
                            m.num_hidden_layers, kMaxLayers));
  check.size("model.num_attention_heads", m.num_attention_heads);
  check.size("model.num_key_value_heads", m.num_key_value_heads);
  check.size("model.head_dim", m.head_dim);
  check.size("model.intermediate_size", m.intermediate_size);
  if (m.num_attention_heads > 0 && m.num_key_value_heads > 0) {
    std::string fits;
    for (int64_t k = 1; k <= std::min<int64_t>(m.num_attention_heads, 64); ++k)
      if (m.num_attention_heads % k == 0) fits += fmt::format("{}{}", fits.empty() ? "" : ", ", k);
    check.require(
        m.num_attention_heads % m.num_key_value_heads == 0,
        {"model.num_key_value_heads", "model.num_attention_heads"},
        fmt::format("model.num_key_value_heads = {} does not divide num_attention_heads = {}; possible: {}",
                    m.num_key_value_heads, m.num_attention_heads, fits));
  }
  check.require(m.head_dim <= 0 || m.head_dim % 2 == 0, {"model.head_dim"},
                fmt::format("model.head_dim must be even (rotary pairs), got {}", m.head_dim));
  check.require(m.num_attention_heads <= 0 || m.num_attention_heads > kMaxSize || m.head_dim <= 0 ||
                    m.head_dim <= kMaxSize / m.num_attention_heads,
                {"model.num_attention_heads", "model.head_dim"},
                fmt::format("model.num_attention_heads = {} heads of head_dim = {} are too large together",
                            m.num_attention_heads, m.head_dim));
}

void check_initializer(const ModelConfig& m, Checks& check) {
  check.positive("model.initializer_range", m.initializer_range);
  const bool fan_in = m.initializer == Initializer::fan_in;
  check.require(!fan_in || !m.tie_word_embeddings, {"model.initializer", "model.tie_word_embeddings"},
                "model.initializer: fan_in initialises the embedding with deviation 1 and the output head "
                "with 0, so they "
                "cannot be one matrix; set tie_word_embeddings: false");
  check.require(
      !fan_in || !m.scaled_residual_init, {"model.scaled_residual_init", "model.initializer"},
      "model.scaled_residual_init has no effect with initializer: fan_in, which initialises o_proj and "
      "down_proj to 0");
}

void check_rope(const ModelConfig& m, Checks& check) {
  check.require(m.rope.theta > 1, {"model.rope.theta"},
                fmt::format("model.rope.theta must be greater than 1, got {}", m.rope.theta));
  const RopeScalingConfig& scaling = m.rope.scaling;
  check.require(scaling.factor >= 1, {"model.rope.scaling.factor"},
                fmt::format("model.rope.scaling.factor must be at least 1, got {}", scaling.factor));
  check.require(scaling.type != RopeScalingType::none || scaling.factor <= 1,
                {"model.rope.scaling.factor", "model.rope.scaling.type"},
                fmt::format("model.rope.scaling.factor = {} has no effect while type is none; set type: yarn",
                            scaling.factor));
  check.size("model.rope.scaling.original_max_position_embeddings", scaling.original_max_position_embeddings);
  check.positive("model.rope.scaling.beta_slow", scaling.beta_slow);
  check.require(scaling.beta_fast > scaling.beta_slow,
                {"model.rope.scaling.beta_fast", "model.rope.scaling.beta_slow"},
                fmt::format("model.rope.scaling.beta_fast = {} must be greater than beta_slow = {}",
                            scaling.beta_fast, scaling.beta_slow));
}

void check_model(const ModelConfig& m, const DataConfig& data, Checks& check) {
  check_sizes(m, data, check);
  check.positive("model.rms_norm_eps", m.rms_norm_eps);
  if (m.branch_clip) check.positive("model.branch_clip", *m.branch_clip);
  check.not_negative("model.logit_z_loss_coefficient", m.logit_z_loss_coefficient);
  if (m.final_logit_softcapping) check.positive("model.final_logit_softcapping", *m.final_logit_softcapping);
  check.require(m.qk_norm || m.qk_norm_order == QkNormOrder::before_rope,
                {"model.qk_norm_order", "model.qk_norm"},
                "model.qk_norm_order: after_rope has no effect while qk_norm is false");
  check_initializer(m, check);
  if (m.max_position_embeddings) {
    check.size("model.max_position_embeddings", *m.max_position_embeddings);
    check.require(*m.max_position_embeddings <= 0 || data.seq_len <= *m.max_position_embeddings,
                  {"data.seq_len", "model.max_position_embeddings"},
                  fmt::format("data.seq_len = {} is longer than model.max_position_embeddings = {}",
                              data.seq_len, *m.max_position_embeddings));
  }
  check.size("model.match_multiple", m.match_multiple);
  check_rope(m, check);
  check_gates(m, check);
  check_attention(m, check);
}

void check_switch_heads(const ModelConfig& m, Checks& check) {
  const SwitchHeadsConfig& s = m.attention.switch_heads;
  const std::string keys = "model.attention.switch_heads";
  const std::string experts = keys + ".num_experts", chosen = keys + ".num_experts_per_tok",
                    width = keys + ".expert_width";
  check.size(experts, s.num_experts, 0);
  check.size(chosen, s.num_experts_per_tok);
  check.size(width, s.expert_width, 0);
  if (s.num_experts < 0 || s.num_experts_per_tok < 1 || s.expert_width < 0 || m.head_dim < 1) return;
  if (s.num_experts == 0) {
    const SwitchHeadsConfig none;
    const auto no_effect = [&](const std::string& key, bool given) {
      check.require(!given, {key, experts}, key + " has no effect while num_experts is 0");
    };
    no_effect(chosen, s.num_experts_per_tok != none.num_experts_per_tok);
    no_effect(width, s.expert_width != none.expert_width);
    no_effect(keys + ".projections", s.projections != none.projections);
    return;
  }
  check.require(
      s.num_experts <= kMaxExperts, {experts},
      fmt::format("{} = {} is above the {} that routers are built for", experts, s.num_experts, kMaxExperts));
  check.require(
      s.num_experts_per_tok <= s.num_experts, {chosen, experts},
      fmt::format("{} = {} is more than num_experts = {}", chosen, s.num_experts_per_tok, s.num_experts));
  check.require(s.num_experts_per_tok <= kMaxExpertsPerToken, {chosen},
                fmt::format("{} = {} is above the {} that routers are built for", chosen,
                            s.num_experts_per_tok, kMaxExpertsPerToken));
  if (s.expert_width == 0) return;
  check.require(
      m.head_dim % s.expert_width == 0, {width, "model.head_dim"},
      fmt::format("{} = {} does not divide model.head_dim = {}", width, s.expert_width, m.head_dim));
  if (s.num_experts > kMaxExperts || s.expert_width > m.head_dim || m.head_dim > kMaxSize)
    return;  // reported
  check.require(
      s.num_experts * s.expert_width >= m.head_dim, {width, experts},
      fmt::format("{} = {}: {} experts never write the last {} of a head's {} channels", width,
                  s.expert_width, s.num_experts, m.head_dim - s.num_experts * s.expert_width, m.head_dim));
}

void check_moe(const ModelConfig& m, Checks& check) {
  const MoeConfig& e = m.moe;
  check.size("model.moe.num_experts", e.num_experts, 0);
  check.size("model.moe.num_experts_per_tok", e.num_experts_per_tok);
  check.size("model.moe.moe_intermediate_size", e.moe_intermediate_size);
  check.size("model.moe.shared_expert_intermediate_size", e.shared_expert_intermediate_size, 0);
  check.size("model.moe.decoder_sparse_step", e.decoder_sparse_step);
  check.not_negative("model.moe.load_balance.coefficient", e.load_balance.coefficient);
  check.not_negative("model.moe.router_z_loss_coefficient", e.router_z_loss_coefficient);
  check.require(
      e.num_experts != 1, {"model.moe.num_experts"},
      "model.moe.num_experts = 1 is a dense network; use 0 and intermediate_size, or at least 2 experts");
  if (e.num_experts <= 1 || e.decoder_sparse_step <= 0) return;
  check.require(
      m.hidden_act == HiddenAct::silu, {"model.hidden_act", "model.moe.num_experts"},
      "model.hidden_act: relu2 is for dense networks; experts are SwiGLU in this version: use silu");
  check.require(e.num_experts <= kMaxExperts, {"model.moe.num_experts"},
                fmt::format("model.moe.num_experts = {} is above the {} that routers are built for",
                            e.num_experts, kMaxExperts));
  check.require(e.num_experts_per_tok <= e.num_experts,
                {"model.moe.num_experts_per_tok", "model.moe.num_experts"},
                fmt::format("model.moe.num_experts_per_tok = {} is more than num_experts = {}",
                            e.num_experts_per_tok, e.num_experts));
  check.require(e.num_experts_per_tok <= kMaxExpertsPerToken, {"model.moe.num_experts_per_tok"},
                fmt::format("model.moe.num_experts_per_tok = {} is above the {} that routers are built for",
                            e.num_experts_per_tok, kMaxExpertsPerToken));
  check.require(!e.shared_expert_gate || e.shared_expert_intermediate_size > 0,
                {"model.moe.shared_expert_gate", "model.moe.shared_expert_intermediate_size"},
                "model.moe.shared_expert_gate needs a shared expert; give shared_expert_intermediate_size");
  int64_t with_experts = 0;
  for (int64_t layer = 0; layer < std::min<int64_t>(m.num_hidden_layers, 1 << 16); ++layer)
    with_experts += e.in_layer(layer);
  if (m.num_hidden_layers <= 0) return;  // reported
  for (const int64_t layer : e.mlp_only_layers)
    check.require(layer >= 0 && layer < m.num_hidden_layers,
                  {"model.moe.mlp_only_layers", "model.num_hidden_layers"},
                  fmt::format("model.moe.mlp_only_layers names layer {}, but layers are 0 to {}", layer,
                              m.num_hidden_layers - 1));
  check.require(
      with_experts > 0, {"model.moe.num_experts"},
      fmt::format(
          "model.moe.num_experts = {}, but decoder_sparse_step and mlp_only_layers leave no layer with "
          "experts; set num_experts: 0 for a dense model",
          e.num_experts));
}

/// "sigmoid or ns_sigmoid": the activations whose scores are in [0, 1].
std::string activations_in_range() {
  std::string names;
  for (size_t i = 0; i < EnumNames<GateActivation>::names.size(); ++i)
    if (score_range(static_cast<GateActivation>(i)))
      names += (names.empty() ? "" : " or ") + std::string(EnumNames<GateActivation>::names[i]);
  return names;
}

/// A head's importance is measured by the scores of the first gate at sdpa_output, if there is one. They must
/// multiply, lie in [0, 1] and be separate for each head.
void check_head_balance(const Config& c, Checks& check) {
  const ModelConfig& m = c.model;
  const HeadBalanceConfig& b = m.attention.head_balance;
  const std::string at = "model.attention.head_balance.";
  check.not_negative(at + "coefficient", b.coefficient);
  check.count(at + "shared_heads", b.shared_heads);
  check.size(at + "calibration_samples", b.calibration_samples);
  check.require(b.ddof == 0 || b.ddof == 1, {at + "ddof"},
                fmt::format("{}ddof must be 0 or 1, got {}", at, b.ddof));
  if (!(b.coefficient > 0)) return;
  check.require(
      m.num_attention_heads <= 0 || b.shared_heads < 0 || m.num_attention_heads - b.shared_heads >= 2,
      {at + "shared_heads", "model.num_attention_heads"},
      fmt::format("{}shared_heads = {} leaves fewer than 2 of {} heads to balance", at, b.shared_heads,
                  m.num_attention_heads));
  check.require(
      m.num_attention_heads <= 1024, {"model.num_attention_heads"},
      fmt::format("model.num_attention_heads = {} is above the 1024 that {}coefficient is built for",
                  m.num_attention_heads, at));
  check.require(
      c.parallel.determinism != Determinism::exact || b.scope == HeadBalanceScope::micro_batch ||
          b.scope == HeadBalanceScope::previous_step,
      {at + "scope", "parallel.determinism"},
      at + "scope depends on which rank computes which micro-batch; with parallel.determinism: exact use "
           "micro_batch or previous_step");
  for (size_t i = 0; i < m.attention.gates.size(); ++i) {
    const GateConfig& gate = m.attention.gates[i];
    if (gate.position != GatePosition::sdpa_output) continue;
    const std::string key = fmt::format("model.attention.gates[{}]", i);
    const std::string tail =
        ", so they do not measure a head's importance; set " + at + "coefficient: 0, or ";
    check.require(score_range(gate.activation).has_value(), {key + ".activation", at + "coefficient"},
                  key + ".activation: scores are not in [0, 1]" + tail + "use " + activations_in_range());
    check.require(gate.combine == GateCombine::multiply, {key + ".combine", at + "coefficient"},
                  key + ".combine: scores are added" + tail + "use multiply");
    check.require(gate.heads == GateSharing::specific, {key + ".heads", at + "coefficient"},
                  key + ".heads: all heads have the same scores" + tail + "use specific");
    return;
  }
}

void check_gradient_dtype(const Config& c, Checks& check) {
  check.require(c.parallel.gradient_dtype == GradientDtype::f32 || c.train.precision != Precision::f64,
                {"parallel.gradient_dtype", "train.precision"},
                "parallel.gradient_dtype: bf16 is available only for gradients computed in f32; with "
                "precision f64 use f32");
}

/// Rows of a micro-batch are counted in 32 bits.
void check_micro_batch(const Config& c, Checks& check) {
  const int64_t samples = c.train.micro_batch_size, length = c.data.seq_len;
  if (samples < 1 || length < 1 || samples > kMaxSize || length > kMaxSize) return;
  check.require(
      samples * length <= kMaxSize, {"train.micro_batch_size", "data.seq_len"},
      fmt::format("train.micro_batch_size = {} samples of data.seq_len = {} tokens are more than the "
                  "{} that a micro-batch may hold",
                  samples, length, kMaxSize));
  const int64_t experts = c.model.moe.num_experts_per_tok;
  check.require(
      c.model.moe.num_experts <= 0 || experts < 1 || samples * length > kMaxSize ||
          samples * length <= kMaxSize / experts,
      {"train.micro_batch_size", "data.seq_len", "model.moe.num_experts_per_tok"},
      fmt::format("train.micro_batch_size = {} samples of data.seq_len = {} tokens, each to {} experts, "
                  "are more than the {} rows that a micro-batch may have",
                  samples, length, experts, kMaxSize));
}

/// Every rank of an expert-parallel group holds the same number of experts.
void check_expert_ranks(const Config& c, Checks& check) {
  const int64_t ranks = c.parallel.expert, experts = c.model.moe.num_experts;
  if (ranks <= 1) return;
  check.require(
      experts > 0, {"parallel.expert", "model.moe.num_experts"},
      fmt::format("parallel.expert = {} needs experts, but model.moe.num_experts is 0; use 1", ranks));
  check.require(
      experts % ranks == 0, {"parallel.expert", "model.moe.num_experts"},
      fmt::format("parallel.expert = {} does not divide model.moe.num_experts = {}", ranks, experts));
}

void check_sources(const std::vector<DataSource>& sources, const std::string& list, Checks& check) {
  std::set<std::string> names;
  for (size_t i = 0; i < sources.size(); ++i) {
    const DataSource& source = sources[i];
    const std::string key = fmt::format("{}[{}]", list, i);
    check.require(!source.name.empty(), {key + ".name", key}, key + " needs a name");
    check.require(source.name.empty() || names.insert(source.name).second, {key + ".name"},
                  fmt::format("{}.name: {} is used twice in {}", key, source.name, list));
    check.require(source.name.find_first_of("/\\\n\t ") == std::string::npos, {key + ".name"},
                  fmt::format("{}.name must not contain slashes or spaces, got \"{}\"", key, source.name));
    check.require(!source.path.empty(), {key + ".path", key}, key + " needs a path");
    check.positive(key + ".weight", source.weight);
  }
}

void check_data(const DataConfig& d, Checks& check) {
  check.require(d.tokenizer.type != TokenizerType::sentencepiece || !d.tokenizer.path.empty(),
                {"data.tokenizer.type", "data.tokenizer.path"},
                "data.tokenizer.path must name the .model file of the sentencepiece tokenizer");
  check.require(d.tokenizer.type != TokenizerType::bpe || !d.tokenizer.path.empty(),
                {"data.tokenizer.type", "data.tokenizer.path"},
                "data.tokenizer.path must name the tokenizer.json of the bpe tokenizer");
  check.require(d.tokenizer.type != TokenizerType::byte || d.tokenizer.path.empty(),
                {"data.tokenizer.path", "data.tokenizer.type"},
                "data.tokenizer.path has no effect while type is byte; set type: sentencepiece or bpe");
  check.require(d.tokenizer.type == TokenizerType::bpe || d.tokenizer.end_of_document.empty(),
                {"data.tokenizer.end_of_document", "data.tokenizer.type"},
                "data.tokenizer.end_of_document has an effect only where type is bpe");
  check.size("data.seq_len", d.seq_len);
  check.require(!d.document_positions || d.document_mask, {"data.document_positions", "data.document_mask"},
                "data.document_positions: tokens of several documents would share positions and see each "
                "other; set document_mask: true");
  check.require(d.packing == Packing::stream || !d.begin_token, {"data.packing", "data.begin_token"},
                "data.packing: documents and begin_token are two ways to begin samples with a document; give "
                "one of them");
  check_sources(d.train, "data.train", check);
  check_sources(d.validation, "data.validation", check);
}

void check_analysis(const Config& c, Checks& check) {
  // With a vocab_size of 0 a SentencePiece model says how many tokens there are, and resolve_model checks.
  const bool bytes = c.data.tokenizer.type == TokenizerType::byte;
  const int64_t vocab_size = c.model.vocab_size > 0 ? c.model.vocab_size : bytes ? 257 : kMaxSize;
  const auto is_id = [&](int64_t token) { return token >= 0 && token < vocab_size; };
  if (c.data.begin_token) {
    check.require(is_id(*c.data.begin_token), {"data.begin_token", "model.vocab_size"},
                  fmt::format("data.begin_token = {} is outside the vocabulary of {} (model.vocab_size)",
                              *c.data.begin_token, vocab_size));
  }
  check.require(
      c.analysis.sink_threshold > 0 && c.analysis.sink_threshold < 1, {"analysis.sink_threshold"},
      fmt::format("analysis.sink_threshold = {} must lie between 0 and 1", c.analysis.sink_threshold));
  check.size("analysis.sink_length", c.analysis.sink_length);
  std::set<std::string> names = {"other"};  // the name of all other queries
  std::map<int64_t, std::string> class_of;
  for (size_t i = 0; i < c.analysis.query_classes.size(); ++i) {
    const QueryClassConfig& query_class = c.analysis.query_classes[i];
    const std::string key = fmt::format("analysis.query_classes[{}]", i);
    check.require(
        !query_class.name.empty() && query_class.name.find_first_of("/\\\n\t ") == std::string::npos &&
            names.insert(query_class.name).second,
        {key + ".name", key},
        fmt::format("{}.name must be a word that no other class has (\"other\" is taken), got \"{}\"", key,
                    query_class.name));
    check.require(!query_class.tokens.empty(), {key + ".tokens", key}, key + " needs a list of tokens");
    for (const int64_t token : query_class.tokens) {
      check.require(is_id(token), {key + ".tokens", "model.vocab_size"},
                    fmt::format("{}.tokens: {} is outside the vocabulary of {}", key, token, vocab_size));
      check.require(class_of.emplace(token, query_class.name).second, {key + ".tokens"},
                    fmt::format("{}.tokens: {} is listed twice", key, token));
    }
  }
}

void check_train(const TrainConfig& t, Checks& check) {
  check.require(t.device != DeviceChoice::cuda || built_with_cuda(), {"train.device"},
                "train.device: cuda is not in this build, which is CPU-only; use auto or cpu");
  check.require(t.device != DeviceChoice::cuda || t.precision != Precision::f64,
                {"train.precision", "train.device"},
                "train.precision: f64 is available on the CPU only; use f32 or bf16 with device cuda");
  check.size("train.threads", t.threads, 0);
  check.size("train.micro_batch_size", t.micro_batch_size);
  check.size("train.global_batch_size", t.global_batch_size);
  if (t.micro_batch_size > 0 && t.global_batch_size > 0 && t.micro_batch_size <= kMaxSize &&
      t.global_batch_size <= kMaxSize) {
    const int64_t below = t.global_batch_size / t.micro_batch_size * t.micro_batch_size;
    const int64_t above = below + t.micro_batch_size;
    check.require(
        t.global_batch_size % t.micro_batch_size == 0, {"train.global_batch_size", "train.micro_batch_size"},
        fmt::format("train.global_batch_size = {} is not a multiple of micro_batch_size = {}; nearest: {}",
                    t.global_batch_size, t.micro_batch_size,
                    below > 0 ? fmt::format("{} or {}", below, above) : std::to_string(above)));
  }
  check.count("train.max_steps", t.max_steps);
  check.count("train.max_tokens", t.max_tokens);
  check.not_negative("train.max_grad_norm", t.max_grad_norm);
  check.require(
      t.divergence_factor == 0 || (t.divergence_factor > 1 && std::isfinite(t.divergence_factor)),
      {"train.divergence_factor"},
      fmt::format("train.divergence_factor must be 0 or greater than 1, got {}", t.divergence_factor));
  for (const std::string& name : t.init_ignore)
    if (const std::string problem = init_ignore_problem(name); !problem.empty())
      check.require(false, {"train.init_ignore"}, problem);
  check.require(t.init_missing == InitMissing::refuse || !t.init_from.empty(),
                {"train.init_missing", "train.init_from"},
                "train.init_missing: fresh has no effect without train.init_from");
  check.require(t.init_missing_names.empty() || t.init_missing == InitMissing::fresh,
                {"train.init_missing_names", "train.init_missing"},
                "train.init_missing_names has no effect while train.init_missing is refuse");
  for (const std::string& name : t.init_missing_names)
    check.require(!name.empty(), {"train.init_missing_names"},
                  "train.init_missing_names: the empty text is part of every name; leave the list empty");
  check.require(t.on_nonfinite != BadStepPolicy::count, {"train.on_nonfinite"},
                "train.on_nonfinite: count would apply an update that is not finite; use skip or stop");
}

void check_optimizer(const OptimizerConfig& o, Checks& check) {
  check.positive("optimizer.lr", o.lr);
  check.not_negative("optimizer.min_lr", o.min_lr);
  check.require(o.min_lr <= o.lr, {"optimizer.min_lr", "optimizer.lr"},
                fmt::format("optimizer.min_lr = {} is greater than lr = {}", o.min_lr, o.lr));
  check.require(o.beta1 >= 0 && o.beta1 < 1, {"optimizer.beta1"},
                fmt::format("optimizer.beta1 must be in [0, 1), got {}", o.beta1));
  check.require(o.beta2 >= 0 && o.beta2 < 1, {"optimizer.beta2"},
                fmt::format("optimizer.beta2 must be in [0, 1), got {}", o.beta2));
  check.positive("optimizer.eps", o.eps);
  check.not_negative("optimizer.weight_decay", o.weight_decay);
  check.count("optimizer.warmup_steps", o.warmup_steps);
  check.count("optimizer.decay_steps", o.decay_steps);
  const MuonConfig& muon = o.muon;
  check.positive("optimizer.muon.lr", muon.lr);
  for (const auto& [key, value] : std::initializer_list<std::pair<const char*, double>>{
           {"optimizer.muon.momentum", muon.momentum},
           {"optimizer.muon.initial_momentum", muon.initial_momentum}})
    check.require(value >= 0 && value < 1, {key}, fmt::format("{} must be in [0, 1), got {}", key, value));
  check.count("optimizer.muon.momentum_warmup_steps", muon.momentum_warmup_steps);
  check.size("optimizer.muon.newton_schulz_steps", muon.newton_schulz_steps);
  check.not_negative("optimizer.muon.weight_decay", muon.weight_decay);
  for (size_t i = 0; i < o.rules.size(); ++i) {
    const std::string key = fmt::format("optimizer.rules[{}]", i);
    check.require(!o.rules[i].match.empty(), {key + ".match", key},
                  key + " needs match, a part of a parameter's name");
    check.not_negative(key + ".lr_multiplier", o.rules[i].lr_multiplier);
  }
}

/// Checks that the schedule fits into the run, if the length of the run is known.
void check_schedule(const Config& c, Checks& check) {
  const int64_t steps = training_steps(c);
  if (steps <= 0) return;
  const int64_t samples = c.train.global_batch_size, seq_len = c.data.seq_len;
  int64_t tokens = 0;
  if (c.train.max_steps > 0 && samples > 0 && seq_len > 0 && samples <= kMaxSize && seq_len <= kMaxSize)
    check.require(!__builtin_mul_overflow(samples * seq_len, steps, &tokens),
                  {"train.max_steps", "train.max_tokens"},
                  fmt::format("{} steps of {} tokens are more tokens than can be counted (9.2e18)", steps,
                              samples * seq_len));
  const OptimizerConfig& o = c.optimizer;
  if (o.warmup_steps < 0 || o.decay_steps < 0) return;  // reported by itself
  const std::string length = c.train.max_steps > 0 ? "train.max_steps" : "train.max_tokens";
  check.require(
      o.warmup_steps <= steps, {"optimizer.warmup_steps", length},
      fmt::format("optimizer.warmup_steps = {} is longer than the run of {} steps", o.warmup_steps, steps));
  check.require(
      o.schedule != Schedule::wsd || o.warmup_steps > steps || o.decay_steps <= steps - o.warmup_steps,
      {"optimizer.decay_steps", "optimizer.warmup_steps", length},
      fmt::format("optimizer.decay_steps = {} and warmup_steps = {} do not fit into the run of {} steps",
                  o.decay_steps, o.warmup_steps, steps));
}

void check_lora(const Config& c, Checks& check) {
  check.size("lora.rank", c.lora.rank, 0);
  if (c.lora.rank <= 0) return;
  check.positive("lora.alpha", c.lora.alpha);
  check.require(
      !c.train.init_from.empty(), {"lora.rank", "train.init_from"},
      fmt::format("lora.rank = {} trains adapters of an existing model; give train.init_from", c.lora.rank));
  check.require(!c.lora.targets.empty(), {"lora.targets", "lora.rank"},
                "lora.targets must name at least one matrix");
  check.require(c.optimizer.type == OptimizerType::adamw, {"optimizer.type", "lora.rank"},
                "optimizer.type: muon cannot train adapters (lora.rank); use adamw");
  std::set<std::string> names;
  for (const std::string& target : c.lora.targets)
    check.require(
        !target.empty() && names.insert(target).second, {"lora.targets"},
        target.empty() ? "lora.targets: an empty name" : fmt::format("lora.targets names {} twice", target));
}

void check_parallel(const ParallelConfig& p, Checks& check) {
  for (const auto& [key, ranks] : std::initializer_list<std::pair<const char*, int64_t>>{
           {"parallel.tensor", p.tensor}, {"parallel.context", p.context}, {"parallel.pipeline", p.pipeline}})
    check.require(ranks == 1, {key},
                  ranks < 1 ? fmt::format("{} must be at least 1, got {}", key, ranks)
                            : fmt::format("{} = {} is not available in this version; use 1", key, ranks));
  check.size("parallel.expert", p.expert);
  check.require(
      p.expert_capacity > 0 && p.expert_capacity <= static_cast<double>(kMaxSize),
      {"parallel.expert_capacity"},
      fmt::format("parallel.expert_capacity must be greater than 0 and finite, got {}", p.expert_capacity));
  check.not_negative("parallel.timeout_seconds", p.timeout_seconds);
  check.count("parallel.verify_every_steps", p.verify_every_steps);
  check.require(p.gradient_dtype == GradientDtype::f32 || p.determinism == Determinism::same_layout,
                {"parallel.gradient_dtype", "parallel.determinism"},
                "parallel.gradient_dtype: bf16 rounds differently on each number of ranks; with determinism "
                "exact use f32");
  check.require(p.zero_stage >= 0 && p.zero_stage <= 3, {"parallel.zero_stage"},
                fmt::format("parallel.zero_stage must be 0, 1, 2 or 3, got {}", p.zero_stage));
}

/// Muon orthogonalises whole matrices, which ZeRO would shard.
void check_muon_ranks(const Config& c, Checks& check) {
  check.require(
      c.optimizer.type != OptimizerType::muon || c.parallel.zero_stage == 0,
      {"optimizer.type", "parallel.zero_stage"},
      fmt::format(
          "optimizer.type: muon orthogonalises whole matrices, which parallel.zero_stage = {} shards; use 0",
          c.parallel.zero_stage));
}

void check_eval_ruler(const Config& c, Checks& check) {
  const RulerEvalConfig& ruler = c.eval.ruler;
  check.size("eval.ruler.samples", ruler.samples, 0);
  std::set<std::string> names;
  for (const std::string& task : ruler.tasks) {
    check.require(
        task == "niah_single_1" || task == "niah_multikey_2" || task == "niah_multikey_3",
        {"eval.ruler.tasks"},
        fmt::format("eval.ruler.tasks: {} is none of niah_single_1, niah_multikey_2 and niah_multikey_3; all "
                    "thirteen tasks are run by sluice ruler",
                    task));
    check.require(names.insert(task).second, {"eval.ruler.tasks"},
                  fmt::format("eval.ruler.tasks names {} twice", task));
  }
  check.require(ruler.samples <= 0 || !ruler.tasks.empty(), {"eval.ruler.tasks", "eval.ruler.samples"},
                "eval.ruler.tasks must name at least one task");
  std::set<int64_t> lengths;
  for (const int64_t length : ruler.lengths) {
    check.require(
        length >= 1 && length <= c.data.seq_len, {"eval.ruler.lengths", "data.seq_len"},
        fmt::format("eval.ruler.lengths: {} is not between 1 and data.seq_len = {}", length, c.data.seq_len));
    check.require(lengths.insert(length).second, {"eval.ruler.lengths"},
                  fmt::format("eval.ruler.lengths names {} twice", length));
  }
}

void check_rest(const Config& c, Checks& check) {
  check.require(!c.name.empty() && c.name.find('/') == std::string::npos && c.name[0] != '.', {"name"},
                fmt::format("name must be usable as a folder's name, got \"{}\"", c.name));
  check.count("eval.every_steps", c.eval.every_steps);
  check.count("eval.max_tokens", c.eval.max_tokens);
  check.count("checkpoint.every_steps", c.checkpoint.every_steps);
  check.not_negative("checkpoint.every_minutes", c.checkpoint.every_minutes);
  check.size("checkpoint.keep_last", c.checkpoint.keep_last);
  check.positive("checkpoint.timeout_seconds", c.checkpoint.timeout_seconds);
  check.count("checkpoint.keep_every_steps", c.checkpoint.keep_every_steps);
  check.size("log.every_steps", c.log.every_steps);
  check.size("log.trace_step", c.log.trace_step, 0);
  check.size("log.bits", c.log.bits, 0);
}

}  // namespace

int64_t training_steps(const Config& config) {
  if (config.train.max_steps > 0) return config.train.max_steps;
  const int64_t samples = config.train.global_batch_size, length = config.data.seq_len;
  if (config.train.max_tokens <= 0 || samples <= 0 || length <= 0 || samples > kMaxSize || length > kMaxSize)
    return 0;
  const int64_t per_step = samples * length;
  return config.train.max_tokens / per_step + (config.train.max_tokens % per_step != 0);
}

void check_combinations(const Config& config, ProblemSink& problem) {
  Checks check(problem);
  check_rest(config, check);
  check_eval_ruler(config, check);
  check_model(config.model, config.data, check);
  check_switch_heads(config.model, check);
  check_sparse(config, problem);
  check_tasks(config, problem);
  check_moe(config.model, check);
  check_head_balance(config, check);
  check_data(config.data, check);
  check_analysis(config, check);
  check_train(config.train, check);
  check_micro_batch(config, check);
  check_optimizer(config.optimizer, check);
  check_schedule(config, check);
  check_expert_ranks(config, check);
  check_parallel(config.parallel, check);
  check_gradient_dtype(config, check);
  check_muon_ranks(config, check);
  check_lora(config, check);
}

void check_training(const Config& config, ProblemSink& problem) {
  Checks check(problem);
  const TrainConfig& t = config.train;
  check.require(t.max_steps > 0 || t.max_tokens > 0, {"train.max_steps", "train.max_tokens"},
                "the length of training is not given: set train.max_steps or train.max_tokens");
  check.require(
      t.max_steps == 0 || t.max_tokens == 0, {"train.max_tokens", "train.max_steps"},
      fmt::format("train.max_steps = {} and train.max_tokens = {} are both given; set one of them to 0",
                  t.max_steps, t.max_tokens));
  check.require(!config.data.train.empty(), {"data.train"},
                "there is no training data: data.train is empty; give it a list of {name: ..., path: ...}");
  check.require(config.model.attention.kernel == AttentionKernel::automatic ||
                    (t.device != DeviceChoice::cpu && built_with_cuda()),
                {"model.attention.kernel", "train.device"},
                "model.attention.kernel names a GPU kernel, but training is on the CPU; use auto");
}

void validate_for_training(const Config& config) {
  ProblemList problems;
  check_combinations(config, problems);
  check_training(config, problems);
  problems.raise();
}

}  // namespace sluice
