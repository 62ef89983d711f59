#pragma once
// Losses of a training step beside the text's cross-entropy, with what they keep from step to step: what each
// of them is (StepLoss), what it reports (StepScalar), and several of them at once (StepLossTuple). The
// losses that a model can have are listed in nn/step_losses.h.
#include <concepts>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "comm/communicator.h"
#include "config/config.h"
#include "core/arena.h"
#include "core/context.h"

namespace sluice {

class StateReader;  // checkpoint/state_reader.h

/// One number that a loss reports of a step. Whoever writes it down, to metrics.jsonl, TensorBoard or the
/// console, takes it as it is.
struct StepScalar {
  /// "router/z_loss" is the key z_loss in the object "router" of metrics.jsonl, and TensorBoard's tag. A name
  /// without a slash is a key beside "loss", and has the tag "train/NAME".
  std::string name;
  double value = 0;
  std::string console = {};  // its label in the console's line of a step; empty: not shown there
  int digits = 3;            // after the decimal point, on the console
  bool whole = false;        // an integer in metrics.jsonl
  std::string tag = {};      // TensorBoard's tag, where it is not the name's
  /// Of this layer alone: in the list "layers" of the group's object, and nowhere else.
  int64_t layer = -1;
};

/// What a loss may take memory by.
struct StepMemory {
  Arena& device;          // of the device that computes
  Arena& host;            // host memory that a GPU copies to and from; used only where `device` is a GPU's
  Communicator& ranks;    // all that compute micro-batches of the same step
  int64_t micro_batches;  // that each of them computes in a step
  int64_t tokens;         // of a micro-batch
  DType losses;           // of the losses of single tokens
};

/// A loss, or a state of training, that lives from step to step. `Load` is what the model's passes over one
/// micro-batch add to and read (Transformer::forward, loss_forward_backward, backward). Equal on all ranks
/// between steps. One that a configuration does not ask for takes no memory and does nothing.
template <class L, class Load>
concept StepLoss = std::constructible_from<L, const Config&> &&
    requires(L& loss, const L& same, Load& load, const StepMemory& memory, Context& ctx, Communicator& ranks,
             nlohmann::json& json, const StateReader& reader, int64_t n) {
  // Once. Takes all memory; in an arena that measures, tensors have no data.
  loss.allocate(memory);
  // Puts its part into what the passes over a micro-batch are given.
  same.add_to(load);
  // Whether these passes communicate for it, so that a GPU cannot replay them as a recorded graph.
  { same.asks_ranks() } -> std::same_as<bool>;

  // In a step, in this order, everything before `collect` enqueued on the device:
  loss.begin_step(ctx);
  // After the backward pass of this rank's micro-batch n, outside a recorded graph.
  loss.end_micro_batch(ctx, n);
  // Copies what this rank added up to the host; the caller synchronizes.
  loss.fetch(ctx);
  // Makes sums over all ranks of it. n: targets that count in the global batch.
  loss.collect(ranks, n);
  // Only where the update was applied: this step becomes the previous one.
  loss.applied();

  // What it says of the last step, after collect; empty where there is nothing to say.
  { same.scalars() } -> std::same_as<std::vector<StepScalar>>;
  // What of it a checkpoint's state.json holds, the same for any number of ranks: fields of its own name are
  // added. restore reads them; without them, or of another shape, it starts anew.
  same.save(json);
  loss.restore(reader);
};

/// Does nothing. A loss inherits it, and writes what it needs itself.
struct NoStepLoss {
  bool asks_ranks() const { return false; }
  void begin_step(Context&) {}
  void end_micro_batch(Context&, int64_t) {}
  void applied() {}
  void save(nlohmann::json&) const {}
  void restore(const StateReader&) {}
};

/// Several losses as one: every call goes to each of them, in the order of the list.
template <class Load, StepLoss<Load>... Losses>
class StepLossTuple {
 public:
  explicit StepLossTuple(const Config& config) : losses_(Losses(config)...) {}

  template <class L>
  const L& get() const {
    return std::get<L>(losses_);
  }

  void allocate(const StepMemory& memory) {
    each([&](auto& loss) { loss.allocate(memory); });
  }
  Load load() const {
    Load load;
    each([&](const auto& loss) { loss.add_to(load); });
    return load;
  }
  bool asks_ranks() const {
    return std::apply([](const auto&... loss) { return (loss.asks_ranks() || ...); }, losses_);
  }

  void begin_step(Context& ctx) {
    each([&](auto& loss) { loss.begin_step(ctx); });
  }
  void end_micro_batch(Context& ctx, int64_t micro_batch) {
    each([&](auto& loss) { loss.end_micro_batch(ctx, micro_batch); });
  }
  void fetch(Context& ctx) {
    each([&](auto& loss) { loss.fetch(ctx); });
  }
  void collect(Communicator& ranks, int64_t counted_tokens) {
    each([&](auto& loss) { loss.collect(ranks, counted_tokens); });
  }
  void applied() {
    each([](auto& loss) { loss.applied(); });
  }

  std::vector<StepScalar> scalars() const {
    std::vector<StepScalar> all;
    each([&](const auto& loss) {
      for (StepScalar& scalar : loss.scalars()) all.push_back(std::move(scalar));
    });
    return all;
  }
  void save(nlohmann::json& state) const {
    each([&](const auto& loss) { loss.save(state); });
  }
  void restore(const StateReader& state) {
    each([&](auto& loss) { loss.restore(state); });
  }

 private:
  template <class F>
  void each(F&& f) {
    std::apply([&](auto&... loss) { (f(loss), ...); }, losses_);
  }
  template <class F>
  void each(F&& f) const {
    std::apply([&](const auto&... loss) { (f(loss), ...); }, losses_);
  }

  std::tuple<Losses...> losses_;
};

}  // namespace sluice
