#include <algorithm>
#include <cmath>
#include <string_view>

#include "config/fields.h"
#include "config/load.h"
#include "core/error.h"
#include "core/limits.h"
#include "plan/plan.h"

namespace sluice {
namespace {

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

/// Index of the layer that a parameter belongs to, or -1.
int64_t layer_of(const Plan::Parameter& p) { return p.unit - 1; }

/// A line of the table: one parameter, or the same parameter of all experts.
struct Line {
  std::string before, after;            // text around the expert's number; otherwise `before` is the name
  int64_t experts = 0;                  // 0: not an expert's parameter
  const Plan::Parameter* of = nullptr;  // the first
  int64_t count = 0;

  bool same_kind(const Line& other) const {
    return after == other.after && experts == other.experts && of->shape == other.of->shape &&
           of->trained == other.of->trained;
  }
};

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t d : shape) text += (text.empty() ? "" : " x ") + std::to_string(d);
  return text;
}

/// Adds a parameter as a new line, or to the line of its experts. Experts of one layer are folded.
void add_line(std::vector<Line>& lines, const Plan::Parameter& p) {
  if (!p.of_expert) {
    lines.push_back({.before = p.name, .after = "", .of = &p, .count = p.count});
    return;
  }
  const size_t number = p.name.find(kExperts) + kExperts.size(), end = p.name.find('.', number);
  Line line{.before = p.name.substr(0, number),
            .after = p.name.substr(end),
            .experts = 1,
            .of = &p,
            .count = p.count};
  for (Line& known : lines)
    if (known.experts > 0 && known.after == line.after && known.of->shape == p.shape &&
        known.of->trained == p.trained) {
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
  return fmt::format("  {:<52} {:>18} {:>17}{}\n", name, shape, grouped(line.count),
                     line.of->statistic ? "  measured, not trained"
                     : line.of->trained ? ""
                                        : "  frozen");
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

/// Parameters in the order of the store; of identical layers the first, with their number.
std::string parameters_text(const std::vector<Plan::Parameter>& parameters) {
  struct Kind {
    std::vector<Line> lines;
    std::vector<int64_t> layers;
  };
  std::vector<Kind> kinds;
  std::string before, after;
  for (size_t i = 0; i < parameters.size();) {
    const int64_t layer = layer_of(parameters[i]);
    std::vector<Line> lines;
    for (; i < parameters.size() && layer_of(parameters[i]) == layer; ++i) add_line(lines, parameters[i]);
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

/// "NAME  VALUE  NOTE", in columns.
std::string row(const char* name, const std::string& value, const std::string& note = "") {
  return fmt::format("  {:<24} {:>22}{}{}\n", name, value, note.empty() ? "" : "  ", note);
}

double percent_of(int64_t part, int64_t whole) {
  return 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

/// "1.23 % of the rest"
std::string share_of_rest(int64_t part, int64_t whole) {
  return fmt::format("{:.2f} % of the rest", percent_of(part, whole - part));
}

std::string counts_text(const Plan& plan) {
  const int64_t rank = plan.config.lora.rank;
  std::string out = row("total", grouped(plan.total), scaled(static_cast<double>(plan.total)));
  if (rank > 0 || plan.frozen > 0)
    out += row("trained", grouped(plan.trained),
               fmt::format("{:.2f} %: {}", percent_of(plan.trained, plan.total),
                           rank > 0 ? fmt::format("adapters of rank {}", rank)
                                    : std::string("the rest is frozen (optimizer.rules)")));
  if (plan.active != plan.total)
    out += row("active per token", grouped(plan.active),
               fmt::format("{}, {:.1f} %", scaled(static_cast<double>(plan.active)),
                           percent_of(plan.active, plan.total)));
  out += row("non-embedding", grouped(plan.non_embedding));
  out += row("added by attention gates", grouped(plan.gate_parameters),
             plan.gate_parameters == 0 ? "" : share_of_rest(plan.gate_parameters, plan.total));
  if (plan.switch_parameters != 0)
    out += row("added by switch heads", grouped(plan.switch_parameters),
               share_of_rest(plan.switch_parameters, plan.total));
  return out;
}

std::string match_text(const ParameterMatch& match, int64_t multiple) {
  return fmt::format("\nmatched to {}\n", match.path) + row("its parameters", grouped(match.target)) +
         row("exact width", fmt::format("{:.2f}", match.exact_width)) +
         row(match.key.c_str(), std::to_string(match.width), fmt::format("multiple of {}", multiple)) +
         row("difference", fmt::format("{:+.4f} %", 100 * match.difference()));
}

/// ", 2 on each of 4 ranks", ", 2 on each of 4 groups of 8 ranks, which share every sequence"
std::string ranks_text(const Plan& plan) {
  if (plan.ranks == 1) return "";
  const int64_t context = plan.config.parallel.context, groups = plan.ranks / context;
  return fmt::format(", {} on each of {} {}", plan.accumulation_steps / groups, groups,
                     context > 1 ? fmt::format("group{} of {} ranks, which share every sequence",
                                               groups == 1 ? "" : "s", context)
                                 : std::string("ranks"));
}

/// What of attention's FLOPs is not those of every sample and step.
std::string attention_note(const Plan& plan) {
  const AttentionConfig& a = plan.config.model.attention;
  std::string note;
  if (a.kind == AttentionKind::sparse && a.sparse.phase_steps > 0 && plan.steps > 0)
    note += fmt::format(", dense in {} of {} steps", std::min(a.sparse.phase_steps, plan.steps), plan.steps);
  if (plan.config.data.document_mask) note += ", at most: as if samples were one document";
  return note;
}

std::string compute_text(const Plan& plan) {
  const TrainConfig& t = plan.config.train;
  std::string out = "\ncompute\n";
  out += row("FLOPs per token", fmt::format("{:.4g}", plan.flops_per_token),
             fmt::format("6 x {}{} in matrix products{} + attention{}", grouped(plan.matmul_parameters),
                         plan.dispatch ? " active" : "", plan.frozen > 0 ? " (4 x frozen ones)" : "",
                         attention_note(plan)));
  out += row("micro-batches per step", std::to_string(plan.accumulation_steps),
             fmt::format("{} of {} samples x {} tokens{}", t.global_batch_size, t.micro_batch_size,
                         plan.config.data.seq_len, ranks_text(plan)));
  out += row("tokens per step", grouped(plan.tokens_per_step));
  if (plan.steps == 0) return out + row("steps", "not given", "train.max_steps or train.max_tokens");
  const auto tokens = static_cast<double>(plan.tokens);
  return out + row("steps", grouped(plan.steps)) +
         row("tokens", grouped(plan.tokens),
             fmt::format("{:.1f} per parameter", tokens / static_cast<double>(plan.total))) +
         row("FLOPs", fmt::format("{:.4g}", plan.flops_per_token * tokens));
}

std::string dispatch_text(const DispatchPlan& d, const Config& config) {
  const MoeConfig& moe = config.model.moe;
  const std::string sets = d.sets == 1 ? "one set for all layers" : fmt::format("a layer, {} sets", d.sets);
  const std::string shared =
      moe.shared_expert_intermediate_size > 0
          ? fmt::format(", and a shared expert of width {}", moe.shared_expert_intermediate_size)
          : "";
  std::string out = "\ntokens to experts (of a micro-batch, in one layer)\n";
  out += row("experts", fmt::format("{} of {}", moe.num_experts_per_tok, moe.num_experts),
             fmt::format("of width {}{}, in {} of {} layers", moe.moe_intermediate_size, shared, d.layers,
                         config.model.num_hidden_layers));
  out += row("rows", grouped(d.rows),
             fmt::format("{} tokens x {} experts; no token is ever dropped", grouped(d.most_of_one),
                         moe.num_experts_per_tok));
  out += row("rows of one expert", grouped(d.rows / moe.num_experts),
             fmt::format("on average; at most {}, in the same memory", grouped(d.most_of_one)));
  if (d.received > 0)
    out += row(
        "rows at once", grouped(d.received),
        fmt::format("{:g} times the rank's own, from all {} expert-parallel ranks; overflow in extra rounds",
                    config.parallel.expert_capacity, config.parallel.expert));
  return out + row("routing", bytes_text(d.routing_bytes), sets) +
         row("experts' activations", bytes_text(d.kept_bytes),
             d.kept_bytes > 0 ? sets : std::string("recomputed in backward")) +
         row("scratch", bytes_text(d.scratch_bytes), "peak within a layer");
}

/// What a process on CPUs has at most, about: the program, its libraries, MPI and their buffers took 38 to 70
/// MiB on two machines (src/comm/README.md).
int64_t process_bytes(const MemoryPlan& memory) { return memory.total() + (int64_t{56} << 20); }

std::string memory_text(const MemoryPlan& memory, int64_t ranks, const TrainConfig& train) {
  std::string out =
      fmt::format("\nmemory{} ({})\n", ranks > 1 ? fmt::format(" of each of {} ranks", ranks) : "",
                  enum_name(train.precision));
  out += row("parameters", bytes_text(memory.parameters), "packed copies and tables included");
  out += row("gradients", bytes_text(memory.gradients));
  out += row("optimizer", bytes_text(memory.optimizer));
  out += row("activations", bytes_text(memory.activations),
             fmt::format("recompute {}", enum_name(train.recompute)));
  out += row("batch", bytes_text(memory.batch));
  out += row("scratch", bytes_text(memory.scratch));
  if (!memory.on_gpu && memory.snapshot > 0)
    out += row("checkpoint copy", bytes_text(memory.snapshot), "written while training continues");
  out += row("total", bytes_text(memory.total()));
  if (!memory.on_gpu)
    out +=
        row("process", bytes_text(process_bytes(memory)), "about, with the program, its libraries and MPI");
  if (memory.on_gpu)
    out +=
        row("pinned host copy", bytes_text(memory.snapshot), "host memory that checkpoints are written from");
  if (memory.pinned > 0) out += row("pinned host memory", bytes_text(memory.pinned), "host memory");
  return out;
}

}  // namespace

std::string plan_text(const Plan& plan) {
  const Config& c = plan.config;
  std::string out = fmt::format("{}\n\nparameters\n{}\n", c.name, parameters_text(plan.parameters));
  out += counts_text(plan);
  if (plan.match) out += match_text(*plan.match, c.model.match_multiple);
  out += compute_text(plan);
  if (plan.dispatch) out += dispatch_text(*plan.dispatch, c);
  return out + memory_text(plan.memory, plan.ranks, c.train);
}

nlohmann::json plan_json(const Plan& plan) {
  nlohmann::json parameters = nlohmann::json::array();
  for (const Plan::Parameter& p : plan.parameters)
    parameters.push_back({{"name", p.name},
                          {"shape", p.shape},
                          {"count", p.count},
                          {"active", p.active},
                          {"trained", p.trained}});
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
                        {"vocab_size", plan.config.model.vocab_size},
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
  if (!plan.memory.on_gpu) out["memory"]["process"] = process_bytes(plan.memory);
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
