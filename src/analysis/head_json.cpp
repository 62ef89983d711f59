#include "analysis/head_json.h"

#include <cmath>

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

template <class T>
Json by_name(const std::vector<std::string>& names, const std::vector<T>& values) {
  Json json = Json::object();
  for (size_t i = 0; i < values.size(); ++i) json[names[i]] = values[i];
  return json;
}

Json number(double x) { return std::isnan(x) ? Json(nullptr) : Json(x); }

}  // namespace

Json to_json(const HeadAttention& means, const std::vector<std::string>& classes) {
  Json json = {{"first_token_attention_without_first_query", means.later}};
  if (!means.by_class.empty()) json["first_token_attention_by_class"] = by_name(classes, means.by_class);
  json["sink_share"] = means.sink;
  json["sink_share_leading"] = means.leading_sink;
  return json;
}

Json to_json(const SinkSummary& sinks, const std::vector<std::string>& classes, double threshold,
             int64_t length) {
  Json strongest = {{"layer", sinks.layer}, {"head", sinks.head}, {"first_token_attention", sinks.strongest}};
  if (!sinks.strongest_by_class.empty()) strongest["by_class"] = by_name(classes, sinks.strongest_by_class);
  return {{"threshold", threshold}, {"length", length},
          {"share", sinks.share},   {"share_leading", sinks.leading_share},
          {"heads", sinks.heads},   {"of", sinks.of},
          {"strongest", strongest}};
}

Json to_json(const GateHealth& gate) {
  const auto of_heads = [](const std::vector<double>& x) { return x.empty() ? Json(nullptr) : Json(x); };
  const GateShares shares = shares_of({gate});
  return {{"below_0.05", number(shares.below)},
          {"above_0.95", number(shares.above)},
          {"shut_heads", number(shares.shut_heads)},
          {"heads",
           {{"below_0.05", of_heads(gate.below)},
            {"above_0.95", of_heads(gate.above)},
            {"shut_tokens", of_heads(gate.shut_tokens)},
            {"row_norm", gate.row_norms}}}};
}

Json to_json(const SelectionSummary& selection) {
  return {{"mass_recall", selection.mass},
          {"top_recall", selection.top},
          {"kl", selection.divergence},
          {"keys", selection.keys},
          {"keys_deviation", selection.keys_deviation},
          {"keys_least", selection.keys_least},
          {"keys_most", selection.keys_most},
          {"union_of_8_over_keys", number(selection.union_ratio)},
          {"overlap_with_layer_before", number(selection.overlap)}};
}

}  // namespace sluice
