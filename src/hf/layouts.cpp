#include "hf/layouts.h"

#include <spdlog/fmt/fmt.h>

#include "checkpoint/mxfp4.h"
#include "nn/transformer.h"
#include "params/param_store.h"

namespace sluice {
namespace {

/// The norms of a Qwen3-Next are stored as w - 1.
bool is_norm(const std::string& name) {
  for (const char* ending : {"layernorm.weight", "_norm.weight", "model.norm.weight"})
    if (name.ends_with(ending)) return true;
  return false;
}

/// q_proj with the gate's rows among the queries': per group of heads, the rows of the group's queries, then
/// those of its gates.
struct PackedRows {
  int64_t heads_per_group, head_dim, gate_rows_per_head, width;

  std::vector<WeightSource::Run> runs(int64_t groups, bool of_gate) const {
    const int64_t queries = heads_per_group * head_dim, gates = heads_per_group * gate_rows_per_head;
    std::vector<WeightSource::Run> out;
    for (int64_t g = 0; g < groups; ++g)
      out.push_back(
          {(g * (queries + gates) + (of_gate ? queries : 0)) * width, (of_gate ? gates : queries) * width});
    return out;
  }
};

/// The first gate of the list. Without one the shapes will not fit, which loading reports.
void pack_gates(WeightMap& map, const ModelConfig& m, int64_t heads_per_group) {
  if (m.attention.gates.empty()) return;
  const bool headwise = m.attention.gates[0].granularity == GateGranularity::headwise;
  const PackedRows rows{heads_per_group, m.head_dim, headwise ? 1 : m.head_dim, m.hidden_size};
  const int64_t groups = m.num_attention_heads / heads_per_group;
  const int64_t all = m.num_attention_heads * (rows.head_dim + rows.gate_rows_per_head);
  for (int64_t layer = 0; layer < m.num_hidden_layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".self_attn.";
    for (const bool of_gate : {false, true})
      map.sources[prefix + (of_gate ? "gate_proj.weight" : "q_proj.weight")] = {
          prefix + "q_proj.weight", {all, m.hidden_size}, rows.runs(groups, of_gate), 0};
  }
}

/// The router and the experts of one layer of a gpt-oss; `prefix` as "model.layers.0.mlp.".
void pack_experts(WeightMap& map, const MoeConfig& moe, int64_t hidden, const std::string& prefix) {
  const int64_t E = moe.num_experts, F = moe.moe_intermediate_size, C = hidden;
  const std::string to = prefix + "experts.";
  using Strides = WeightSource::Strides;
  map.sources[prefix + "gate.weight"] = {prefix + "router.weight", {E, C}, {}, 0};
  map.sources[prefix + "gate.bias"] = {prefix + "router.bias", {E}, {}, 0};
  for (int64_t e = 0; e < E; ++e) {
    const std::string of = to + std::to_string(e) + ".";
    // Ours is (out, in), stored (in, out): the outputs of gate_up_proj are gate, up, gate, up, ...
    for (const int64_t up : {0, 1}) {
      const std::string from = of + (up ? "up_proj." : "gate_proj.");
      map.sources[from + "weight"] = {
          to + "gate_up_proj", {E, C, 2 * F}, {}, 0, Strides{e * C * 2 * F + up, C, 2, 2 * F}};
      map.sources[from + "bias"] = {
          to + "gate_up_proj_bias", {E, 2 * F}, {}, 0, Strides{e * 2 * F + up, 1, 2, 0}};
    }
    map.sources[of + "down_proj.weight"] = {to + "down_proj", {E, F, C}, {}, 0, Strides{e * F * C, F, 1, C}};
    if (C % kMxfp4Block == 0)
      for (const int64_t up : {0, 1})
        map.sources[of + (up ? "up_proj.weight" : "gate_proj.weight")].mxfp4 = {
            {E, 2 * F, C / kMxfp4Block}, e * 2 * F + up, 2, C};
    if (F % kMxfp4Block == 0)
      map.sources[of + "down_proj.weight"].mxfp4 = {{E, C, F / kMxfp4Block}, e * C, 1, F};
    map.sources[of + "down_proj.bias"] = {to + "down_proj_bias", {E, C}, {{e * C, C}}, 0};
  }
}

}  // namespace

std::vector<TensorShape> model_tensors(const ModelConfig& model, DType dtype) {
  ParamStore store;
  const Transformer transformer(model, store);
  std::vector<TensorShape> tensors;
  for (const ParamSpec& spec : store.specs()) tensors.push_back({spec.name, spec.shape, dtype});
  return tensors;
}

WeightMap weight_map(HfFormat format, const ModelConfig& model) {
  WeightMap map;
  switch (format) {
    case HfFormat::llama:
      map.ignored = {"rotary_emb.inv_freq"};  // old ones
      break;
    case HfFormat::qwen3:
    case HfFormat::qwen3_moe:
    case HfFormat::sluice:
      break;
    case HfFormat::gpt_oss:
      for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer)
        pack_experts(map, model.moe, model.hidden_size, fmt::format("model.layers.{}.mlp.", layer));
      break;
    case HfFormat::gated_attention:
      pack_gates(map, model, model.num_attention_heads / model.num_key_value_heads);
      break;
    case HfFormat::qwen3_next:
      pack_gates(map, model, 1);
      map.ignored = {"mtp."};  // heads that predict further tokens
      for (const TensorShape& t : model_tensors(model))
        if (is_norm(t.name)) map.sources[t.name] = {t.name, t.shape, {}, 1.0};
      break;
  }
  return map;
}

}  // namespace sluice
