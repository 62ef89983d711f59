#include "train/fresh_start.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "core/host_view.h"
#include "nn/gate_chain.h"
#include "ops/gate_activation.h"

namespace sluice {
namespace {

constexpr const char* kSinks = ".self_attn.sinks";
constexpr double kSiluOne = 1.2784645427610738;  // silu(z) = 1

double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

/// The projection that makes up for a score other than 1, and the beginning of the gate's name. gated: the
/// gate multiplies what the projection gives, its bias included, and not what it reads.
struct Site {
  const char *prefix, *projection;
  bool gated = true;
};
Site site_of(GatePosition position) {
  switch (position) {
    case GatePosition::query:
      return {"query_", "q_proj"};
    case GatePosition::key:
      return {"key_", "k_proj"};
    case GatePosition::value:
      return {"value_", "v_proj"};
    case GatePosition::sdpa_output:
      return {"", "o_proj", /*gated=*/false};
    case GatePosition::dense_output:
      return {"dense_", "o_proj"};
  }
  return {"", ""};
}

/// Starts one gate of one layer; returns whether the function is kept. linear: what lies between the
/// projection and the gate is, so that a factor of the one makes up for a score of the other.
bool start_gate(const GateConfig& gate, const std::string& weight, const std::vector<std::string>& projection,
                bool linear, FreshStart& start) {
  const bool constant = gate.input == GateInput::none, adds = gate.combine == GateCombine::add;
  double z = constant ? 0 : gate.bias.value_or(0);
  if (constant && !adds && gate.activation == GateActivation::identity) z = 1;
  if (constant && !adds && gate.activation == GateActivation::silu) z = kSiluOne;
  const double score = activate(gate.activation, z, sigmoid(z));
  if (adds ? score != 0 : score == 0) return false;
  const double factor = adds ? 1 : 1 / score;
  const bool neutral = std::abs(factor - 1) < 1e-12;
  if (!neutral && !linear) return false;
  start.constants[weight] = constant ? z : 0;
  if (neutral) return true;
  for (const std::string& parameter : projection)
    start.factors.try_emplace(parameter, 1.0).first->second *= factor;
  return true;
}

void start_gates(const ModelConfig& model, const std::set<std::string>& missing, FreshStart& start,
                 std::set<std::string>& kept) {
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer) {
    const std::string prefix = fmt::format("model.layers.{}.self_attn.", layer);
    std::map<GatePosition, size_t> count;
    std::set<GatePosition> not_linear;  // where a gate of the source reads itself, or adds
    for (const GateConfig& gate : model.attention.gates) {
      const Site site = site_of(gate.position);
      const std::string name = prefix + gate_name(site.prefix, gate, count[gate.position]++);
      const std::string weight = name + ".weight", bias = name + ".bias";
      if (!missing.count(weight)) {
        if (gate.input == GateInput::self || gate.combine == GateCombine::add)
          not_linear.insert(gate.position);
        continue;
      }
      std::vector<std::string> projection{prefix + site.projection + ".weight"};
      if (site.gated) projection.push_back(prefix + site.projection + ".bias");  // where the model has it
      // What the projection of an output gives follows its gates.
      const bool linear = !site.gated || !not_linear.count(gate.position);
      if (!start_gate(gate, weight, projection, linear, start)) continue;
      kept.insert(weight);
      kept.insert(bias);  // it starts at the configured value, which the score above is of
    }
  }
}

/// "model.layers.3.self_attn.gate_proj.weight" without the layer.
std::string kind_of(const std::string& name) {
  const std::string layers = "model.layers.";
  if (!name.starts_with(layers)) return name;
  const size_t end = name.find('.', layers.size());
  return end == std::string::npos ? name : name.substr(end + 1);
}

std::string kinds(const std::vector<std::string>& names) {
  std::vector<std::string> all;
  for (const std::string& name : names)
    if (std::string kind = kind_of(name); std::find(all.begin(), all.end(), kind) == all.end())
      all.push_back(std::move(kind));
  return fmt::format("{}", fmt::join(all, ", "));
}

/// Whether attention begins over all keys, while its indexer learns.
bool dense_first(const AttentionConfig& a) {
  return a.kind == AttentionKind::sparse &&
         (a.sparse.phase == SparsePhase::dense_warm_up || a.sparse.phase_steps > 0);
}

template <class T>
void multiply(T* values, int64_t count, double factor) {
  using A = accumulate_t<T>;
  for (int64_t i = 0; i < count; ++i)
    values[i] = static_cast<T>(static_cast<A>(factor * static_cast<double>(static_cast<A>(values[i]))));
}

}  // namespace

std::string FreshStart::text() const {
  if (missing.empty()) return "";
  std::string text =
      fmt::format("{} new parameter{}: {}; ", missing.size(), missing.size() == 1 ? "" : "s", kinds(missing));
  const bool sinks = std::any_of(constants.begin(), constants.end(),
                                 [](const auto& start) { return start.first.ends_with(kSinks); });
  if (changes_function.empty())
    return text + "they keep the function of the weights" +
           (sinks ? fmt::format(
                        ", sinks nearly: they start at {}, where they take less than {:.1e} of the attention",
                        kSinkStart, std::exp(kSinkStart))
                  : "");
  return text + "the function changes by " + kinds(changes_function);
}

FreshStart fresh_start(const ModelConfig& model, std::vector<std::string> missing) {
  FreshStart start;
  start.missing = std::move(missing);
  const std::set<std::string> names(start.missing.begin(), start.missing.end());
  std::set<std::string> kept;
  start_gates(model, names, start, kept);
  for (const std::string& name : names) {
    const std::string expert = ".shared_expert.";
    const bool sinks = name.ends_with(kSinks) && (model.attention.kind == AttentionKind::sink ||
                                                  model.attention.kind == AttentionKind::sparse);
    const bool unused = name.find(".self_attn.indexer.") != std::string::npos && dense_first(model.attention);
    if (sinks) start.constants[name] = kSinkStart;
    const size_t at = name.find(expert);
    if (name.ends_with(expert + "down_proj.weight")) start.constants[name] = 0;
    // All of an expert that is new as a whole.
    const bool new_expert =
        at != std::string::npos && names.count(name.substr(0, at) + expert + "down_proj.weight") > 0;
    const size_t gate = name.find(".shared_expert_gate.");
    const bool expert_gate =
        gate != std::string::npos && names.count(name.substr(0, gate) + expert + "down_proj.weight") > 0;
    const bool exclusive = name.ends_with(".self_attn.exclusive_scale");  // starts at 0
    if (sinks || unused || new_expert || expert_gate || exclusive) kept.insert(name);
  }
  for (const std::string& name : start.missing)
    if (!kept.count(name)) start.changes_function.push_back(name);
  return start;
}

ModelConfig grown(const ModelConfig& source, const ModelConfig& here) {
  ModelConfig out = source;
  const AttentionConfig& a = here.attention;
  AttentionConfig& o = out.attention;
  if (o.kind == AttentionKind::softmax && a.kind == AttentionKind::sink) o.kind = a.kind;
  if (dense_first(a) &&
      (o.kind == AttentionKind::softmax || (o.kind == AttentionKind::sink && a.sparse.sink)))
    o.kind = a.kind, o.sparse = a.sparse;
  if (o.exclusive == ExclusiveAttention::none && a.exclusive == ExclusiveAttention::learned)
    o.exclusive = a.exclusive;
  for (size_t i = o.gates.size(); i < a.gates.size(); ++i) o.gates.push_back(a.gates[i]);
  if (o.gates.size() > a.gates.size()) o.gates = source.attention.gates;
  MoeConfig& moe = out.moe;
  if (moe.num_experts > 0 && moe.shared_expert_intermediate_size == 0) {
    moe.shared_expert_intermediate_size = here.moe.shared_expert_intermediate_size;
    moe.shared_expert_gate = here.moe.shared_expert_gate;
  }
  return out;
}

void scale_values(Context& ctx, const Tensor& values, double factor) {
  HostView view(ctx, values);
  synchronize(ctx);
  const Tensor& host = view.tensor();
  switch (host.dtype) {
    case DType::f32:
      multiply(host.as<float>(), host.numel(), factor);
      break;
    case DType::bf16:
      multiply(host.as<bf16>(), host.numel(), factor);
      break;
    case DType::f64:
      multiply(host.as<double>(), host.numel(), factor);
      break;
    case DType::i32:
    case DType::u8:
      fail(ExitCode::internal, "scale_values: parameters cannot be {}", dtype_name(host.dtype));
  }
  view.write_back();
}

}  // namespace sluice
