#include "run/metrics.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

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

nlohmann::ordered_json to_json(int64_t step, int64_t tokens, const EvalResult& result) {
  nlohmann::ordered_json sets = nlohmann::ordered_json::object();
  for (const SetResult& set : result.sets) {
    sets[set.name] = {{"loss", set.loss},
                      {"perplexity", set.perplexity},
                      {"bits_per_byte", set.bits_per_byte},
                      {"tokens", set.tokens}};
    if (set.loss_of_text.lost_bytes > 0) sets[set.name]["text_dropped"] = set.loss_of_text.share();
  }
  nlohmann::ordered_json layers = nlohmann::ordered_json::array();
  const auto number = [](const std::optional<double>& x) {
    return x ? nlohmann::ordered_json(*x) : nlohmann::ordered_json(nullptr);
  };
  for (const LayerSummary& layer : result.analysis.layers)
    layers.push_back({{"first_token_attention", layer.first_token_attention},
                      {"gate_scores", layer.gate_scores},
                      {"attention_output_max", layer.attention_output_max},
                      {"attention_residual_max", layer.attention_residual_max},
                      {"ffn_output_max", layer.ffn_output_max},
                      {"ffn_residual_max", layer.ffn_residual_max},
                      {"importance", layer.importance},
                      {"imbalance", number(layer.imbalance)}});
  const nlohmann::ordered_json analysis = {{"layers", layers},
                                           {"first_token_attention", result.analysis.first_token_attention},
                                           {"mean_gate_score", number(result.analysis.mean_gate_score)},
                                           {"imbalance", number(result.analysis.imbalance)},
                                           {"largest_residual", result.analysis.largest_residual}};
  return {{"schema", 1}, {"step", step}, {"tokens", tokens}, {"sets", sets}, {"analysis", analysis}};
}

JsonLines::JsonLines(std::string path, int64_t last_step) : path_(std::move(path)) {
  const std::string before = io::exists(path_) ? io::read_file(path_) : "";
  std::string kept;
  for (size_t begin = 0; begin < before.size();) {
    const size_t end = std::min(before.find('\n', begin), before.size());
    const std::string line = before.substr(begin, end - begin);
    begin = end + 1;
    const nlohmann::json parsed = nlohmann::json::parse(line, nullptr, false);
    if (!parsed.is_object() || !parsed.contains("step") || !parsed["step"].is_number_integer()) continue;
    const int64_t step = parsed["step"].get<int64_t>();
    if (step > last_step) continue;
    last_step_ = std::max(last_step_, step);
    kept += line + "\n";
  }
  if (kept != before) io::write_file_atomic(path_, kept);
  file_ = std::make_unique<io::OutputFile>(path_, io::OutputFile::Mode::append);
}

void JsonLines::append(const nlohmann::ordered_json& line) {
  last_step_ = std::max(last_step_, line.at("step").get<int64_t>());
  try {
    // After a failure the last line may be torn; a newline ends it.
    file_->write((failing_ ? "\n" : "") + line.dump() + "\n");
    failing_ = false;
    warning_.over();
  } catch (const std::exception& error) {  // of files, or of text that JSON cannot hold
    warning_.warn(fmt::format("{}: {}; training goes on, lines are missing", path_, error.what()));
    failing_ = true;
  }
}

}  // namespace sluice
