#include "analysis/analysis.h"

#include <spdlog/fmt/fmt.h>

#include <cmath>
#include <numeric>

#include "analysis/head_json.h"
#include "analysis/npy.h"
#include "analysis/reading.h"
#include "core/io.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

Json number(const std::optional<double>& x) { return x ? Json(*x) : Json(nullptr); }

double sum_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

/// values / count; null where nothing was counted.
Json ratio(double sum, double count) { return count > 0 ? Json(sum / count) : Json(nullptr); }
Json ratios(const std::vector<double>& sums, double count) {
  Json all = Json::array();
  for (const double x : sums) all.push_back(ratio(x, count));
  return all;
}

std::vector<double> importance_of(const LayerSums& layer) {
  std::vector<double> importance = layer.importance;
  for (double& x : importance) x /= layer.importance_tokens;
  return importance;
}

/// Shares in `count` bins, each of several fine ones.
Json histogram(const std::vector<double>& bins, int64_t count) {
  const double whole = sum_of(bins);
  Json shares = Json::array();
  const int64_t width = kFineBins / count;
  for (auto bin = bins.begin(); bin != bins.end(); bin += width)
    shares.push_back(ratio(std::accumulate(bin, bin + width, 0.0), whole));
  return shares;
}

Json gate_json(const GateConfig& config, const GateSums& g, const std::vector<double>& bins,
               std::pair<double, double> edges) {
  const double mean = g.sum / g.count;
  Json quantiles = Json::object();
  for (const double q : kQuantiles)
    quantiles[fmt::format("{}", q)] = quantile(bins, edges.first, edges.second, q);
  const auto name = [](auto value) { return EnumNames<decltype(value)>::names[static_cast<size_t>(value)]; };
  return {{"position", name(config.position)},
          {"granularity", name(config.granularity)},
          {"heads", name(config.heads)},
          {"combine", name(config.combine)},
          {"activation", name(config.activation)},
          {"input", name(config.input)},
          {"mean", mean},
          {"std", std::sqrt(std::max(g.squares / g.count - mean * mean, 0.0))},
          {"min", g.least},
          {"max", g.largest},
          {"quantiles", quantiles},
          {"histogram_50", histogram(bins, 50)},
          {"histogram_100", histogram(bins, 100)},
          {"edges_min", edges.first},
          {"edges_max", edges.second},
          {"first_token_mean", ratio(g.first_sum, g.first_count)},
          {"rest_mean", ratio(g.sum - g.first_sum, g.count - g.first_count)}};
}

/// The gates of the configuration, with the sums of some layers.
Json gates_json(const Analysis& a, const std::vector<size_t>& layers) {
  Json all = Json::array();
  const AttentionGates& gates = a.total.model().blocks()[layers[0]].attention().gates();
  for (size_t g = 0; g < gates.size(); ++g) {
    const bool bounded = score_range(gates.gate(g).config().activation).has_value();
    GateSums sums;
    std::vector<double> bins(kFineBins, 0);
    for (const size_t l : layers) {
      const GateSums& layer = a.total.layers[l].gates[g];
      sums.count += layer.count;
      sums.sum += layer.sum;
      sums.squares += layer.squares;
      sums.first_count += layer.first_count;
      sums.first_sum += layer.first_sum;
      sums.least = std::min(sums.least, layer.least);
      sums.largest = std::max(sums.largest, layer.largest);
      const std::vector<double>& from = bounded ? layer.bins : a.second.layers[l].bins[g];
      std::transform(bins.begin(), bins.end(), from.begin(), bins.begin(), std::plus<>());
    }
    all.push_back(
        gate_json(gates.gate(g).config(), sums, bins, bounded ? std::pair(0.0, 1.0) : a.second.edges(g)));
    if (layers.size() == 1)
      all.back()["health"] = to_json(health_of(
          a.total.layers[layers[0]].gates[g].health,
          layers[0] < a.gate_row_norms.size() ? a.gate_row_norms[layers[0]][g] : std::vector<double>()));
  }
  return all;
}

Json outputs_json(const Analysis& a, const std::vector<size_t>& layers) {
  double outputs = 0, before = 0, after = 0;
  std::array<double, 2> small_before{}, small_after{}, scaled{}, scaled_by_all{};
  bool gated = true;
  for (const size_t l : layers) {
    const LayerSums& layer = a.total.layers[l];
    outputs += layer.outputs;
    before += layer.before;
    after += layer.after;
    gated = gated && a.second.mean_gate()[l];
    for (size_t i = 0; i < kThresholds.size(); ++i) {
      small_before[i] += layer.small_before[i];
      small_after[i] += layer.small_after[i];
      scaled[i] += a.second.layers[l].small_scaled[i];
      scaled_by_all[i] += a.second.layers[l].small_scaled_by_all[i];
    }
  }
  Json json = {{"mean_abs_before", before / outputs}, {"mean_abs_after", after / outputs}};
  for (size_t i = 0; i < kThresholds.size(); ++i) {
    const std::string name = i == 0 ? "below_1e-2" : "below_1e-3";
    json[name + "_before"] = small_before[i] / outputs;
    json[name + "_after"] = small_after[i] / outputs;
    json[name + "_before_times_mean_gate"] = gated ? Json(scaled[i] / outputs) : Json(nullptr);
    json[name + "_before_times_global_mean_gate"] = gated ? Json(scaled_by_all[i] / outputs) : Json(nullptr);
  }
  return json;
}

/// Of one set, or of all: what attention gives the first token, averaged over layers.
Json mean_first_token(const Statistics& s, bool later) {
  double sum = 0, heads = 0;
  for (const LayerSums& layer : s.layers) {
    sum += sum_of(later ? layer.first_token.later : layer.first_token.all);
    heads += static_cast<double>(layer.first_token.all.size());
  }
  return ratio(sum, heads * (later ? s.queries.later : s.queries.all));
}

/// Over layers and gates, each counting once; null without gates.
Json mean_gate_score(const Statistics& s) {
  double sum = 0, gates = 0;
  for (const LayerSums& layer : s.layers)
    for (const GateSums& gate : layer.gates) sum += gate.sum / gate.count, ++gates;
  return ratio(sum, gates);
}

/// Mean over the layers that have one.
Json mean_imbalance(const Statistics& s, int ddof) {
  double sum = 0, count = 0;
  for (const LayerSums& layer : s.layers)
    if (const auto imbalance = imbalance_of(importance_of(layer), ddof)) sum += *imbalance, ++count;
  return ratio(sum, count);
}

Json value_norm(const Statistics& s, const std::vector<size_t>& layers, bool first) {
  double sum = 0, heads = 0;
  for (const size_t l : layers) {
    const LayerSums& layer = s.layers[l];
    sum += first ? layer.first_value_norms : sum_of(layer.value_norms) - layer.first_value_norms;
    const int64_t heads_of_layer = std::ssize(layer.value_norms) / s.seq_len();
    heads += static_cast<double>(heads_of_layer);
  }
  return ratio(sum, heads * (first ? s.first_tokens : s.tokens - s.first_tokens));
}

Json maxima_json(const Statistics& s, const std::vector<size_t>& layers) {
  LayerSums most;
  for (const size_t l : layers)
    for (double LayerSums::*x : {&LayerSums::attention_output, &LayerSums::attention_residual,
                                 &LayerSums::ffn_output, &LayerSums::ffn_residual})
      if (!(s.layers[l].*x <= most.*x)) most.*x = s.layers[l].*x;
  FirstAndRest residual;
  for (const size_t l : layers)
    for (double FirstAndRest::*x : {&FirstAndRest::first, &FirstAndRest::rest})
      if (!(s.layers[l].residual.*x <= residual.*x)) residual.*x = s.layers[l].residual.*x;
  return {{"attention_output", most.attention_output},
          {"attention_residual", most.attention_residual},
          {"ffn_output", most.ffn_output},
          {"ffn_residual", most.ffn_residual},
          {"residual_first", residual.first},
          {"residual_rest", residual.rest}};
}

Json layer_json(const Analysis& a, size_t l) {
  const Statistics& s = a.total;
  const LayerSums& layer = s.layers[l];
  const auto heads = static_cast<double>(layer.first_token.all.size());
  const std::vector<double> importance = importance_of(layer);
  Json by_head = {{"first_token_attention", ratios(layer.first_token.all, s.queries.all)}};
  by_head.update(to_json(s.measure().means(layer.first_token, s.queries), s.measure().classes().names()));
  by_head["importance"] = importance;
  Json json = {{"first_token_attention", ratio(sum_of(layer.first_token.all), heads * s.queries.all)},
               {"first_token_attention_without_first_query",
                ratio(sum_of(layer.first_token.later), heads * s.queries.later)},
               {"heads", by_head},
               {"imbalance", number(imbalance_of(importance, 1))},
               {"imbalance_ddof_0", number(imbalance_of(importance, 0))},
               {"gates", gates_json(a, {l})},
               {"attention_output", outputs_json(a, {l})},
               {"max", maxima_json(s, {l})},
               {"value_norm_first", value_norm(s, {l}, true)},
               {"value_norm_rest", value_norm(s, {l}, false)}};
  if (layer.selection.queries > 0) json["selection"] = to_json(means_of(layer.selection));
  return json;
}

Json sinks_json(const Statistics& s) {
  std::vector<HeadAttention> layers;
  for (const LayerSums& layer : s.layers) layers.push_back(s.measure().means(layer.first_token, s.queries));
  const FirstTokenMeasure& measure = s.measure();
  return to_json(measure.summary(layers), measure.classes().names(), measure.threshold(), measure.length());
}

Json total_json(const Analysis& a) {
  const Statistics& s = a.total;
  std::vector<size_t> layers(s.layers.size());
  std::iota(layers.begin(), layers.end(), size_t{0});
  double residuals = 0;
  for (const LayerSums& layer : s.layers)
    residuals += layer.ffn_residual / static_cast<double>(layers.size());
  const Json maxima = maxima_json(s, layers);
  return {{"first_token_attention", mean_first_token(s, false)},
          {"first_token_attention_without_first_query", mean_first_token(s, true)},
          {"sinks", sinks_json(s)},
          {"imbalance", mean_imbalance(s, 1)},
          {"imbalance_ddof_0", mean_imbalance(s, 0)},
          {"mean_gate_score", mean_gate_score(s)},
          {"gates", gates_json(a, layers)},
          {"attention_output", outputs_json(a, layers)},
          {"max", maxima},
          {"m_act_mean", residuals},
          {"m_act_max", maxima["ffn_residual"]},
          {"value_norm_first", value_norm(s, layers, true)},
          {"value_norm_rest", value_norm(s, layers, false)}};
}

}  // namespace

double quantile(const std::vector<double>& bins, double low, double high, double share) {
  const double target = share * sum_of(bins), width = (high - low) / static_cast<double>(bins.size());
  double below = 0;
  for (size_t i = 0; i < bins.size(); ++i) {
    if (bins[i] > 0 && below + bins[i] >= target)
      return low + width * (static_cast<double>(i) + (target - below) / bins[i]);
    below += bins[i];
  }
  return high;
}

nlohmann::ordered_json to_json(const Analysis& a) {
  Json sets = Json::array(), layers = Json::array();
  for (const Analysis::Set& set : a.sets) {
    Json importance = Json::array();
    for (const LayerSums& layer : set.sums.layers) importance.push_back(importance_of(layer));
    sets.push_back({{"name", set.name},
                    {"tokens", static_cast<int64_t>(set.sums.tokens)},
                    {"padded_samples", set.padded},
                    {"first_token_attention", mean_first_token(set.sums, false)},
                    {"mean_gate_score", mean_gate_score(set.sums)},
                    {"importance", importance}});
  }
  for (size_t l = 0; l < a.total.layers.size(); ++l) layers.push_back(layer_json(a, l));
  const auto file = [](const char* name) { return std::string(name) + ".npy"; };
  Json arrays = Json::object();
  for (const char* name :
       {"attention_mean", "attention_heads", "value_norms", "query_pca", "query_explained_variance",
        "key_pca", "key_explained_variance", "importance", "tokens"})
    arrays[name] = file(name);
  return {{"schema", 1},
          {"checkpoint", a.checkpoint},
          {"step", a.step},
          {"trained_tokens", a.trained_tokens},
          {"tokens", static_cast<int64_t>(a.total.tokens)},
          {"sequences", static_cast<int64_t>(a.total.sequences)},
          {"sets", sets},
          {"layers", layers},
          {"total", total_json(a)},
          {"maps", {{"sequences", a.maps.sequences()}, {"tokens", a.maps.tokens()}, {"sets", a.map_sets}}},
          {"arrays", arrays}};
}

void write_analysis(const std::string& folder, const Analysis& a) {
  // An older one would vouch for arrays that are not its own.
  if (io::exists(folder + "/analysis.json")) io::remove_file(folder + "/analysis.json");
  const ModelConfig& model = a.total.model().config();
  const int64_t L = model.num_hidden_layers, H = model.num_attention_heads, Hkv = model.num_key_value_heads,
                M = a.maps.tokens(), S = a.maps.sequences(), T = a.total.seq_len();
  const auto path = [&](const char* name) { return folder + "/" + name + ".npy"; };
  write_npy(path("attention_mean"), {L, M, M}, a.maps.mean());
  write_npy(path("attention_heads"), {L, H, M, M}, a.maps.heads());
  const AttentionMaps::Planes queries = a.maps.queries(), keys = a.maps.keys();
  write_npy(path("query_pca"), {L, H, S * M, 2}, queries.points);
  write_npy(path("query_explained_variance"), {L, H, 2}, queries.explained);
  write_npy(path("key_pca"), {L, Hkv, S * M, 2}, keys.points);
  write_npy(path("key_explained_variance"), {L, Hkv, 2}, keys.explained);
  write_npy(path("tokens"), {S, M}, a.map_tokens);

  std::vector<double> norms, importance;
  for (const LayerSums& layer : a.total.layers) {
    for (const double x : layer.value_norms) norms.push_back(x / a.total.sequences);
    for (const double x : importance_of(layer)) importance.push_back(x);
  }
  write_npy(path("value_norms"), {L, Hkv, T}, norms);
  write_npy(path("importance"), {L, H}, importance);
  io::write_file_atomic(folder + "/analysis.json", to_json(a).dump(1) + "\n");
}

}  // namespace sluice
