#include "analysis/statistics.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <numeric>

#include "analysis/analysis.h"
#include "analysis/npy.h"
#include "analysis/pca.h"
#include "data/temporary.h"
#include "support/model.h"

namespace sluice {
namespace {

using test::Pool;
using Rows = std::vector<double>;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// Reference implementation of one attention layer in f64, with explicit T by T matrices, from the weights
/// and the layer's input.
struct Naive {
  int64_t T, H, Hkv, D;
  std::vector<int32_t> first_key;
  Rows queries, keys, values;        // as attention uses them: (T, heads, D)
  Rows attention;                    // (H, T, T), a sink in its denominator
  Rows kept;                         // (H, T): its rows' sums
  std::vector<Rows> scores;          // per gate, T rows
  Rows before, after;                // (T, H, D): around the gates at sdpa_output
  std::vector<double> residual_max;  // of the four taps

  double& a(int64_t h, int64_t t, int64_t j) { return attention[static_cast<size_t>((h * T + t) * T + j)]; }

  Naive(test::TestModel& m, size_t layer)
      : T(m.batch.size()),
        H(m.model.config().num_attention_heads),
        Hkv(m.model.config().num_key_value_heads),
        D(m.model.config().head_dim),
        first_key(m.batch.first_key) {
    const ModelConfig& c = m.model.config();
    const std::string prefix = "model.layers." + std::to_string(layer) + ".self_attn.";
    const auto weight = [&](const std::string& name) { return m.store.value(m.id(prefix + name)); };
    const Tensor x = m.saved.blocks[layer].attention_norm.y;
    // of the leading channels of every token's input, as many as the matrix has columns
    const auto product = [&](const Tensor& w, const auto& input, int64_t width) {
      Rows y;
      for (int64_t t = 0; t < T; ++t)
        for (int64_t o = 0; o < w.dim(0); ++o) {
          double sum = 0;
          for (int64_t i = 0; i < w.dim(1); ++i) sum += input(t * width + i) * Pool::get(w, o * w.dim(1) + i);
          y.push_back(sum);
        }
      return y;
    };
    const auto project = [&](const std::string& name) {
      return product(
          weight(name), [&](int64_t i) { return Pool::get(x, i); }, x.dim(1));
    };
    queries = project("q_proj.weight");
    keys = project("k_proj.weight");
    values = project("v_proj.weight");

    std::map<GatePosition, std::string> names = {{GatePosition::query, "query_"},
                                                 {GatePosition::value, "value_"}};
    const auto apply = [&](GatePosition position, Rows& rows) {
      for (size_t g = 0; g < c.attention.gates.size(); ++g) {
        const GateConfig& gate = c.attention.gates[g];
        if (gate.position != position) continue;
        Rows z;
        if (gate.input == GateInput::hidden) {
          z = project(names[position] + "gate_proj.weight");
        } else if (gate.input == GateInput::self) {
          z = product(
              weight(names[position] + "self_gate_proj.weight"),
              [&](int64_t i) { return rows[static_cast<size_t>(i)]; }, std::ssize(rows) / T);
        } else {
          const Tensor constant = weight("gate.weight");
          for (int64_t i = 0; i < T * constant.numel(); ++i)
            z.push_back(Pool::get(constant, i % constant.numel()));
        }
        if (gate.bias) {
          const Tensor bias = weight(names[position] + "gate_proj.bias");
          for (size_t i = 0; i < z.size(); ++i)
            z[i] += Pool::get(bias, static_cast<int64_t>(i) % bias.numel());
        }
        for (double& s : z) {
          if (gate.activation == GateActivation::sigmoid) s = sigmoid(s);
          if (gate.activation == GateActivation::ns_sigmoid) s = 0.5 + 0.5 * sigmoid(s);
          if (gate.activation == GateActivation::two_sigmoid) s = 2 * sigmoid(s);
          if (gate.activation == GateActivation::silu) s = s * sigmoid(s);
        }
        const size_t each = rows.size() / z.size();
        for (size_t i = 0; i < rows.size(); ++i)
          rows[i] = gate.combine == GateCombine::multiply ? rows[i] * z[i / each] : rows[i] + z[i / each];
        scores[g] = z;
      }
    };
    scores.resize(c.attention.gates.size());
    apply(GatePosition::query, queries);
    apply(GatePosition::value, values);
    const auto norm_and_rotate = [&](Rows& rows, int64_t heads, const Tensor& norm) {
      for (int64_t row = 0; row < T * heads; ++row) {
        double* r = rows.data() + row * D;
        double squares = 0;
        for (int64_t d = 0; d < D; ++d) squares += r[d] * r[d] / static_cast<double>(D);
        for (int64_t d = 0; d < D; ++d) r[d] *= Pool::get(norm, d) / std::sqrt(squares + c.rms_norm_eps);
        for (int64_t d = 0; d < D / 2; ++d) {
          const double angle = m.batch.positions[static_cast<size_t>(row / heads)] *
                               std::pow(c.rope.theta, -2.0 * static_cast<double>(d) / static_cast<double>(D));
          const double u = r[d], v = r[d + D / 2];
          r[d] = u * std::cos(angle) - v * std::sin(angle);
          r[d + D / 2] = v * std::cos(angle) + u * std::sin(angle);
        }
      }
    };
    norm_and_rotate(queries, H, weight("q_norm.weight"));
    norm_and_rotate(keys, Hkv, weight("k_norm.weight"));

    attention.assign(static_cast<size_t>(H * T * T), 0);
    before.assign(static_cast<size_t>(T * H * D), 0);
    for (int64_t h = 0; h < H; ++h)
      for (int64_t t = 0; t < T; ++t) {
        const int64_t group = h / (H / Hkv),
                      window = c.attention.window_in_layer(static_cast<int64_t>(layer));
        const auto score = [&](const double* key) {
          return std::inner_product(queries.data() + (t * H + h) * D, queries.data() + (t * H + h + 1) * D,
                                    key, 0.0) /
                 std::sqrt(static_cast<double>(D));
        };
        const auto extra_score = [&](const char* name, int64_t row) {
          std::vector<double> key;
          for (int64_t d = 0; d < D; ++d) key.push_back(Pool::get(weight(name), row * D + d));
          return std::exp(score(key.data()));
        };
        const AttentionKind kind = c.attention.kind;
        const bool pick = kind == AttentionKind::softpick;
        const double sink = kind == AttentionKind::sink         ? std::exp(Pool::get(weight("sinks"), h))
                            : kind == AttentionKind::off_by_one ? 1
                            : kind == AttentionKind::sink_key   ? extra_score("sink_key", h)
                            : kind == AttentionKind::kv_bias    ? extra_score("bias_key", group)
                                                                : 0;
        double whole = pick ? 1e-6 : sink;
        for (int64_t j =
                 std::max<int64_t>(first_key[static_cast<size_t>(t)], window > 0 ? t - window + 1 : 0);
             j <= t; ++j) {
          const double e = std::exp(score(keys.data() + (j * Hkv + group) * D));
          a(h, t, j) = pick ? std::max(e - 1, 0.0) : e;
          whole += pick ? std::abs(e - 1) : e;
        }
        for (int64_t j = 0; j <= t; ++j) {
          a(h, t, j) /= whole;
          for (int64_t d = 0; d < D; ++d)
            before[static_cast<size_t>((t * H + h) * D + d)] +=
                a(h, t, j) * values[static_cast<size_t>((j * Hkv + group) * D + d)];
        }
        for (int64_t d = 0; kind == AttentionKind::kv_bias && d < D; ++d)
          before[static_cast<size_t>((t * H + h) * D + d)] +=
              sink / whole * Pool::get(weight("bias_value"), group * D + d);
        kept.push_back(1 - sink / whole);
      }
    if (c.attention.exclusive != ExclusiveAttention::none)
      for (int64_t row = 0; row < T * H; ++row) {
        double* const y = before.data() + row * D;
        const double* const v = values.data() + row / (H / Hkv) * D;
        const bool learned = c.attention.exclusive == ExclusiveAttention::learned;
        const double along = std::inner_product(y, y + D, v, 0.0) / std::inner_product(v, v + D, v, 0.0),
                     scale = learned ? Pool::get(weight("exclusive_scale"), row % H) : 1;
        // of a query that sees itself alone nothing is left but rounding
        for (int64_t d = 0; d < D; ++d) y[d] = starts(row / H) && !learned ? 0 : y[d] - scale * along * v[d];
      }
    if (c.attention.output_norm == OutputNorm::rmsnorm)
      for (int64_t row = 0; row < T * H; ++row) {
        double* const y = before.data() + row * D;
        const double root =
            std::sqrt(std::inner_product(y, y + D, y, 0.0) / static_cast<double>(D) + c.rms_norm_eps);
        for (int64_t d = 0; d < D; ++d) y[d] *= Pool::get(weight("o_norm.weight"), row % H * D + d) / root;
      }
    if (c.attention.output_activation == OutputActivation::silu)
      for (double& y : before) y *= sigmoid(y);
    after = before;
    names[GatePosition::sdpa_output] = "";
    apply(GatePosition::sdpa_output, after);
    const auto largest = [](const Tensor& t) {
      double result = 0;
      for (int64_t i = 0; i < t.numel(); ++i) result = std::max(result, std::abs(Pool::get(t, i)));
      return result;
    };
    const Block::Saved& s = m.saved.blocks[layer];
    residual_max = {largest(s.attention_out.y), largest(s.x1), largest(s.ffn_out.y), largest(s.y)};
  }

  bool starts(int64_t t) const { return first_key[static_cast<size_t>(t)] == t; }
};

/// Two sequences of three documents each, of one model; another for each set.
struct TwoSequences {
  test::TestModel a, b;
  explicit TwoSequences(const ModelConfig& config, DType dtype = DType::f64)
      : a(config, batch(1), dtype), b(config, batch(7), dtype) {
    a.randomize();
    b.copy_from(a);
    a.loss();
    b.loss();
  }
  static test::TokenBatch batch(uint32_t seed) {
    test::TokenBatch batch;
    for (const int64_t length : {7, 2, 5}) batch.add(test::random_tokens(length, 11, seed++));
    return batch;
  }
};

Analysis analyzed(TwoSequences& m) {
  Context ctx(1 << 20);
  const int64_t T = m.a.batch.size();
  AnalysisConfig measures;
  measures.query_classes = {{"small", {0, 1, 2, 3}}};
  measures.sink_threshold = 0.4;
  measures.sink_length = 3;
  const Statistics blank(m.a.model, T, measures);
  std::vector<Analysis::Set> sets = {{"one", blank}, {"two", blank}};
  Statistics total = blank;
  // The other model has the same weights, so either model's layers can be used.
  sets[0].sums.add(ctx, m.a.batch.view(), m.a.saved);
  sets[1].sums.add(ctx, m.b.batch.view(), m.b.saved);
  for (Analysis::Set& set : sets) total.merge(set.sums);
  SecondPass second(total);
  second.add(ctx, m.a.saved);
  second.add(ctx, m.b.saved);
  Analysis result{.sets = sets, .total = total, .second = second, .maps = AttentionMaps(m.a.model, T)};
  result.maps.add(ctx, m.a.batch.view().first_key, m.a.saved);
  result.maps.add(ctx, m.b.batch.view().first_key, m.b.saved);
  return result;
}

double mean_of(const Rows& x) {
  return std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size());
}

double share_below(const Rows& x, double factor, double threshold) {
  return static_cast<double>(
             std::count_if(x.begin(), x.end(), [&](double v) { return std::abs(v) * factor < threshold; })) /
         static_cast<double>(x.size());
}

Rows joined(Rows a, const Rows& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// The paper's attention on the first token: over all queries, or over queries that are not first tokens
/// themselves.
double first_token(std::vector<Naive>& sequences, int64_t h, bool later) {
  double sum = 0, count = 0;
  for (Naive& n : sequences)
    for (int64_t t = 0; t < n.T; ++t)
      if (!later || !n.starts(t)) sum += n.a(h, t, n.first_key[static_cast<size_t>(t)]), ++count;
  return sum / count;
}

/// Over later queries whose token is one of the first four, or is not.
double first_token_of_class(const TwoSequences& m, std::vector<Naive>& sequences, int64_t h, bool small) {
  double sum = 0, count = 0;
  for (size_t s = 0; s < 2; ++s)
    for (int64_t t = 0; t < sequences[s].T; ++t) {
      const int32_t token = (s == 0 ? m.a : m.b).batch.tokens[static_cast<size_t>(t)];
      if (sequences[s].starts(t) || (token < 4) != small) continue;
      sum += sequences[s].a(h, t, sequences[s].first_key[static_cast<size_t>(t)]), ++count;
    }
  return sum / count;
}

/// Sink^eps of a head: the share of the queries of documents whose mean over their first `length` queries
/// exceeds the threshold.
double sink_share(std::vector<Naive>& sequences, int64_t h, int64_t length, double threshold) {
  double in_sinks = 0, count = 0;
  for (Naive& n : sequences)
    for (int64_t t = 0; t < n.T; ++t) {
      if (!n.starts(t)) continue;
      double sum = 0, size = 0;
      for (int64_t q = t; q < std::min(n.T, t + length) && n.first_key[static_cast<size_t>(q)] == t; ++q)
        sum += n.a(h, q, t), ++size;
      in_sinks += sum / size > threshold ? size : 0;
      count += size;
    }
  return in_sinks / count;
}

double importance(std::vector<Naive>& sequences, int64_t h, const ModelConfig& c, int gate) {
  double sum = 0, count = 0;
  for (Naive& n : sequences)
    for (int64_t t = 0; t < n.T; ++t) {
      if (gate >= 0) {
        const Rows& s = n.scores[static_cast<size_t>(gate)];
        const int64_t width = std::ssize(s) / (n.T * n.H);
        for (int64_t i = 0; i < width; ++i)
          sum += s[static_cast<size_t>((t * n.H + h) * width + i)] / static_cast<double>(width);
      } else if (c.attention.kind != AttentionKind::softmax && c.attention.kind != AttentionKind::softpick) {
        sum += n.kept[static_cast<size_t>(h * n.T + t)];
      } else if (n.starts(t)) {
        continue;
      } else {
        sum += 1 - n.a(h, t, n.first_key[static_cast<size_t>(t)]);
      }
      ++count;
    }
  return sum / count;
}

double deviation(const Rows& x, int ddof) {
  double squares = 0;
  for (const double v : x) squares += (v - mean_of(x)) * (v - mean_of(x));
  return std::sqrt(squares / (static_cast<double>(x.size()) - ddof));
}

void check_layer(TwoSequences& m, const nlohmann::json& all, size_t layer, double epsilon) {
  const ModelConfig& c = m.a.model.config();
  std::vector<Naive> both = {Naive(m.a, layer), Naive(m.b, layer)}, one = {both[0]};
  const auto& j = all["layers"][layer];
  const auto equal = [&](const nlohmann::json& found, double expected) {
    INFO("layer " << layer << ", expected " << expected << ", found " << found.dump());
    REQUIRE(found.is_number());
    CHECK(found.get<double>() == Approx(expected).epsilon(epsilon).margin(epsilon * 1e-3));
  };

  int gate_of_heads = -1;
  for (size_t g = c.attention.gates.size(); g-- > 0;)
    if (c.attention.gates[g].position == GatePosition::sdpa_output) gate_of_heads = static_cast<int>(g);
  const bool says =
      gate_of_heads < 0 || score_range(c.attention.gates[static_cast<size_t>(gate_of_heads)].activation);
  Rows heads, later, open;
  for (int64_t h = 0; h < both[0].H; ++h) {
    const auto i = static_cast<size_t>(h);
    heads.push_back(first_token(both, h, false));
    later.push_back(first_token(both, h, true));
    open.push_back(importance(both, h, c, gate_of_heads));
    equal(j["heads"]["first_token_attention"][i], heads.back());
    equal(j["heads"]["first_token_attention_without_first_query"][i], later.back());
    equal(j["heads"]["first_token_attention_by_class"]["small"][i], first_token_of_class(m, both, h, true));
    equal(j["heads"]["first_token_attention_by_class"]["other"][i], first_token_of_class(m, both, h, false));
    if (epsilon < 1e-6) {  // a mean near the threshold may fall on its other side
      equal(j["heads"]["sink_share"][i], sink_share(both, h, both[0].T, 0.4));
      equal(j["heads"]["sink_share_leading"][i], sink_share(both, h, 3, 0.4));
    }
    if (!says) continue;
    equal(j["heads"]["importance"][i], open.back());
    equal(all["sets"][0]["importance"][layer][i], importance(one, h, c, gate_of_heads));
  }
  equal(j["first_token_attention"], mean_of(heads));
  equal(j["first_token_attention_without_first_query"], mean_of(later));
  if (says) equal(j["imbalance"], deviation(open, 1) / mean_of(open));
  if (says) equal(j["imbalance_ddof_0"], deviation(open, 0) / mean_of(open));
  CHECK(j["imbalance"].is_null() != says);

  REQUIRE(j["gates"].size() == c.attention.gates.size());
  double mean_gate = 1;
  for (size_t g = 0; g < c.attention.gates.size(); ++g) {
    const auto& gate = j["gates"][g];
    const Rows s = joined(both[0].scores[g], both[1].scores[g]);
    const auto [least, largest] = std::minmax_element(s.begin(), s.end());
    equal(gate["mean"], mean_of(s));
    equal(gate["std"], deviation(s, 0));
    equal(gate["min"], *least);
    equal(gate["max"], *largest);
    Rows first, rest;
    for (const Naive& n : both)
      for (size_t i = 0, width = n.scores[g].size() / static_cast<size_t>(n.T); i < n.scores[g].size(); ++i)
        (n.starts(static_cast<int64_t>(i / width)) ? first : rest).push_back(n.scores[g][i]);
    equal(gate["first_token_mean"], mean_of(first));
    equal(gate["rest_mean"], mean_of(rest));
    const auto& health = gate["health"];
    const int64_t heads_of_gate = gate_heads(c, c.attention.gates[g].position);
    if (!score_range(c.attention.gates[g].activation)) {
      CHECK((health["below_0.05"].is_null() && health["heads"]["shut_tokens"].is_null()));
    } else if (epsilon < 1e-6) {
      for (int64_t h = 0; h < heads_of_gate; ++h) {
        double below = 0, above = 0, shut = 0, count = 0;
        for (const Naive& n : both) {
          const int64_t width = std::ssize(n.scores[g]) / (n.T * heads_of_gate);
          for (int64_t t = 0; t < n.T; ++t) {
            const auto row = n.scores[g].begin() + (t * heads_of_gate + h) * width;
            below += static_cast<double>(std::count_if(row, row + width, [](double x) { return x < 0.05; })) /
                     static_cast<double>(width);
            above += static_cast<double>(std::count_if(row, row + width, [](double x) { return x > 0.95; })) /
                     static_cast<double>(width);
            shut += std::accumulate(row, row + width, 0.0) / static_cast<double>(width) < 0.05;
            ++count;
          }
        }
        const auto i = static_cast<size_t>(h);
        equal(health["heads"]["below_0.05"][i], below / count);
        equal(health["heads"]["above_0.95"][i], above / count);
        equal(health["heads"]["shut_tokens"][i], shut / count);
      }
    }
    if (c.attention.gates[g].position == GatePosition::sdpa_output) mean_gate *= mean_of(s);
    if (epsilon > 1e-6) continue;  // scores near an edge may fall into the neighbouring bin
    const double low = gate["edges_min"], high = gate["edges_max"];
    if (score_range(c.attention.gates[g].activation)) CHECK((low == 0 && high == 1));
    for (const int64_t bins : {50, 100}) {
      Rows counts(static_cast<size_t>(bins), 0);
      for (const double x : s)
        counts[static_cast<size_t>(std::min(
            bins - 1, static_cast<int64_t>((x - low) / (high - low) * static_cast<double>(bins))))] +=
            1.0 / static_cast<double>(s.size());
      const auto& histogram = gate["histogram_" + std::to_string(bins)];
      REQUIRE(histogram.size() == counts.size());
      for (size_t i = 0; i < counts.size(); ++i) equal(histogram[i], counts[i]);
    }
    Rows sorted = s;
    std::sort(sorted.begin(), sorted.end());
    CHECK(std::abs(gate["quantiles"]["0.5"].get<double>() - sorted[(sorted.size() - 1) / 2]) <=
          2 * (high - low) / kFineBins);
  }

  const auto& output = j["attention_output"];
  const Rows before = joined(both[0].before, both[1].before), after = joined(both[0].after, both[1].after);
  const auto mean_abs = [](Rows x) {
    for (double& v : x) v = std::abs(v);
    return mean_of(x);
  };
  equal(output["mean_abs_before"], mean_abs(before));
  equal(output["mean_abs_after"], mean_abs(after));
  for (const auto& [name, threshold] : {std::pair("below_1e-2", 1e-2), std::pair("below_1e-3", 1e-3)}) {
    if (epsilon > 1e-6) break;
    equal(output[std::string(name) + "_before"], share_below(before, 1, threshold));
    equal(output[std::string(name) + "_after"], share_below(after, 1, threshold));
    const auto& scaled = output[std::string(name) + "_before_times_mean_gate"];
    if (gate_of_heads < 0)
      CHECK(scaled.is_null());
    else
      equal(scaled, share_below(before, std::abs(mean_gate), threshold));
  }

  size_t tap = 0;
  for (const char* name : {"attention_output", "attention_residual", "ffn_output", "ffn_residual"}) {
    CHECK(j["max"][name] == std::max(both[0].residual_max[tap], both[1].residual_max[tap]));
    ++tap;
  }
  Rows first, rest;
  for (const Naive& n : both)
    for (int64_t i = 0; i < n.T * n.Hkv; ++i) {
      const double* v = n.values.data() + i * n.D;
      (n.starts(i / n.Hkv) ? first : rest).push_back(std::sqrt(std::inner_product(v, v + n.D, v, 0.0)));
    }
  const auto largest = [&](bool of_first) {
    double found = 0;
    for (const test::TestModel* model : {&m.a, &m.b})
      for (const Tensor& x : {model->saved.blocks[layer].x1, model->saved.blocks[layer].y})
        for (int64_t i = 0; i < x.numel(); ++i)
          if (both[0].starts(i / c.hidden_size) == of_first)
            found = std::max(found, std::abs(Pool::get(x, i)));
    return found;
  };
  CHECK(j["max"]["residual_first"] == largest(true));
  CHECK(j["max"]["residual_rest"] == largest(false));
  equal(j["value_norm_first"], mean_of(first));
  equal(j["value_norm_rest"], mean_of(rest));
}

ModelConfig tiny(std::vector<GateConfig> gates, AttentionKind kind = AttentionKind::softmax) {
  ModelConfig config = test::tiny_config();
  config.num_hidden_layers = 2;
  config.attention.kind = kind;
  config.attention.gates = std::move(gates);
  return config;
}

const GateConfig kHeadwise = {.granularity = GateGranularity::headwise};
const GateConfig kConstant = {.activation = GateActivation::ns_sigmoid, .input = GateInput::none};
const GateConfig kSilu = {.activation = GateActivation::silu};
const GateConfig kValue = {.position = GatePosition::value}, kQuery = {.position = GatePosition::query};
const GateConfig kSelf = {
    .position = GatePosition::value, .granularity = GateGranularity::headwise, .input = GateInput::self};
const GateConfig kTruncated = {.activation = GateActivation::two_sigmoid, .input_channels = 3, .bias = 0.5};

}  // namespace

TEST_CASE("statistics equal those of attention computed token by token from the weights", "[analyze]") {
  const auto sink = AttentionKind::sink;
  ModelConfig experts = tiny({kQuery}, sink), activated = tiny({kHeadwise}, sink);
  experts.moe.num_experts = 3;
  experts.moe.num_experts_per_tok = 2;
  experts.moe.moe_intermediate_size = 4;
  experts.norm_placement = NormPlacement::sandwich;
  activated.attention.output_activation = OutputActivation::silu;
  ModelConfig windowed = tiny({{}}, sink);
  windowed.attention.window = windowed.attention.window_pattern = 2;
  ModelConfig exclusive = tiny({kHeadwise}), learned = tiny({kSelf, kTruncated}, sink), normed = tiny({{}});
  exclusive.attention.exclusive = ExclusiveAttention::full;
  exclusive.attention.output_norm = OutputNorm::rmsnorm;
  learned.attention.exclusive = ExclusiveAttention::learned;
  normed.gated_norm.rank = 2;
  for (const ModelConfig& config :
       {tiny({}), tiny({}, sink), tiny({{}, kValue}, sink), tiny({kValue, kConstant}),
        tiny({kHeadwise, kQuery}), tiny({kSilu}), experts, activated, tiny({}, AttentionKind::off_by_one),
        tiny({{}}, AttentionKind::sink_key), tiny({{}}, AttentionKind::kv_bias),
        tiny({}, AttentionKind::kv_bias), tiny({kHeadwise}, AttentionKind::softpick),
        tiny({}, AttentionKind::softpick), windowed, exclusive, learned, normed}) {
    TwoSequences m(config);
    const auto json = nlohmann::json::parse(to_json(analyzed(m)).dump());
    for (size_t layer = 0; layer < 2; ++layer) check_layer(m, json, layer, 1e-9);
    const auto& total = json["total"];
    CHECK(json["tokens"] == 2 * m.a.batch.size());
    for (const char* name :
         {"first_token_attention", "first_token_attention_without_first_query", "value_norm_first"})
      CHECK(total[name].get<double>() ==
            Approx((json["layers"][0][name].get<double>() + json["layers"][1][name].get<double>()) / 2)
                .epsilon(1e-12));
    const double residual[] = {json["layers"][0]["max"]["ffn_residual"],
                               json["layers"][1]["max"]["ffn_residual"]};
    CHECK(total["m_act_mean"] == Approx((residual[0] + residual[1]) / 2).epsilon(1e-14));
    CHECK(total["m_act_max"] == std::max(residual[0], residual[1]));
    CHECK(total["mean_gate_score"].is_null() == config.attention.gates.empty());
  }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    TwoSequences m(tiny({{}, kValue}, sink), dtype);
    check_layer(m, nlohmann::json::parse(to_json(analyzed(m)).dump()), 0, dtype == DType::f32 ? 1e-4 : 0.05);
  }
}

TEST_CASE("attention maps equal the explicit attention matrix, and planes contain queries and keys",
          "[analyze]") {
  ModelConfig config = tiny({{}}, GENERATE(AttentionKind::softmax, AttentionKind::sink,
                                           AttentionKind::kv_bias, AttentionKind::softpick));
  config.attention.window = GENERATE(0, 2);
  config.attention.window_pattern = config.attention.window;
  TwoSequences m(config);
  const Analysis result = analyzed(m);
  const std::vector<float> mean = result.maps.mean(), &heads = result.maps.heads();
  const int64_t M = m.a.batch.size(), H = 4;
  for (size_t layer = 0; layer < 2; ++layer) {
    Naive n(m.a, layer), other(m.b, layer);
    for (int64_t t = 0; t < M; ++t)
      for (int64_t j = 0; j < M; ++j) {
        double expected = 0;
        for (int64_t h = 0; h < H; ++h) {
          expected += (n.a(h, t, j) + other.a(h, t, j)) / static_cast<double>(2 * H);
          REQUIRE(heads[((layer * H + static_cast<size_t>(h)) * M + static_cast<size_t>(t)) * M +
                        static_cast<size_t>(j)] == Approx(n.a(h, t, j)).margin(1e-7));
        }
        REQUIRE(mean[(layer * M + static_cast<size_t>(t)) * M + static_cast<size_t>(j)] ==
                Approx(expected).margin(1e-7));
      }
    // A plane preserves the explained fraction of the squared distances from the origin.
    const AttentionMaps::Planes queries = result.maps.queries();
    for (int64_t h = 0; h < H; ++h) {
      double whole = 0, kept = 0;
      for (int64_t d = 0; d < n.D; ++d) {
        Rows x;
        for (const Naive* s : {&n, &other})
          for (int64_t t = 0; t < M; ++t) x.push_back(s->queries[static_cast<size_t>((t * H + h) * n.D + d)]);
        whole += std::pow(deviation(x, 0), 2);
      }
      const size_t head = layer * H + static_cast<size_t>(h);
      for (int64_t i = 0; i < 2 * M * 2; ++i)
        kept += std::pow(queries.points[head * 2 * 2 * M + static_cast<size_t>(i)], 2);
      CHECK(kept / static_cast<double>(2 * M) / whole ==
            Approx(queries.explained[2 * head] + queries.explained[2 * head + 1]).epsilon(1e-5));
    }
  }
}

TEST_CASE("principal components match the closed form in two dimensions and reconstruct a matrix",
          "[analyze]") {
  // (x, y) with variances 1 and 4, covariance 1.2: eigenvalues (5 +- sqrt(9 + 4 * 1.44)) / 2.
  const double root = std::sqrt(9 + 4 * 1.44), large = (5 + root) / 2, small = (5 - root) / 2;
  const Rows points = {1, 1.2, 1, 1.2, -1, -1.2, -1, -1.2, 0, 0, 0, 0, 0, 0, 0, 0};
  Rows scaled;
  for (size_t i = 0; i < 8;
       ++i) {  // 4 x (1, 1.2) / sqrt(n), and what is missing of y: 4 - 1.44 = 2.56 over 4 rows
    scaled.push_back(points[2 * i] * std::sqrt(2.0) + 10);
    scaled.push_back(points[2 * i + 1] * std::sqrt(2.0) +
                     (i < 4 ? 0 : (i % 2 == 0 ? 1 : -1) * std::sqrt(5.12)) - 3);
  }
  const Projection p = project_to_plane(scaled.data(), 8, 2);
  CHECK(p.explained[0] == Approx(large / 5).epsilon(1e-12));
  CHECK(p.explained[1] == Approx(small / 5).epsilon(1e-12));
  const double axis = std::atan2(large - 1, 1.2);  // (1.2, large - 1) is the eigenvector
  for (size_t i = 0; i < 8; ++i) {
    const double along = (scaled[2 * i] - 10) * std::cos(axis) + (scaled[2 * i + 1] + 3) * std::sin(axis);
    CHECK(p.points[2 * i] == Approx(along).margin(1e-12));
  }

  Pool pool(3);
  constexpr int64_t n = 9;
  const Tensor random = pool.normal(DType::f64, {n, n});
  Rows a(n * n), vectors;
  for (int64_t i = 0; i < n * n; ++i)
    a[static_cast<size_t>(i)] = Pool::get(random, i) + Pool::get(random, i % n * n + i / n);
  const Rows values = symmetric_eigen(a, n, vectors);
  for (size_t i = 0; i < n; ++i)
    for (size_t j = 0; j < n; ++j) {
      double again = 0, dot = 0;
      for (size_t k = 0; k < n; ++k) {
        again += values[k] * vectors[k * n + i] * vectors[k * n + j];
        dot += vectors[i * n + k] * vectors[j * n + k];
      }
      CHECK(again == Approx(a[i * n + j]).margin(1e-12));
      CHECK(dot == Approx(i == j ? 1 : 0).margin(1e-13));
    }
  CHECK(project_to_plane(Rows(6, 2.5).data(), 3, 2).explained[0] == 0);
  CHECK(project_to_plane(Rows{1, 2, 3}.data(), 3, 1).explained[0] == 1);
}

TEST_CASE("arrays are NPY 1.0 files", "[analyze]") {
  const test::TemporaryFolder folder;
  write_npy(folder / "a.npy", {2, 1, 3}, std::vector<float>{1, 2, 3, 4, 5, -6.5f});
  const std::string bytes = io::read_file(folder / "a.npy");
  const size_t length = static_cast<unsigned char>(bytes[8]) + 256u * static_cast<unsigned char>(bytes[9]);
  CHECK(bytes.substr(0, 8) == std::string("\x93NUMPY\x01\x00", 8));
  CHECK((10 + length) % 64 == 0);
  CHECK(bytes.substr(10, 66) == "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1, 3, ), }  ");
  CHECK(bytes[9 + length] == '\n');
  REQUIRE(bytes.size() == 10 + length + 24);
  float last = 0;
  std::copy_n(bytes.end() - 4, 4, reinterpret_cast<char*>(&last));
  CHECK(last == -6.5f);
  CHECK_THROWS_AS(write_npy(folder / "b.npy", {2, 2}, std::vector<double>(3)), Error);
}

TEST_CASE("quantiles follow from the counts", "[analyze]") {
  CHECK(quantile({0, 4, 0, 4}, 0, 4, 0.25) == 1.5);
  CHECK(quantile({0, 4, 0, 4}, 0, 4, 0.5) == 2);
  CHECK(quantile({0, 4, 0, 4}, 0, 4, 1) == 4);
  CHECK(quantile({0, 4, 0, 4}, -2, 2, 0.75) == 1.5);
}

}  // namespace sluice
