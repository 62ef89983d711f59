#include "hf/holds.h"

#include <spdlog/fmt/fmt.h>

#include "config/model_function.h"
#include "core/error.h"

namespace sluice {
namespace {

/// The same as without_known, of model.attention.sparse.
void forget_known(SparseConfig& s) {
  const SparseConfig defaults;
  if (s.scope == IndexScope::kv_head) s.scope = defaults.scope;
  s.block = defaults.block;
  s.force_self = defaults.force_self;
  s.sink = defaults.sink;
  if (s.phase == SparsePhase::dense_warm_up) s.phase = defaults.phase;
  IndexerConfig& x = s.indexer;
  x.heads = defaults.indexer.heads;
  x.head_dim = defaults.indexer.head_dim;
  if (x.activation == IndexActivation::relu) x.activation = defaults.indexer.activation;
  for (const IndexHeadWeights known : {IndexHeadWeights::linear, IndexHeadWeights::none})
    if (x.head_weights == known) x.head_weights = defaults.indexer.head_weights;
  for (auto flag : {&IndexerConfig::bias, &IndexerConfig::rope, &IndexerConfig::key_norm})
    x.*flag = defaults.indexer.*flag;
  x.scale = defaults.indexer.scale;
  for (const BudgetPolicy known :
       {BudgetPolicy::eq8, BudgetPolicy::inverse, BudgetPolicy::entropy, BudgetPolicy::code})
    if (s.k.policy == known) s.k.policy = defaults.k.policy;
  for (auto size : {&BudgetConfig::base, &BudgetConfig::min, &BudgetConfig::max})
    s.k.*size = defaults.k.*size;
  s.k.temperature = defaults.k.temperature;
  s.k.momentum = defaults.k.momentum;                          // of training alone
  s.loss.temperature = defaults.loss.temperature;              // of training alone
  s.loss.learn_temperature = defaults.loss.learn_temperature;  // a parameter that nothing reads
}

/// The keys that modeling_sluice.py computes, set to their defaults; what differs from the defaults
/// afterwards is what it does not know. Values of enumerations are named one by one.
ModelConfig without_known(const ModelConfig& model) {
  ModelConfig rest = model;
  const ModelConfig defaults;
  for (auto size : {&ModelConfig::vocab_size, &ModelConfig::hidden_size, &ModelConfig::num_hidden_layers,
                    &ModelConfig::num_attention_heads, &ModelConfig::num_key_value_heads,
                    &ModelConfig::head_dim, &ModelConfig::intermediate_size})
    rest.*size = defaults.*size;
  for (auto flag : {&ModelConfig::tie_word_embeddings, &ModelConfig::norm_weights, &ModelConfig::qk_norm,
                    &ModelConfig::embedding_norm, &ModelConfig::attention_bias})
    rest.*flag = defaults.*flag;
  rest.rms_norm_eps = defaults.rms_norm_eps;
  if (model.hidden_act == HiddenAct::relu2) rest.hidden_act = defaults.hidden_act;
  if (model.qk_norm_order == QkNormOrder::after_rope) rest.qk_norm_order = defaults.qk_norm_order;
  if (model.norm_placement == NormPlacement::sandwich) rest.norm_placement = defaults.norm_placement;
  rest.final_logit_softcapping = defaults.final_logit_softcapping;
  rest.branch_clip = defaults.branch_clip;
  rest.gated_norm.rank = defaults.gated_norm.rank;
  rest.rope.theta = defaults.rope.theta;
  if (model.rope.scaling.type == RopeScalingType::yarn) rest.rope.scaling = defaults.rope.scaling;
  rest.moe.num_experts = defaults.moe.num_experts;
  rest.moe.num_experts_per_tok = defaults.moe.num_experts_per_tok;
  rest.moe.moe_intermediate_size = defaults.moe.moe_intermediate_size;
  rest.moe.norm_topk_prob = defaults.moe.norm_topk_prob;
  rest.moe.shared_expert_intermediate_size = defaults.moe.shared_expert_intermediate_size;
  rest.moe.shared_expert_gate = defaults.moe.shared_expert_gate;
  rest.moe.bias = defaults.moe.bias;
  rest.moe.swiglu_limit = defaults.moe.swiglu_limit;
  rest.moe.decoder_sparse_step = defaults.moe.decoder_sparse_step;
  rest.moe.mlp_only_layers.clear();

  AttentionConfig& a = rest.attention;
  for (const AttentionKind known : {AttentionKind::sink, AttentionKind::off_by_one, AttentionKind::sink_key,
                                    AttentionKind::kv_bias, AttentionKind::softpick, AttentionKind::sparse})
    if (a.kind == known) a.kind = AttentionKind::softmax;
  forget_known(a.sparse);
  a.window = defaults.attention.window;
  a.window_pattern = defaults.attention.window_pattern;
  for (const ExclusiveAttention known : {ExclusiveAttention::full, ExclusiveAttention::learned})
    if (a.exclusive == known) a.exclusive = ExclusiveAttention::none;
  if (a.output_norm == OutputNorm::rmsnorm || a.output_norm == OutputNorm::rmsnorm_shared)
    a.output_norm = OutputNorm::none;
  if (a.output_activation == OutputActivation::silu) a.output_activation = OutputActivation::none;
  a.switch_heads = defaults.attention.switch_heads;
  for (GateConfig& gate : a.gates) {
    const GateConfig plain;
    gate.position = plain.position;        // all five
    gate.granularity = plain.granularity;  // both
    gate.heads = plain.heads;              // all three
    gate.combine = plain.combine;          // both
    for (const GateActivation known : {GateActivation::silu, GateActivation::identity,
                                       GateActivation::ns_sigmoid, GateActivation::two_sigmoid})
      if (gate.activation == known) gate.activation = plain.activation;
    for (const GateInput known : {GateInput::none, GateInput::self})
      if (gate.input == known) gate.input = plain.input;
    gate.input_channels = plain.input_channels;
    gate.bias = plain.bias;
  }
  return rest;
}

/// Differences of what modeling_sluice.py does not know from what it takes for granted.
std::vector<FunctionDifference> unknown_to_modeling(const ModelConfig& model) {
  const ModelConfig rest = without_known(model);
  ModelConfig plain;
  plain.attention.gates.resize(rest.attention.gates.size());
  return function_differences(plain, rest);
}

}  // namespace

std::vector<std::string> not_held(const Config& config, HfFormat format) {
  std::vector<std::string> reasons;
  if (config.lora.rank > 0)
    reasons.push_back(fmt::format(
        "lora.rank = {}: adapters beside the weights; sluice checkpoint merge joins them", config.lora.rank));
  Config sized = config;
  if (sized.model.vocab_size == 0) sized.model.vocab_size = 1;  // the tokenizer's, not known yet
  HfModel back;
  try {
    back = parse_hf_config(hf_config(sized, 0, format), "config.json");
  } catch (const Error& error) {  // a value that the format does not allow
    reasons.push_back(error.what());
    return reasons;
  }
  for (const FunctionDifference& d : function_differences(back.model, sized.model)) {
    const bool gate = names_key("model.attention.gates", d.key);
    reasons.push_back(fmt::format("{} = {}: {}", d.key, d.here,
                                  gate ? "it has no such gate" : fmt::format("it has {}", d.source)));
  }
  for (const HfModel::Unsupported& u : back.unsupported) reasons.push_back(u.what);
  if (format == HfFormat::sluice)
    for (const FunctionDifference& d : unknown_to_modeling(sized.model))
      reasons.push_back(fmt::format("{} = {}: modeling_sluice.py does not compute it", d.key, d.here));
  return reasons;
}

}  // namespace sluice
