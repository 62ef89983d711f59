// What of a training goes into a checkpoint and comes out of it, on one rank or on many; and where a bad
// number was first.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "core/device.h"
#include "core/faults.h"
#include "core/host_view.h"
#include "ops/reduce.h"
#include "train/trainer.h"

namespace sluice {
namespace {

/// The whole that a slice is of.
NamedTensor slice_of(const ParamSpec& spec, const char* suffix, const Tensor& part, int64_t begin) {
  return {spec.name + suffix, part, spec.shape, begin};
}

}  // namespace

StoreLayout Trainer::layout() const {
  const int64_t stage = config_.parallel.zero_stage;
  return {.dense_ranks = mesh_.data().size(),
          .expert_ranks = mesh_.expert_data().size(),
          .grad_sources = exact() ? mesh_.expert().size() : 1,
          .whole_values = stage < 3,
          .whole_grads = stage < 2};
}

void Trainer::initialize(const std::string& weights_path) {
  const bool loads = !config_.train.init_from.empty();
  if (loads) {
    std::vector<NamedTensor> weights;
    weight_targets(weights, /*adapters=*/false);
    const WholeModel whole = whole_model(/*adapters=*/false);
    load_weights(weights_path.empty() ? config_.train.init_from : weights_path, weights, &ctx_,
                 &whole.weights);
  }
  const auto is_random = [&](ParamStore::Id id) { return !loads || store_.spec(id).adapter; };
  for (int id = 0; id < static_cast<int>(store_.specs().size()); ++id)
    if (is_random(id) && whole_here(id))
      store_.initialize_slice(ctx_, {.id = id, .count = store_.numel(id)}, store_.value(id),
                              config_.train.seed);
  for (size_t i = 0; config_.parallel.zero_stage >= 3 && i < weight_sync_.pieces().size(); ++i)
    for (const ParamStore::Slice& slice : store_.slices(weight_sync_.pieces()[i]))
      if (is_random(slice.id))
        store_.initialize_slice(ctx_, slice, weight_sync_.values(i).rows(slice.at, slice.count),
                                config_.train.seed);
  optimizer_.sync_master(ctx_, piece_values_);
  weights_changed();
}

/// Whether this rank keeps all of a parameter's values.
bool Trainer::whole_here(ParamStore::Id id) const {
  return config_.parallel.zero_stage < 3 || !store_.trains(id);
}

/// All of them, from outside.
void Trainer::weights_changed() {
  if (config_.parallel.zero_stage < 3) return store_.pack(ctx_);
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
    const Communicator& holders = of_expert ? mesh_.expert_data() : mesh_.data();
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
      to.data = whole_weights_.rows(at, from.numel()).data;
      copy(ctx_, to, from);
      at += from.numel();
      content.weights.push_back({spec.name, to});
    }
    store_.end_use(ctx_, unit, Pass::forward);
  }
  synchronize(ctx_);
}

/// Weights, where they are kept whole; moments and master weights, where every rank updates all of them (ZeRO
/// 0).
std::vector<Replica> Trainer::held_by_several() const {
  std::vector<Replica> replicas;
  const int64_t stage = config_.parallel.zero_stage;
  for (int id = 0; id < static_cast<int>(store_.specs().size()); ++id) {
    const ParamSpec& spec = store_.specs()[static_cast<size_t>(id)];
    if ((spec.of_expert() ? mesh_.expert_data() : mesh_.data()).size() == 1) continue;
    if (whole_here(id)) replicas.push_back({spec.name, store_.value(id), spec.of_expert()});
    if (stage > 0 || !spec.trainable) continue;
    for (const auto& [suffix, tensor] : optimizer_.state(id))
      replicas.push_back({spec.name + suffix, tensor, spec.of_expert()});
  }
  return replicas;
}

/// What all ranks decide alike by.
std::string Trainer::common_state() const {
  if (measuring()) return "";
  nlohmann::json losses;
  losses_.save(losses);
  return fmt::format("{} {} {}", optimizer_.steps_applied(), policy_.state().dump(), losses.dump());
}

void Trainer::verify_replicas() {
  if (!replicas_.active() || replicas_.equal_step() == step_) return;
  settle_weights();
  replicas_.compare(ctx_, *ranks_, step_, common_state());
}

/// A fault on request, of a test.
void Trainer::flip_bit() {
  if (measuring()) return;
  const faults::Flip flip = faults::flip(ranks_->rank(), step_);
  if (flip.name.empty()) return;
  for (const Replica& r : held_by_several()) {
    if (r.name != flip.name) continue;
    HostView view(ctx_, r.tensor);
    const int64_t width = 8 * dtype_size(r.tensor.dtype),
                  at = flip.element % r.tensor.numel() * width + flip.bit % width;
    auto* bytes = static_cast<unsigned char*>(view.tensor().data);
    bytes[at / 8] = static_cast<unsigned char>(bytes[at / 8] ^ (1 << at % 8));
    view.write_back();
    return;
  }
  fail(ExitCode::usage, "SLUICE_FLIP: rank {} holds no replica of {}", ranks_->rank(), flip.name);
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
  settle_weights();
  if (config_.parallel.zero_stage >= 3) {
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
  for (size_t i = 0; config_.parallel.zero_stage >= 3 && i < weight_sync_.pieces().size(); ++i)
    for (const ParamStore::Slice& slice : store_.slices(weight_sync_.pieces()[i]))
      if (wanted(slice.id))
        weights.push_back(slice_of(store_.spec(slice.id), "",
                                   weight_sync_.values(i).rows(slice.at, slice.count), slice.begin));
}

/// The optimizer's state that is here; own: without what another rank writes.
void Trainer::optimizer_targets(std::vector<NamedTensor>& tensors, bool own) const {
  if (config_.parallel.zero_stage == 0) {
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
  for (Samples& slot : samples_) slot.step = -1;
  const StateReader state(checkpoint.state, checkpoint.path + "/state.json");
  // Samples and tokens are products of it.
  const int64_t most = std::numeric_limits<int64_t>::max() / (tokens_per_step(config_) + 1);
  step_ = state.integer("step", 0, most);
  if (state.has("samples")) state.integer("samples", 0);
  if (state.has("tokens")) state.integer("tokens", 0);
  optimizer_.set_steps_applied(state.integer("adam_steps", 0, step_));
  policy_.restore(state.object("policy"), step_);
  losses_.restore(state);
  sound_ = true;
  weights_changed();
}

/// What is here of the weights, or of the summed gradients, in the order of the model.
std::vector<NamedTensor> Trainer::held(bool gradients) const {
  std::vector<NamedTensor> held;
  const auto& specs = store_.specs();
  if (config_.parallel.zero_stage < (gradients ? 2 : 3)) {
    for (int id = 0; id < static_cast<int>(specs.size()); ++id)
      if (!gradients || store_.trains(id))
        held.push_back({specs[static_cast<size_t>(id)].name, gradients ? store_.grad(id) : store_.value(id)});
    return held;
  }
  for (size_t i = 0; i < grad_sync_.pieces().size(); ++i)
    for (const ParamStore::Slice& slice : store_.slices(grad_sync_.pieces()[i]))
      held.push_back(
          {specs[static_cast<size_t>(slice.id)].name,
           (gradients ? grad_sync_.grads(i) : weight_sync_.values(i)).rows(slice.at, slice.count)});
  return held;
}

/// The weights are still those the step began with, so its samples are computed again, micro-batch by
/// micro-batch: weights first, then activations in the order they are computed, or gradients in theirs. Every
/// rank computes all of it, for a forward pass may need them all; the first that found something is believed.
std::string Trainer::first_nonfinite(bool loss_is_finite) {
  settle_weights();
  std::string found;
  const auto look = [&](const char* what, const std::string& name, const Tensor& t) {
    if (!found.empty() || (t.dtype != DType::f32 && t.dtype != DType::bf16 && t.dtype != DType::f64)) return;
    const Tensor largest = update_field(optimizer_.control(), &UpdateControl::squares);
    max_abs(ctx_, largest, t);
    if (!std::isfinite(read_scalar(ctx_, largest))) found = what + name;
  };
  for (const NamedTensor& t : held(/*gradients=*/false)) look("the weight ", t.name, t.tensor);
  if (loss_is_finite) {
    std::vector<NamedTensor> gradients = held(/*gradients=*/true);
    std::reverse(gradients.begin(), gradients.end());
    for (const NamedTensor& t : gradients) look("the gradient of ", t.name, t.tensor);
    return first_of_ranks(found, "the sum of the gradients' squares");
  }
  load(step_);
  await_prefetch(ctx_);
  for (int64_t i = 0; i < num_micro_batches() && (found.empty() || forward_needs_all()); ++i) {
    copy(ctx_, micro_batch_.samples, samples(step_).device.rows(i, 1));
    model_.forward(ctx_, micro_batch_.batch, micro_batch_.saved);
    model_.loss_forward(ctx_, micro_batch_.losses, micro_batch_.batch, micro_batch_.saved);
    for (const Arena::Entry& entry : activations_.entries())
      if (entry.tensor.data != dhidden_.data) look("the activation ", entry.name, entry.tensor);
  }
  return first_of_ranks(found, "the sum of the losses");
}

/// What the lowest rank with something to say says.
std::string Trainer::first_of_ranks(const std::string& mine, const char* otherwise) {
  if (!several()) return mine.empty() ? otherwise : mine;
  constexpr size_t kLength = 160;
  std::string all(kLength * static_cast<size_t>(ranks_->size()), '\0'), padded = mine.substr(0, kLength - 1);
  padded.resize(kLength, '\0');
  ranks_->all_gather(all.data(), padded.data(), kLength);
  for (int r = 0; r < ranks_->size(); ++r)
    if (const std::string text = all.c_str() + static_cast<size_t>(r) * kLength; !text.empty())
      return fmt::format("{} (rank {})", text, r);
  return otherwise;
}

}  // namespace sluice
