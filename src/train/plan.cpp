#include "train/plan.h"

#include <algorithm>
#include <cmath>

#include "config/fields.h"
#include "config/load.h"
#include "core/error.h"
#include "data/tokenizer.h"
#include "nn/transformer.h"
#include "params/param_store.h"

namespace sluice {
namespace {

void resolve_vocabulary(Config& config) {
  if (config.model.vocab_size == 0)
    config.model.vocab_size = make_tokenizer(config.data.tokenizer)->vocab_size();
}

std::optional<ParameterMatch> resolve(Config& config, std::vector<std::string> chain) {
  resolve_vocabulary(config);
  ModelConfig& model = config.model;
  if (model.match_parameters_of.empty()) return std::nullopt;
  ParameterMatch match;
  match.path = model.match_parameters_of;
  if (std::find(chain.begin(), chain.end(), match.path) != chain.end())
    fail(ExitCode::usage, "model.match_parameters_of: {} matches itself in a circle", match.path);
  chain.push_back(match.path);
  Config other = load_config(match.path);
  resolve(other, chain);
  match.target = count_parameters(other.model);

  // The count is linear in intermediate_size.
  ModelConfig probe = model;
  probe.intermediate_size = 1;
  const int64_t at_one = count_parameters(probe);
  probe.intermediate_size = 2;
  const int64_t per_unit = count_parameters(probe) - at_one;
  const int64_t room = match.target - (at_one - per_unit);
  const int64_t step = per_unit * model.match_multiple;
  match.exact_width = static_cast<double>(room) / static_cast<double>(per_unit);
  match.width = room < step ? 0 : room / step * model.match_multiple;
  if (match.width == 0)
    fail(ExitCode::usage,
         "model.match_parameters_of: no intermediate_size (a multiple of {}) brings this model down to the "
         "{} parameters "
         "of {}; without a feed-forward network it has {}",
         model.match_multiple, match.target, match.path, at_one - per_unit);
  model.intermediate_size = match.width;
  model.match_parameters_of.clear();
  match.parameters = count_parameters(model);
  return match;
}

/// 1234567 as 1,234,567.
std::string grouped(int64_t n) {
  std::string digits = std::to_string(n);
  for (int64_t i = static_cast<int64_t>(digits.size()) - 3; i > 0; i -= 3)
    digits.insert(static_cast<size_t>(i), 1, ',');
  return digits;
}

std::string scaled(double x) {
  constexpr const char* kUnits[] = {"", "k", "M", "B", "T"};
  int unit = 0;
  while (x >= 999.95 && unit < 4) {
    x /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f}", x) : fmt::format("{:.2f}{}", x, kUnits[unit]);
}

std::string bytes_text(int64_t n) {
  const double x = static_cast<double>(n);
  if (n >= int64_t{1} << 30) return fmt::format("{:.2f} GiB", x / (1 << 30));
  if (n >= 1 << 20) return fmt::format("{:.1f} MiB", x / (1 << 20));
  return fmt::format("{:.1f} KiB", x / 1024);
}

constexpr std::string_view kLayers = "model.layers.";

/// Layer a parameter belongs to, or -1.
int64_t layer_of(const std::string& name) {
  if (name.compare(0, kLayers.size(), kLayers) != 0) return -1;
  return std::stoll(name.substr(kLayers.size()));
}

}  // namespace

int64_t count_parameters(const ModelConfig& model) {
  ParamStore store;
  const Transformer transformer(model, store);
  return store.total();
}

std::optional<ParameterMatch> resolve_parameter_match(Config& config) { return resolve(config, {}); }

Plan make_plan(Config config) {
  Plan plan;
  plan.match = resolve_parameter_match(config);
  const ModelConfig& model = config.model;

  ParamStore store;
  const Transformer transformer(model, store);
  plan.total = store.total();
  plan.non_embedding = plan.total;
  for (ParamStore::Id id = 0; id < static_cast<ParamStore::Id>(store.specs().size()); ++id) {
    const ParamSpec& spec = store.specs()[static_cast<size_t>(id)];
    plan.parameters.push_back({spec.name, spec.shape, store.numel(id)});
    if (spec.packed)
      plan.matmul_parameters += std::llround(static_cast<double>(store.numel(id)) * spec.active);
    if (spec.shape[0] == model.vocab_size && layer_of(spec.name) < 0) plan.non_embedding -= store.numel(id);
  }
  ModelConfig plain = model;
  plain.attention.gates.clear();
  plan.gate_parameters = plan.total - count_parameters(plain);
  plan.flops_per_token =
      6.0 * static_cast<double>(plan.matmul_parameters) +
      6.0 * static_cast<double>(model.num_hidden_layers) * static_cast<double>(config.data.seq_len) *
          static_cast<double>(model.num_attention_heads) * static_cast<double>(model.head_dim);

  plan.memory = Trainer::measure(config);
  plan.steps = training_steps(config);
  plan.tokens_per_step = tokens_per_step(config);
  plan.tokens = plan.steps * plan.tokens_per_step;
  plan.accumulation_steps = config.train.global_batch_size / config.train.micro_batch_size;
  plan.config = std::move(config);
  return plan;
}

std::string plan_text(const Plan& plan) {
  const Config& c = plan.config;
  std::string out = fmt::format("{}\n\nparameters\n", c.name);
  // Layer 0 in full, then how often it is repeated; layers are alike but for their names.
  int64_t in_layer = 0, layer_total = 0;
  const auto close_layer = [&] {
    if (in_layer == 0) return;
    out += fmt::format("  {:<48} {:>16} {:>17}\n", fmt::format("layer 0 x {}", c.model.num_hidden_layers), "",
                       grouped(layer_total * c.model.num_hidden_layers));
    in_layer = 0;
  };
  for (const Plan::Parameter& p : plan.parameters) {
    const int64_t layer = layer_of(p.name);
    if (layer > 0) continue;
    if (layer < 0) close_layer();
    if (layer == 0) {
      ++in_layer;
      layer_total += p.count;
    }
    out += fmt::format(
        "  {:<48} {:>16} {:>17}\n", p.name,
        p.shape.size() == 1 ? std::to_string(p.shape[0]) : fmt::format("{} x {}", p.shape[0], p.shape[1]),
        grouped(p.count));
  }
  close_layer();
  const auto line = [&](const char* name, const std::string& value, const std::string& note = "") {
    out += fmt::format("  {:<24} {:>22}{}{}\n", name, value, note.empty() ? "" : "  ", note);
  };
  out += "\n";
  line("total", grouped(plan.total), scaled(static_cast<double>(plan.total)));
  line("non-embedding", grouped(plan.non_embedding));
  line("added by gates", grouped(plan.gate_parameters),
       plan.gate_parameters == 0
           ? ""
           : fmt::format("{:.2f} % of the rest", 100.0 * static_cast<double>(plan.gate_parameters) /
                                                     static_cast<double>(plan.total - plan.gate_parameters)));
  if (plan.match) {
    out += fmt::format("\nmatched to {}\n", plan.match->path);
    line("its parameters", grouped(plan.match->target));
    line("exact width", fmt::format("{:.2f}", plan.match->exact_width));
    line("intermediate_size", std::to_string(plan.match->width),
         fmt::format("multiple of {}", c.model.match_multiple));
    line("difference", fmt::format("{:+.4f} %", 100 * plan.match->difference()));
  }

  out += "\ncompute\n";
  line("FLOPs per token", fmt::format("{:.4g}", plan.flops_per_token),
       fmt::format("6 x {} in matrix products + attention", grouped(plan.matmul_parameters)));
  line("micro-batches per step", std::to_string(plan.accumulation_steps),
       fmt::format("{} of {} samples x {} tokens", c.train.global_batch_size, c.train.micro_batch_size,
                   c.data.seq_len));
  line("tokens per step", grouped(plan.tokens_per_step));
  if (plan.steps > 0) {
    line("steps", grouped(plan.steps));
    line("tokens", grouped(plan.tokens),
         fmt::format("{:.1f} per parameter",
                     static_cast<double>(plan.tokens) / static_cast<double>(plan.total)));
    line("FLOPs", fmt::format("{:.4g}", plan.flops_per_token * static_cast<double>(plan.tokens)));
  } else {
    line("steps", "not given", "train.max_steps or train.max_tokens");
  }

  out += fmt::format("\nmemory ({})\n", enum_name(c.train.precision));
  line("parameters", bytes_text(plan.memory.parameters), "packed copies and tables included");
  line("gradients", bytes_text(plan.memory.gradients));
  line("optimizer", bytes_text(plan.memory.optimizer));
  line("activations", bytes_text(plan.memory.activations),
       fmt::format("recompute {}", enum_name(c.train.recompute)));
  line("batch", bytes_text(plan.memory.batch));
  line("scratch", bytes_text(plan.memory.scratch));
  line("total", bytes_text(plan.memory.total()));
  if (plan.memory.pinned > 0) line("beside it, pinned", bytes_text(plan.memory.pinned), "host memory");
  return out;
}

nlohmann::json plan_json(const Plan& plan) {
  nlohmann::json parameters = nlohmann::json::array();
  for (const Plan::Parameter& p : plan.parameters)
    parameters.push_back({{"name", p.name}, {"shape", p.shape}, {"count", p.count}});
  nlohmann::json out = {{"name", plan.config.name},
                        {"parameters", plan.total},
                        {"non_embedding_parameters", plan.non_embedding},
                        {"gate_parameters", plan.gate_parameters},
                        {"matmul_parameters", plan.matmul_parameters},
                        {"flops_per_token", plan.flops_per_token},
                        {"steps", plan.steps},
                        {"tokens", plan.tokens},
                        {"tokens_per_step", plan.tokens_per_step},
                        {"accumulation_steps", plan.accumulation_steps},
                        {"intermediate_size", plan.config.model.intermediate_size},
                        {"memory",
                         {{"parameters", plan.memory.parameters},
                          {"gradients", plan.memory.gradients},
                          {"optimizer", plan.memory.optimizer},
                          {"activations", plan.memory.activations},
                          {"batch", plan.memory.batch},
                          {"scratch", plan.memory.scratch},
                          {"pinned", plan.memory.pinned},
                          {"total", plan.memory.total()}}},
                        {"tensors", parameters}};
  if (plan.match)
    out["match"] = {{"path", plan.match->path},
                    {"target", plan.match->target},
                    {"exact_width", plan.match->exact_width},
                    {"width", plan.match->width},
                    {"difference", plan.match->difference()}};
  return out;
}

}  // namespace sluice
