#include "run/metrics.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "analysis/head_json.h"

namespace sluice {

namespace {

/// "group/name" is the key `name` in the object `group`; a layer's is in the last entry of its list "layers".
void add(nlohmann::ordered_json& line, const StepScalar& scalar) {
  const size_t slash = scalar.name.find('/');
  const bool grouped = slash != std::string::npos;
  nlohmann::ordered_json* object = grouped ? &line[scalar.name.substr(0, slash)] : &line;
  if (scalar.layer >= 0) {
    nlohmann::ordered_json& layers = (*object)["layers"];
    if (layers.empty() || layers.back()["layer"] != scalar.layer) layers.push_back({{"layer", scalar.layer}});
    object = &layers.back();
  }
  nlohmann::ordered_json& value = (*object)[grouped ? scalar.name.substr(slash + 1) : scalar.name];
  if (scalar.whole)
    value = static_cast<int64_t>(scalar.value);
  else
    value = scalar.value;
}

}  // namespace

nlohmann::ordered_json to_json(const TrainRecord& r) {
  nlohmann::ordered_json line = {{"schema", 1},          {"step", r.step},
                                 {"samples", r.samples}, {"tokens", r.tokens},
                                 {"loss", r.loss},       {"grad_norm", r.grad_norm},
                                 {"lr", r.lr},           {"tokens_per_second", r.tokens_per_second},
                                 {"seconds", r.seconds}, {"spikes", r.spikes},
                                 {"skipped", r.skipped}};
  for (const auto& [source, epochs] : r.epochs) line["epochs"][source] = epochs;
  if (r.diverged_since) line["diverged_since"] = *r.diverged_since;
  for (const StepScalar& scalar : r.losses) add(line, scalar);
  return line;
}

nlohmann::ordered_json to_json(const TaskResult& r) {
  nlohmann::ordered_json out = {{"questions", r.questions},
                                {"shots", r.shots},
                                {"accuracy", r.accuracy},
                                {"error", r.error},
                                {"accuracy_bytes", r.accuracy_bytes},
                                {"error_bytes", r.error_bytes},
                                {"answer_nats_per_byte", r.answer_loss}};
  if (r.contexts_cut > 0) out["truncated"] = r.contexts_cut;
  if (r.choices_cut > 0) out["choices_cut"] = r.choices_cut;
  return out;
}

nlohmann::ordered_json to_json(int64_t step, int64_t tokens, const EvalResult& result) {
  nlohmann::ordered_json sets = nlohmann::ordered_json::object();
  for (const SetResult& set : result.sets) {
    sets[set.name] = {{"loss", set.loss},
                      {"perplexity", set.perplexity},
                      {"bits_per_byte", set.bits_per_byte},
                      {"tokens", set.tokens}};
    for (const ClassResult& c : set.classes)
      sets[set.name]["classes"][c.name] = {
          {"loss", c.loss}, {"share_likely", c.share_likely}, {"tokens", c.tokens}};
    for (const PositionResult& octave : set.by_position)
      sets[set.name]["by_position"].push_back(
          {{"from", octave.from}, {"to", octave.to}, {"loss", octave.loss}, {"tokens", octave.tokens}});
    if (set.loss_of_text.lost_bytes > 0) sets[set.name]["text_dropped"] = set.loss_of_text.share();
  }
  nlohmann::ordered_json layers = nlohmann::ordered_json::array();
  const auto number = [](const std::optional<double>& x) {
    return x ? nlohmann::ordered_json(*x) : nlohmann::ordered_json(nullptr);
  };
  for (const LayerSummary& layer : result.analysis.layers) {
    layers.push_back({{"first_token_attention", layer.first_token_attention},
                      {"gate_scores", layer.gate_scores},
                      {"attention_output_max", layer.attention_output_max},
                      {"attention_residual_max", layer.attention_residual_max},
                      {"ffn_output_max", layer.ffn_output_max},
                      {"ffn_residual_max", layer.ffn_residual_max},
                      {"importance", layer.importance},
                      {"imbalance", number(layer.imbalance)},
                      {"value_norm_first", layer.value_norm.first},
                      {"value_norm_rest", layer.value_norm.rest},
                      {"residual_max_first", layer.residual_max.first},
                      {"residual_max_rest", layer.residual_max.rest},
                      {"heads", to_json(layer.heads, result.analysis.query_classes)}});
    if (layer.selection) layers.back()["selection"] = to_json(*layer.selection);
    for (const GateHealth& gate : layer.gate_health) layers.back()["gates"].push_back(to_json(gate));
  }
  const ModelSummary& a = result.analysis;
  const nlohmann::ordered_json analysis = {
      {"layers", layers},
      {"first_token_attention", a.first_token_attention},
      {"sinks", to_json(a.sinks, a.query_classes, a.sink_threshold, a.sink_length)},
      {"mean_gate_score", number(a.mean_gate_score)},
      {"imbalance", number(a.imbalance)},
      {"largest_residual", a.largest_residual}};
  nlohmann::ordered_json line = {
      {"schema", 1}, {"step", step}, {"tokens", tokens}, {"sets", sets}, {"analysis", analysis}};
  for (const RulerChoice& c : result.ruler)
    line["ruler"].push_back({{"task", c.task},
                             {"length", c.length},
                             {"samples", c.samples},
                             {"accuracy", c.accuracy},
                             {"loss", c.loss},
                             {"margin", c.margin}});
  for (const TaskResult& task : result.tasks) line["tasks"][task.name] = to_json(task);
  for (const SampleText& sample : result.samples)
    line["samples"].push_back({{"prompt", valid_text(sample.prompt)}, {"text", valid_text(sample.text)}});
  return line;
}

}  // namespace sluice
