// What of a training goes into a checkpoint and comes out of it, on one rank or on many.
#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "config/derived.h"
#include "core/device.h"
#include "core/error.h"
#include "params/init.h"
#include "train/trainer.h"

namespace sluice {
namespace {

/// The whole that a slice is of.
NamedTensor slice_of(const ParamSpec& spec, const char* suffix, const Tensor& part, int64_t begin) {
  return {spec.name + suffix, part, spec.shape, begin};
}

/// train.init_missing; empty: none may.
std::function<bool(const std::string&)> may_be_missing(const TrainConfig& train) {
  if (train.init_missing == InitMissing::refuse) return {};
  return [&names = train.init_missing_names](const std::string& name) {
    return names.empty() || std::any_of(names.begin(), names.end(), [&](const std::string& part) {
             return name.find(part) != std::string::npos;
           });
  };
}

/// With adapters all else is frozen: a new sink or constant would stay where it starts. Error(usage).
void require_trained(const ParamStore& store, const std::vector<std::string>& missing) {
  std::set<int> adapted;
  for (int id = 0; id < static_cast<int>(store.specs().size()); ++id)
    for (const ParamStore::Adapter& adapter : store.adapters(id)) adapted.insert(adapter.matrix);
  for (const std::string& name : missing)
    for (int id = 0; id < static_cast<int>(store.specs().size()); ++id)
      if (const ParamSpec& spec = store.spec(id);
          spec.name == name && !spec.trainable && !spec.statistic && !adapted.count(id))
        fail(ExitCode::usage,
             "train.init_missing: {} is new and would never be trained, since lora.rank > 0 trains adapters "
             "alone and this parameter has none; train the new parameters first with lora.rank: 0, or add "
             "them to lora.targets where they are matrices",
             name);
}

}  // namespace

FreshStart Trainer::initialize(const std::string& weights_path, const WeightMap& map) {
  const bool loads = !config_.train.init_from.empty();
  const std::string& path = weights_path.empty() ? config_.train.init_from : weights_path;
  const WeightAdoption adoption{map, may_be_missing(config_.train)};
  bool rounded = false;
  FreshStart fresh;
  if (loads) {
    std::vector<NamedTensor> weights;
    weight_targets(weights, /*adapters=*/false);
    const WholeModel whole = whole_model(/*adapters=*/false);
    WeightReport report = load_weights(path, weights, &ctx_, &whole.weights, adoption);
    rounded = report.rounded;
    if (config_.lora.rank > 0) require_trained(store_, report.missing);
    fresh = fresh_start(config_.model, std::move(report.missing));
  }
  const std::set<std::string> missing(fresh.missing.begin(), fresh.missing.end());
  const auto start = [&](const ParamStore::Slice& slice, const Tensor& values) {
    ParamSpec spec = store_.spec(slice.id);
    if (!loads || spec.adapter || missing.count(spec.name)) {
      if (const auto found = fresh.constants.find(spec.name); found != fresh.constants.end())
        spec.init = Init::constant(found->second);
      write_initial_values(ctx_, spec, slice.begin, slice.count, values, config_.train.seed);
    }
    if (const auto found = fresh.factors.find(spec.name); found != fresh.factors.end())
      scale_values(ctx_, values, found->second);
  };
  for (int id = 0; id < static_cast<int>(store_.specs().size()); ++id)
    if (whole_here(id)) start({.id = id, .count = store_.numel(id)}, store_.value(id));
  for (size_t i = 0; plan_.shards_weights() && i < weight_sync_.pieces().size(); ++i)
    for (const ParamStore::Slice& slice : store_.slices(weight_sync_.pieces()[i]))
      start(slice, weight_sync_.values(i).rows(slice.at, slice.count));
  optimizer_.sync_master(ctx_, shards_.values);
  if (rounded) load_masters(path, adoption, fresh);
  weights_changed();
  return fresh;
}

/// Master weights from files whose values have more digits than the model's bf16. Those of parameters that
/// the files lack stay as they are.
void Trainer::load_masters(const std::string& path, const WeightAdoption& adoption, const FreshStart& fresh) {
  const std::set<std::string> missing(fresh.missing.begin(), fresh.missing.end());
  WholeModel whole = whole_model(/*adapters=*/false);
  for (TensorShape& weight : whole.weights) weight.dtype = accumulate_dtype(weight.dtype);
  std::vector<NamedTensor> masters;
  for (const Optimizer::Part& part : optimizer_.parts()) {
    const ParamSpec& spec = store_.spec(part.id);
    if (spec.adapter || missing.count(spec.name)) continue;
    for (const auto& [suffix, tensor] : part.state)
      if (std::string_view(suffix) == kMasterSuffix)
        masters.push_back(slice_of(spec, "", tensor, part.begin));
  }
  load_weights(path, masters, &ctx_, &whole.weights, adoption);
  for (const NamedTensor& master : masters)
    if (const auto found = fresh.factors.find(master.name); found != fresh.factors.end())
      scale_values(ctx_, master.tensor, found->second);
}

/// Whether this rank keeps all of a parameter's values.
bool Trainer::whole_here(ParamStore::Id id) const { return !plan_.shards_weights() || !store_.trains(id); }

/// All of them, from outside.
void Trainer::weights_changed() {
  optimizer_.forget_bits();
  if (!plan_.shards_weights()) return store_.pack(ctx_);
  weight_sync_.changed(ctx_);
  store_.pack_frozen(ctx_);
}

/// The parameters whose weights this rank writes: those that hold them share them by size.
std::vector<ParamStore::Id> Trainer::saved_here() const {
  const auto& specs = store_.specs();
  int64_t all[2] = {0, 0}, before[2] = {0, 0};  // of what is alike, of experts
  for (size_t i = 0; i < specs.size(); ++i)
    all[specs[i].of_expert()] += store_.numel(static_cast<ParamStore::Id>(i));
  std::vector<ParamStore::Id> mine;
  for (size_t i = 0; i < specs.size(); ++i) {
    const auto id = static_cast<ParamStore::Id>(i);
    const bool of_expert = specs[i].of_expert();
    const Communicator& holders =
        of_expert ? communication_.mesh().expert_data() : communication_.mesh().tokens();
    if (before[of_expert] * holders.size() / all[of_expert] == holders.rank()) mine.push_back(id);
    before[of_expert] += store_.numel(id);
  }
  return mine;
}

/// Weights that are kept in pieces alone: brought together unit by unit, and those that this rank writes are
/// copied.
void Trainer::collect_whole_weights(CheckpointContent& content) {
  int64_t at = 0;
  const std::vector<ParamStore::Id> ids = saved_here();
  for (int unit = 0; unit < store_.num_units(); ++unit) {
    store_.begin_use(ctx_, unit, Pass::forward);
    for (const ParamStore::Id id : ids) {
      const ParamSpec& spec = store_.specs()[static_cast<size_t>(id)];
      if (spec.unit != unit) continue;
      const Tensor from = store_.value(id);
      if (!spec.trainable) {  // kept whole
        content.weights.push_back({spec.name, from});
        continue;
      }
      Tensor to = from;
      to.data = shards_.to_save.rows(at, from.numel()).data;
      copy(ctx_, to, from);
      at += from.numel();
      content.weights.push_back({spec.name, to});
    }
    store_.end_use(ctx_, unit, Pass::forward);
  }
  synchronize(ctx_);
}

/// Everything that all ranks hold together: what one rank alone would register.
WholeModel Trainer::whole_model(bool adapters) const {
  ParamStore all(config_.lora, config_.optimizer.rules);
  const Transformer model(config_.model, all);
  WholeModel whole;
  const DType dtype = store_.dtype(), wide = accumulate_dtype(dtype);
  for (const ParamSpec& spec : all.specs()) {
    if (spec.adapter && !adapters) continue;
    whole.weights.push_back({spec.name, spec.shape, dtype});
    if (!spec.trainable) continue;
    for (const char* suffix : optimizer_.state_names(spec))
      whole.optimizer.push_back({spec.name + suffix, spec.shape, wide});
  }
  return whole;
}

/// The tensors of a checkpoint that this rank writes.
void Trainer::collect_tensors(CheckpointContent& content) {
  wait_for_weights();
  if (plan_.shards_weights()) {
    collect_whole_weights(content);
  } else {
    for (const ParamStore::Id id : saved_here())
      content.weights.push_back({store_.specs()[static_cast<size_t>(id)].name, store_.value(id)});
  }
  optimizer_targets(content.optimizer, /*own=*/true);
}

CheckpointContent Trainer::content() {
  CheckpointContent content;
  content.step = step_;
  collect_tensors(content);
  content.state = {{"step", step_},
                   {"samples", step_ * config_.train.global_batch_size},
                   {"tokens", step_ * tokens_per_step(config_)},
                   {"adam_steps", optimizer_.steps_applied()},
                   {"policy", policy_.state()}};
  losses_.save(content.state);
  return content;
}

/// Where weights are filled in: whole, or the pieces'.
void Trainer::weight_targets(std::vector<NamedTensor>& weights, bool adapters) {
  const auto wanted = [&](ParamStore::Id id) { return adapters || !store_.spec(id).adapter; };
  for (int id = 0; id < static_cast<int>(store_.specs().size()); ++id)
    if (wanted(id) && whole_here(id)) weights.push_back({store_.spec(id).name, store_.value(id)});
  for (size_t i = 0; plan_.shards_weights() && i < weight_sync_.pieces().size(); ++i)
    for (const ParamStore::Slice& slice : store_.slices(weight_sync_.pieces()[i]))
      if (wanted(slice.id))
        weights.push_back(slice_of(store_.spec(slice.id), "",
                                   weight_sync_.values(i).rows(slice.at, slice.count), slice.begin));
}

/// The optimizer's state that is here; own: without what another rank writes.
void Trainer::optimizer_targets(std::vector<NamedTensor>& tensors, bool own) const {
  if (!plan_.shards_optimizer()) {
    std::vector<ParamStore::Id> ids = saved_here();
    if (!own) {
      ids.resize(store_.specs().size());
      std::iota(ids.begin(), ids.end(), 0);
    }
    for (const ParamStore::Id id : ids)
      for (const auto& [suffix, tensor] : optimizer_.state(id))
        tensors.push_back({store_.specs()[static_cast<size_t>(id)].name + suffix, tensor});
    return;
  }
  for (const Optimizer::Part& part : optimizer_.parts())
    for (const auto& [suffix, tensor] : part.state)
      tensors.push_back(slice_of(store_.specs()[static_cast<size_t>(part.id)], suffix, tensor, part.begin));
}

void Trainer::restore(const CheckpointInfo& checkpoint) {
  std::vector<NamedTensor> weights, optimizer;
  weight_targets(weights);
  optimizer_targets(optimizer, /*own=*/false);
  const WholeModel whole = whole_model();
  load_checkpoint(checkpoint.path, weights, optimizer, &ctx_, &whole);
  samples_.forget();
  const StateReader state(checkpoint.state, checkpoint.path + "/state.json");
  // Samples and tokens are products of it.
  const int64_t most = std::numeric_limits<int64_t>::max() / (tokens_per_step(config_) + 1);
  step_ = state.integer("step", 0, most);
  attend_densely(config_.model.attention.sparse.dense_after(step_));
  if (state.has("samples")) state.integer("samples", 0);
  if (state.has("tokens")) state.integer("tokens", 0);
  optimizer_.set_steps_applied(state.integer("adam_steps", 0, step_));
  policy_.restore(state.object("policy"), step_);
  losses_.restore(state);
  sound_ = true;
  weights_changed();
}

}  // namespace sluice
