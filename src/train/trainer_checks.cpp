// Whether a step can be trusted: what several ranks hold replicas of is equal, and where a value that is not
// finite was first.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>

#include "core/device.h"
#include "core/faults.h"
#include "core/host_view.h"
#include "ops/reduce.h"
#include "train/trainer.h"

namespace sluice {

/// Weights, where they are not sharded; moments and master weights, where every rank updates all of them
/// (ZeRO 0).
std::vector<Replica> Trainer::replicated_tensors() const {
  std::vector<Replica> replicas;
  for (int id = 0; id < static_cast<int>(store_.specs().size()); ++id) {
    const ParamSpec& spec = store_.specs()[static_cast<size_t>(id)];
    if ((spec.of_expert() ? communication_.mesh().expert_data() : communication_.mesh().tokens()).size() == 1)
      continue;
    if (whole_here(id)) replicas.push_back({spec.name, store_.value(id), spec.of_expert()});
    if (plan_.shards_optimizer() || !spec.trainable) continue;
    for (const auto& [suffix, tensor] : optimizer_.state(id))
      replicas.push_back({spec.name + suffix, tensor, spec.of_expert()});
  }
  return replicas;
}

/// Beside tensors, what must be equal on all ranks: they decide by it.
std::string Trainer::common_state() const {
  if (plan_.dry_run()) return "";
  nlohmann::json losses;
  losses_.save(losses);
  return fmt::format("{} {} {}", optimizer_.steps_applied(), policy_.state().dump(), losses.dump());
}

void Trainer::verify_replicas() {
  if (!replicas_.active() || replicas_.equal_step() == step_) return;
  wait_for_weights();
  replicas_.compare(ctx_, ranks(), step_, common_state(), changed_bits());
}

/// What this rank found changed in its own memory, now or at an update before.
std::string Trainer::changed_bits() {
  if (plan_.dry_run()) return "";
  optimizer_.check_bits(ctx_, shards_.values);
  const Optimizer::ChangedBits& changed = optimizer_.changed_bits();
  if (changed.parameters.empty()) return "";
  constexpr size_t kNames = 3;
  std::vector<std::string> names;
  for (const ParamStore::Id id : changed.parameters) {
    const std::string& name = store_.spec(id).name;
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  const size_t count = names.size();
  names.resize(std::min(count, kNames));
  return fmt::format("{}{} or {} moments than it wrote, noticed after {} updates", fmt::join(names, ", "),
                     count > kNames ? fmt::format(" and {} more", count - kNames) : "",
                     count == 1 ? "its" : "their", changed.after_updates);
}

/// A fault that a test asks for (core/faults.h).
void Trainer::flip_bit() {
  if (plan_.dry_run()) return;
  const faults::Flip flip = faults::flip(ranks().rank(), step_);
  if (flip.name.empty()) return;
  std::vector<NamedTensor> here = held(/*gradients=*/false);
  optimizer_targets(here, /*own=*/false);
  for (const NamedTensor& t : here) {
    if (t.name != flip.name || t.tensor.numel() == 0) continue;
    HostView view(ctx_, t.tensor);
    const int64_t width = 8 * dtype_size(t.tensor.dtype),
                  at = flip.element % t.tensor.numel() * width + flip.bit % width;
    auto* bytes = static_cast<unsigned char*>(view.tensor().data);
    bytes[at / 8] = static_cast<unsigned char>(bytes[at / 8] ^ (1 << at % 8));
    view.write_back();
    return;
  }
  fail(ExitCode::usage, "SLUICE_FLIP: rank {} holds nothing of {}", ranks().rank(), flip.name);
}

/// What is here of the weights, or of the summed gradients, in the order of the model.
std::vector<NamedTensor> Trainer::held(bool gradients) const {
  std::vector<NamedTensor> held;
  const auto& specs = store_.specs();
  if (!(gradients ? plan_.shards_gradients() : plan_.shards_weights())) {
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
  wait_for_weights();
  std::string found;
  const auto look = [&](const char* what, const std::string& name, const Tensor& t) {
    if (!found.empty() || (t.dtype != DType::f32 && t.dtype != DType::bf16 && t.dtype != DType::f64)) return;
    const Tensor largest = control(&UpdateControl::squares);
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
  samples_.load(ctx_, step_);
  await_prefetch(ctx_);
  for (int64_t i = 0;
       i < plan_.computed_micro_batches() && (found.empty() || plan_.forward_needs_all_ranks()); ++i) {
    copy(ctx_, micro_batch_.samples, samples_.micro_batch(step_, i));
    model_.forward(ctx_, micro_batch_.batch, micro_batch_.saved);
    model_.loss_forward(ctx_, micro_batch_.losses, micro_batch_.batch, micro_batch_.saved);
    for (const Arena::Entry& entry : memory_.activations.entries())
      if (entry.name != "dhidden") look("the activation ", entry.name, entry.tensor);
  }
  return first_of_ranks(found, "the sum of the losses");
}

/// The finding of the lowest rank that has one, on every rank.
std::string Trainer::first_of_ranks(const std::string& mine, const char* otherwise) {
  if (ranks().size() == 1) return mine.empty() ? otherwise : mine;
  constexpr size_t kLength = 160;
  std::string all(kLength * static_cast<size_t>(ranks().size()), '\0'), padded = mine.substr(0, kLength - 1);
  padded.resize(kLength, '\0');
  ranks().all_gather(all.data(), padded.data(), kLength);
  for (int r = 0; r < ranks().size(); ++r)
    if (const std::string text = all.c_str() + static_cast<size_t>(r) * kLength; !text.empty())
      return fmt::format("{} (rank {})", text, r);
  return otherwise;
}

}  // namespace sluice
