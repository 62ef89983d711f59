#include "train/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "config/fields.h"
#include "config/load.h"
#include "core/error.h"
#include "core/limits.h"
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

  int64_t& width = model.moe.num_experts > 0 ? model.moe.moe_intermediate_size : model.intermediate_size;
  match.key = model.moe.num_experts > 0 ? "moe_intermediate_size" : "intermediate_size";
  // The count is linear in the width.
  const auto at_width = [&](int64_t w) {
    width = w;
    return count_parameters(model);
  };
  const int64_t at_one = at_width(1), per_unit = at_width(2) - at_one;
  if (per_unit == 0)
    fail(ExitCode::usage, "model.match_parameters_of: no layer of this model has a {} to narrow", match.key);
  const int64_t room = match.target - (at_one - per_unit);
  const int64_t step = per_unit * model.match_multiple;
  match.exact_width = static_cast<double>(room) / static_cast<double>(per_unit);
  match.width = room < step ? 0 : room / step * model.match_multiple;
  if (match.width == 0)
    fail(ExitCode::usage,
         "model.match_parameters_of: no {} (a multiple of {}) brings this model down to the {} parameters of "
         "{}; without "
         "what is of that width it has {}",
         match.key, model.match_multiple, match.target, match.path, at_one - per_unit);
  match.parameters = at_width(match.width);
  model.match_parameters_of.clear();
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

constexpr std::string_view kLayers = "model.layers.", kExperts = ".experts.";

/// Layer a parameter belongs to, or -1.
int64_t layer_of(const std::string& name) {
  if (name.compare(0, kLayers.size(), kLayers) != 0) return -1;
  return std::stoll(name.substr(kLayers.size()));
}

/// A line of the table: a parameter, or the same one of every expert.
struct Line {
  std::string before, after;            // of the expert's number; without one, the name is `before`
  int64_t experts = 0;                  // 0: not of an expert
  const Plan::Parameter* of = nullptr;  // the first
  int64_t count = 0;

  bool same_kind(const Line& other) const {
    return after == other.after && experts == other.experts && of->shape == other.of->shape;
  }
};

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t d : shape) text += (text.empty() ? "" : " x ") + std::to_string(d);
  return text;
}

/// Adds a parameter as a line of its own, or to its expert's. Experts are folded within one layer.
void add_line(std::vector<Line>& lines, const Plan::Parameter& p) {
  const size_t at = p.name.find(kExperts);
  if (at == std::string::npos) {
    lines.push_back({.before = p.name, .after = "", .of = &p, .count = p.count});
    return;
  }
  const size_t number = at + kExperts.size(), end = p.name.find('.', number);
  Line line{.before = p.name.substr(0, number),
            .after = p.name.substr(end),
            .experts = 1,
            .of = &p,
            .count = p.count};
  for (Line& known : lines)
    if (known.experts > 0 && known.after == line.after && known.of->shape == p.shape) {
      ++known.experts;
      known.count += p.count;
      return;
    }
  lines.push_back(line);
}

std::string line_text(const Line& line) {
  std::string name = line.before, shape = shape_text(line.of->shape);
  if (line.experts > 0) {
    name += fmt::format("0-{}{}", line.experts - 1, line.after);
    shape = fmt::format("{} x {}", line.experts, shape);
  }
  return fmt::format("  {:<52} {:>18} {:>17}\n", name, shape, grouped(line.count));
}

/// 0, 2-5.
std::string ranges_text(const std::vector<int64_t>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(numbers[i]);
    if (last > i) text += "-" + std::to_string(numbers[last]);
    i = last + 1;
  }
  return text;
}

/// Parameters in the order of the store; of layers alike the first, and how often it is there.
std::string parameters_text(const std::vector<Plan::Parameter>& parameters) {
  struct Kind {
    std::vector<Line> lines;
    std::vector<int64_t> layers;
  };
  std::vector<Kind> kinds;
  std::string before, after;
  for (size_t i = 0; i < parameters.size();) {
    const int64_t layer = layer_of(parameters[i].name);
    std::vector<Line> lines;
    for (; i < parameters.size() && layer_of(parameters[i].name) == layer; ++i)
      add_line(lines, parameters[i]);
    if (layer < 0) {
      for (const Line& line : lines) (kinds.empty() ? before : after) += line_text(line);
      continue;
    }
    const std::string prefix = std::string(kLayers) + std::to_string(layer);
    const auto suffix = [](const Line& line) {
      return line.before.substr(line.before.find('.', kLayers.size()));
    };
    const auto alike = [&](const Kind& kind) {
      return std::equal(
          lines.begin(), lines.end(), kind.lines.begin(), kind.lines.end(),
          [&](const Line& a, const Line& b) { return suffix(a) == suffix(b) && a.same_kind(b); });
    };
    const auto known = std::find_if(kinds.begin(), kinds.end(), alike);
    if (known == kinds.end())
      kinds.push_back({std::move(lines), {layer}});
    else
      known->layers.push_back(layer);
  }
  for (const Kind& kind : kinds) {
    int64_t count = 0;
    for (const Line& line : kind.lines) {
      before += line_text(line);
      count += line.count;
    }
    const auto times = static_cast<int64_t>(kind.layers.size());
    const std::string which = times > 1 ? fmt::format("{} layers: {}", times, ranges_text(kind.layers))
                                        : fmt::format("layer {}", kind.layers[0]);
    before += fmt::format("  {:<52} {:>18} {:>17}\n", which, "", grouped(count * times));
  }
  return before + after;
}

/// Measured on one layer, as the trainer would run it on one of these ranks.
std::optional<DispatchPlan> plan_dispatch(const Config& config, const Transformer& transformer, const ExpertRanks& ranks) {
  const ModelConfig& model = config.model;
  DispatchPlan d;
  int64_t first = -1;
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer)
    if (model.moe.in_layer(layer) && d.layers++ == 0) first = layer;
  if (d.layers == 0) return std::nullopt;
  const DType dtype = storage_dtype(config.train.precision);
  const int64_t tokens = config.train.micro_batch_size * config.data.seq_len;
  const Device device = resolve_device(config.train.device);

  Arena activations("activations", 0, device);
  const Transformer::Saved saved = transformer.make_saved(activations, tokens, dtype, config.train.recompute);
  for (const Arena::Entry& entry : activations.entries()) d.sets += entry.name.ends_with(".mlp.slots");

  Context dry(0, device);
  ParamStore store;
  const Moe moe(model, store, "mlp", first, ranks);
  Arena values("values", 0, device), gradients("gradients", 0, device), temporary("one layer", 0, device);
  store.allocate(dry, dtype, tokens, values, &gradients);
  const Tensor x = temporary.alloc("x", dtype, {tokens, model.hidden_size});
  Moe::Saved s = moe.make_saved(temporary, "mlp", tokens, dtype, config.train.recompute != Recompute::mlp);
  moe.forward(dry, x, {}, s);
  moe.backward(dry, x, x, x, {}, s);
  d.scratch_bytes = dry.scratch.high_water();
  const Permutation& p = s.permutation;
  d.rows = p.slots.numel();
  d.most_of_one = tokens;
  for (const Tensor& t :
       {s.probabilities, s.lse, s.weights, s.experts, s.counts, p.offsets, p.slots, p.tokens, p.rows, s.rank_counts})
    d.routing_bytes += t.bytes();
  for (const Tensor& t : {s.gate_up, s.inner, s.received_x, s.received_weights}) d.kept_bytes += t.bytes();
  if (ranks.size() > 1) d.received = ranks.most_rows(tokens, model.moe.num_experts_per_tok, model.moe.num_experts);
  return d;
}

}  // namespace

int64_t count_parameters(const ModelConfig& model) {
  ParamStore store;
  const Transformer transformer(model, store);
  return store.total();
}

std::optional<ParameterMatch> resolve_parameter_match(Config& config) { return resolve(config, {}); }

Plan make_plan(Config config, int64_t ranks) {
  Plan plan;
  plan.match = resolve_parameter_match(config);
  const ModelConfig& model = config.model;

  ParamStore store(config.lora);
  const Transformer transformer(model, store);
  plan.total = store.total();
  plan.trained = store.total_trained();
  plan.active = store.total_active();
  plan.non_embedding = plan.total;
  double matmul_parameters = 0, frozen_in_products = 0;
  for (ParamStore::Id id = 0; id < static_cast<ParamStore::Id>(store.specs().size()); ++id) {
    const ParamSpec& spec = store.specs()[static_cast<size_t>(id)];
    plan.parameters.push_back({spec.name, spec.shape, store.numel(id), spec.active, spec.of_expert, spec.packed, spec.unit});
    const double in_products = spec.packed ? static_cast<double>(store.numel(id)) * spec.active : 0;
    matmul_parameters += in_products;
    if (!spec.trainable) frozen_in_products += in_products;
    if (spec.shape[0] == model.vocab_size && layer_of(spec.name) < 0) plan.non_embedding -= store.numel(id);
  }
  plan.matmul_parameters = std::llround(matmul_parameters);
  const int64_t without_adapters = config.lora.rank > 0 ? count_parameters(model) : plan.total;
  ModelConfig plain = model;
  plain.attention.gates.clear();
  plan.gate_parameters = without_adapters - count_parameters(plain);
  plain = model;
  plain.attention.switch_heads = {};
  plan.switch_parameters = without_adapters - count_parameters(plain);
  // What is frozen has no gradient: two products, not three.
  plan.flops_per_token =
      6.0 * static_cast<double>(plan.matmul_parameters) - 2.0 * frozen_in_products +
      6.0 * static_cast<double>(model.num_hidden_layers) * static_cast<double>(config.data.seq_len) *
          static_cast<double>(model.num_attention_heads) * static_cast<double>(model.head_dim);

  if (ranks < 1 || ranks > std::numeric_limits<int>::max()) fail(ExitCode::usage, "{} ranks: at least 1", ranks);
  plan.ranks = ranks;
  // They are alike: the first is measured, in a world that is not there.
  const auto world = ranks > 1 ? make_dry_communicator(0, static_cast<int>(ranks)) : nullptr;
  plan.memory = Trainer::measure(config, world.get());
  const auto sharing = world && config.parallel.expert > 1 ? world->axis(1, static_cast<int>(config.parallel.expert)) : nullptr;
  plan.dispatch = plan_dispatch(config, transformer, {sharing.get(), config.parallel.expert_capacity});
  plan.steps = training_steps(config);
  plan.tokens_per_step = tokens_per_step(config);
  if (__builtin_mul_overflow(plan.steps, plan.tokens_per_step, &plan.tokens))
    fail(ExitCode::usage, "train.max_steps = {}: with {} tokens a step more tokens than can be counted", plan.steps, plan.tokens_per_step);
  plan.accumulation_steps = config.train.global_batch_size / config.train.micro_batch_size;
  plan.config = std::move(config);
  return plan;
}

std::string plan_text(const Plan& plan) {
  const Config& c = plan.config;
  std::string out = fmt::format("{}\n\nparameters\n{}", c.name, parameters_text(plan.parameters));
  const auto line = [&](const char* name, const std::string& value, const std::string& note = "") {
    out += fmt::format("  {:<24} {:>22}{}{}\n", name, value, note.empty() ? "" : "  ", note);
  };
  out += "\n";
  line("total", grouped(plan.total), scaled(static_cast<double>(plan.total)));
  if (plan.trained != plan.total)
    line("trained", grouped(plan.trained),
         fmt::format("{:.2f} %: adapters of rank {}", 100.0 * static_cast<double>(plan.trained) / static_cast<double>(plan.total),
                     c.lora.rank));
  if (plan.active != plan.total)
    line("active for a token", grouped(plan.active),
         fmt::format("{}, {:.1f} %", scaled(static_cast<double>(plan.active)),
                     100.0 * static_cast<double>(plan.active) / static_cast<double>(plan.total)));
  line("non-embedding", grouped(plan.non_embedding));
  line("added by gates", grouped(plan.gate_parameters),
       plan.gate_parameters == 0
           ? ""
           : fmt::format("{:.2f} % of the rest", 100.0 * static_cast<double>(plan.gate_parameters) /
                                                     static_cast<double>(plan.total - plan.gate_parameters)));
  if (plan.switch_parameters != 0)
    line("added by switch heads", grouped(plan.switch_parameters),
         fmt::format("{:.2f} % of the rest", 100.0 * static_cast<double>(plan.switch_parameters) /
                                                 static_cast<double>(plan.total - plan.switch_parameters)));
  if (plan.match) {
    out += fmt::format("\nmatched to {}\n", plan.match->path);
    line("its parameters", grouped(plan.match->target));
    line("exact width", fmt::format("{:.2f}", plan.match->exact_width));
    line(plan.match->key.c_str(), std::to_string(plan.match->width),
         fmt::format("multiple of {}", c.model.match_multiple));
    line("difference", fmt::format("{:+.4f} %", 100 * plan.match->difference()));
  }

  out += "\ncompute\n";
  line("FLOPs per token", fmt::format("{:.4g}", plan.flops_per_token),
       fmt::format("6 x {}{} in matrix products{} + attention", grouped(plan.matmul_parameters),
                   plan.dispatch ? " active" : "", plan.trained != plan.total ? " (4 x what is frozen)" : ""));
  line("micro-batches per step", std::to_string(plan.accumulation_steps),
       fmt::format("{} of {} samples x {} tokens{}", c.train.global_batch_size, c.train.micro_batch_size, c.data.seq_len,
                   plan.ranks > 1 ? fmt::format(", {} on each of {} ranks", plan.accumulation_steps / plan.ranks, plan.ranks)
                                  : ""));
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

  if (plan.dispatch) {
    const DispatchPlan& d = *plan.dispatch;
    const MoeConfig& moe = c.model.moe;
    const std::string sets = d.sets == 1 ? "one set for all layers" : fmt::format("a layer, {} sets", d.sets);
    out += "\ntokens to experts (of a micro-batch, in one layer)\n";
    line("experts", fmt::format("{} of {}", moe.num_experts_per_tok, moe.num_experts),
         fmt::format("of width {}{}, in {} of {} layers", moe.moe_intermediate_size,
                     moe.shared_expert_intermediate_size > 0
                         ? fmt::format(", and a shared one of {}", moe.shared_expert_intermediate_size)
                         : "",
                     d.layers, c.model.num_hidden_layers));
    line("rows", grouped(d.rows),
         fmt::format("{} tokens x {}, wherever they go: none is ever dropped", grouped(d.most_of_one),
                     moe.num_experts_per_tok));
    line("rows of one expert", grouped(d.rows / moe.num_experts),
         fmt::format("on average; at most {}, in the same memory", grouped(d.most_of_one)));
    if (d.received > 0)
      line("rows at once", grouped(d.received), fmt::format("{:g} times its own, of all {} ranks that share experts; more in extra rounds",
                                                            c.parallel.expert_capacity, c.parallel.expert));
    line("routing", bytes_text(d.routing_bytes), sets);
    line("experts' activations", bytes_text(d.kept_bytes),
         d.kept_bytes > 0 ? sets : std::string("computed again in backward"));
    line("scratch", bytes_text(d.scratch_bytes), "at most, while a layer computes");
  }

  out += fmt::format("\nmemory{} ({})\n", plan.ranks > 1 ? fmt::format(" of each of {} ranks", plan.ranks) : "",
                     enum_name(c.train.precision));
  line("parameters", bytes_text(plan.memory.parameters), "packed copies and tables included");
  line("gradients", bytes_text(plan.memory.gradients));
  line("optimizer", bytes_text(plan.memory.optimizer));
  line("activations", bytes_text(plan.memory.activations),
       fmt::format("recompute {}", enum_name(c.train.recompute)));
  line("batch", bytes_text(plan.memory.batch));
  line("scratch", bytes_text(plan.memory.scratch));
  if (!plan.memory.on_gpu && plan.memory.snapshot > 0) line("checkpoint copy", bytes_text(plan.memory.snapshot), "written while training goes on");
  line("total", bytes_text(plan.memory.total()));
  if (plan.memory.on_gpu) line("beside it, copy", bytes_text(plan.memory.snapshot), "host memory that checkpoints are written from");
  if (plan.memory.pinned > 0) line("beside it, pinned", bytes_text(plan.memory.pinned), "host memory");
  return out;
}

nlohmann::json plan_json(const Plan& plan) {
  nlohmann::json parameters = nlohmann::json::array();
  for (const Plan::Parameter& p : plan.parameters)
    parameters.push_back({{"name", p.name}, {"shape", p.shape}, {"count", p.count}, {"active", p.active}});
  nlohmann::json out = {{"name", plan.config.name},
                        {"config_hash", config_hash(plan.config)},
                        {"parameters", plan.total},
                        {"active_parameters", plan.active},
                        {"trained_parameters", plan.trained},
                        {"non_embedding_parameters", plan.non_embedding},
                        {"gate_parameters", plan.gate_parameters},
                        {"switch_parameters", plan.switch_parameters},
                        {"matmul_parameters", plan.matmul_parameters},
                        {"flops_per_token", plan.flops_per_token},
                        {"steps", plan.steps},
                        {"tokens", plan.tokens},
                        {"tokens_per_step", plan.tokens_per_step},
                        {"accumulation_steps", plan.accumulation_steps},
                        {"ranks", plan.ranks},
                        {"intermediate_size", plan.config.model.intermediate_size},
                        {"memory",
                         {{"parameters", plan.memory.parameters},
                          {"gradients", plan.memory.gradients},
                          {"optimizer", plan.memory.optimizer},
                          {"activations", plan.memory.activations},
                          {"batch", plan.memory.batch},
                          {"scratch", plan.memory.scratch},
                          {"checkpoint_copy", plan.memory.snapshot},
                          {"pinned", plan.memory.pinned},
                          {"total", plan.memory.total()}}},
                        {"tensors", parameters}};
  if (plan.dispatch) {
    const DispatchPlan& d = *plan.dispatch;
    const MoeConfig& moe = plan.config.model.moe;
    out["experts"] = {{"layers", d.layers},
                      {"num_experts", moe.num_experts},
                      {"num_experts_per_tok", moe.num_experts_per_tok},
                      {"moe_intermediate_size", moe.moe_intermediate_size},
                      {"shared_expert_intermediate_size", moe.shared_expert_intermediate_size},
                      {"rows", d.rows},
                      {"most_rows_of_one_expert", d.most_of_one},
                      {"rows_at_once", d.received},
                      {"routing_bytes", d.routing_bytes},
                      {"kept_bytes", d.kept_bytes},
                      {"sets", d.sets},
                      {"scratch_bytes", d.scratch_bytes}};
  }
  if (plan.match)
    out["match"] = {{"path", plan.match->path},     {"key", plan.match->key},
                    {"target", plan.match->target}, {"exact_width", plan.match->exact_width},
                    {"width", plan.match->width},   {"difference", plan.match->difference()}};
  return out;
}

}  // namespace sluice
