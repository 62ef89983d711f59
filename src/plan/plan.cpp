#include "plan/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "config/derived.h"
#include "config/fields.h"
#include "config/load.h"
#include "config/model_function.h"
#include "config/problems.h"
#include "core/error.h"
#include "core/io.h"
#include "core/limits.h"
#include "data/tokenizer.h"
#include "nn/transformer.h"
#include "params/param_store.h"
#include "plan/model_rules.h"

namespace sluice {
namespace {

constexpr const char* kMatchKey = "model.match_parameters_of";

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
    refuse({kMatchKey}, fmt::format("{}: {} matches itself through a cycle", kMatchKey, match.path));
  chain.push_back(match.path);
  if (!io::exists(match.path)) fail(ExitCode::no_input, "{}: there is no file {}", kMatchKey, match.path);
  Config other = load_config(match.path);
  resolve(other, chain);
  match.target = count_parameters(other.model);

  int64_t& width = model.moe.num_experts > 0 ? model.moe.moe_intermediate_size : model.intermediate_size;
  match.key = model.moe.num_experts > 0 ? "moe_intermediate_size" : "intermediate_size";
  // The number of parameters is linear in the width.
  const auto at_width = [&](int64_t w) {
    width = w;
    return count_parameters(model);
  };
  const int64_t at_one = at_width(1), per_unit = at_width(2) - at_one;
  if (per_unit == 0)
    refuse({kMatchKey}, fmt::format("{}: no layer of this model has a {} to narrow", kMatchKey, match.key));
  const int64_t room = match.target - (at_one - per_unit);
  match.exact_width = static_cast<double>(room) / static_cast<double>(per_unit);
  match.width = room < 0 ? 0 : room / per_unit / model.match_multiple * model.match_multiple;
  if (match.width == 0)
    refuse(
        {kMatchKey, "model.match_multiple"},
        fmt::format("{}: no {} (a multiple of {}) brings this model down to the {} parameters of {}; without "
                    "what is of that width it has {}",
                    kMatchKey, match.key, model.match_multiple, match.target, match.path, at_one - per_unit));
  match.parameters = at_width(match.width);
  model.match_parameters_of.clear();
  return match;
}

/// Measured on one layer, as the trainer would run it on one of these ranks.
std::optional<DispatchPlan> plan_dispatch(const Config& config, const Transformer& transformer,
                                          const ExpertRanks& ranks) {
  const ModelConfig& model = config.model;
  DispatchPlan d;
  int64_t first = -1;
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer)
    if (model.moe.in_layer(layer) && d.layers++ == 0) first = layer;
  if (d.layers == 0) return std::nullopt;
  const DType dtype = storage_dtype(config.train.precision);
  const int64_t tokens = tokens_per_micro_batch(config);
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
  for (const Tensor& t : {s.probabilities, s.lse, s.weights, s.experts, s.counts, p.offsets, p.slots,
                          p.tokens, p.rows, s.rank_counts})
    d.routing_bytes += t.bytes();
  for (const Tensor& t : {s.gate_up, s.inner, s.received_x, s.received_weights}) d.kept_bytes += t.bytes();
  if (ranks.size() > 1)
    d.received = ranks.most_rows(tokens, model.moe.num_experts_per_tok, model.moe.num_experts);
  return d;
}

/// FLOPs of a token. In the run's first steps sparse attention may be in its dense warm-up, which takes
/// others: the steps of both phases count by their number.
void count_flops(Plan& plan, const Transformer& transformer, const Config& config) {
  const int64_t seq_len = config.data.seq_len;
  plan.flops = transformer.flops(seq_len);
  if (config.train.recompute == Recompute::block)
    plan.recomputed = transformer.block_flops(seq_len, transformer.layers() - 1).forward();
  for (const Plan::Parameter& p : plan.parameters)
    if (config.train.recompute == Recompute::mlp && p.mlp_inner && p.in_product)
      plan.recomputed += 2 * static_cast<double>(p.count) * p.active;
  const int64_t dense = config.model.attention.sparse.phase_steps;
  if (config.model.attention.kind == AttentionKind::sparse && dense > 0 && plan.steps > 0) {
    ParamStore store(config.lora, config.optimizer.rules);
    const Transformer first(model_after(config.model, 0), store);
    const double share = static_cast<double>(std::min(dense, plan.steps)) / static_cast<double>(plan.steps);
    plan.flops = share * first.flops(seq_len) + (1 - share) * plan.flops;
  }
  plan.flops_per_token = plan.flops.forward() + plan.flops.backward();
}

}  // namespace

int64_t count_parameters(const ModelConfig& model) {
  ParamStore store;
  const Transformer transformer(model, store);
  return store.total();
}

std::optional<ParameterMatch> resolve_parameter_match(Config& config) { return resolve(config, {}); }

Plan make_plan(Config config, int64_t ranks, const KeyPlaces& places) {
  if (ranks < 1 || ranks > std::numeric_limits<int>::max())
    fail(ExitCode::usage, "{} ranks: must be at least 1", ranks);
  Plan plan;
  with_places(places, [&] { plan.match = resolve_parameter_match(config); });
  require_model_rules(config, ranks, places);
  const ModelConfig& model = config.model;

  ParamStore store(config.lora, config.optimizer.rules);
  const Transformer transformer(model, store);
  plan.total = store.total();
  plan.trained = store.total_trained();
  plan.frozen = store.total_frozen();
  plan.active = store.total_active();
  plan.non_embedding = plan.total;
  double matmul_parameters = 0;
  for (ParamStore::Id id = 0; id < static_cast<ParamStore::Id>(store.specs().size()); ++id) {
    const ParamSpec& spec = store.specs()[static_cast<size_t>(id)];
    plan.parameters.push_back({spec.name, spec.shape, store.numel(id), spec.active, spec.of_expert(),
                               spec.packed, spec.mlp_inner, spec.trainable, spec.statistic, spec.unit});
    if (spec.packed) matmul_parameters += static_cast<double>(store.numel(id)) * spec.active;
    if (spec.vocabulary) plan.non_embedding -= store.numel(id);
  }
  plan.matmul_parameters = std::llround(matmul_parameters);
  const int64_t without_adapters = config.lora.rank > 0 ? count_parameters(model) : plan.total;
  ModelConfig plain = model;
  plain.attention.gates.clear();
  plan.gate_parameters = without_adapters - count_parameters(plain);
  plain = model;
  plain.attention.switch_heads = {};
  plan.switch_parameters = without_adapters - count_parameters(plain);

  plan.ranks = ranks;
  // All ranks are alike, so only the first is measured, with dry communicators.
  const auto world = ranks > 1 ? make_dry_communicator(0, static_cast<int>(ranks)) : nullptr;
  plan.memory = Trainer::measure(config, world.get());
  const auto sharing = world && config.parallel.expert > 1
                           ? world->axis(1, static_cast<int>(config.parallel.expert))
                           : nullptr;
  plan.dispatch = plan_dispatch(config, transformer, {sharing.get(), config.parallel.expert_capacity});
  plan.steps = training_steps(config);
  count_flops(plan, transformer, config);
  plan.tokens_per_step = tokens_per_step(config);
  if (__builtin_mul_overflow(plan.steps, plan.tokens_per_step, &plan.tokens))
    fail(ExitCode::usage, "train.max_steps = {}: with {} tokens a step more tokens than can be counted",
         plan.steps, plan.tokens_per_step);
  plan.accumulation_steps = config.train.global_batch_size / config.train.micro_batch_size;
  plan.config = std::move(config);
  return plan;
}

}  // namespace sluice
