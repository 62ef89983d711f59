#pragma once
// Auxiliary losses of a training step, in addition to the cross-entropy, with the state that they keep
// between steps: the concept (StepLoss), the values that it reports (StepScalar), and a tuple of several
// losses (StepLossTuple). nn/step_losses.h lists the losses of a model.
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

/// One value that a loss reports for a step. metrics.jsonl, TensorBoard and the console write it as it is.
struct StepScalar {
  /// "router/z_loss" is the key z_loss in the object "router" of metrics.jsonl, and TensorBoard's tag. A name
  /// without a slash is a key beside "loss", and has the tag "train/NAME".
  std::string name;
  double value = 0;
  std::string console = {};  // its label in the console's line; empty: not shown there
  int digits = 3;            // decimals on the console
  bool whole = false;        // an integer in metrics.jsonl
  std::string tag = {};      // TensorBoard's tag if it differs from the name's
  /// A value of one layer appears only in the list "layers" of the group's object.
  int64_t layer = -1;
};

/// Parameters for the memory of a loss.
struct StepMemory {
  Arena& device;            // memory of the computing device
  Arena& host;              // host memory that a GPU copies to and from; used only if `device` is on a GPU
  Communicator& ranks;      // all ranks whose sums make those of the step
  Communicator* sequences;  // those of them that share the sequences of a micro-batch (parallel.context),
                            // each with the sums of its tokens; or nullptr
  int64_t micro_batches;    // micro-batches per rank and step
  int64_t tokens;           // tokens per micro-batch that this rank sums over
  DType losses;             // type of the per-token losses
  std::vector<Tensor> index_variances = {};  // Transformer::index_variances
};

/// A loss, or a state of training, that persists between steps. `Load` contains the tensors that the model's
/// passes over one micro-batch add to and read (Transformer::forward, loss_forward_backward, backward). The
/// state is equal on all ranks between steps. A loss that is not configured needs no memory and does nothing.
template <class L, class Load>
concept StepLoss = std::constructible_from<L, const Config&> &&
    requires(L& loss, const L& same, Load& load, const StepMemory& memory, Context& ctx, Communicator& ranks,
             nlohmann::json& json, const StateReader& reader, int64_t n) {
  // Called once. Allocates all memory; in a measuring arena tensors have no data.
  loss.allocate(memory);
  // Adds its part to the Load of the passes over a micro-batch.
  same.add_to(load);
  // Whether these passes communicate for it, in which case a GPU cannot replay them as a recorded graph.
  { same.asks_ranks() } -> std::same_as<bool>;

  // Called in every step in this order; everything before `collect` is enqueued on the device:
  loss.begin_step(ctx);
  // After the backward pass of this rank's micro-batch n, outside a recorded graph.
  loss.end_micro_batch(ctx, n);
  // Copies this rank's sums to the host; the caller synchronizes.
  loss.fetch(ctx);
  // Sums them over all ranks. n: number of counted targets in the global batch.
  loss.collect(ranks, n);
  // Called only if the update was applied: this step becomes the previous one.
  loss.applied(ctx);

  // The values of the last step, after collect; may be empty.
  { same.scalars() } -> std::same_as<std::vector<StepScalar>>;
  // The state in a checkpoint's state.json, which does not depend on the number of ranks: fields under its
  // own name. restore reads them; if they are absent or have another shape, it starts from zero.
  same.save(json);
  loss.restore(reader);
};

/// Default implementations that do nothing, from which a loss can inherit.
struct NoStepLoss {
  bool asks_ranks() const { return false; }
  void begin_step(Context&) {}
  void end_micro_batch(Context&, int64_t) {}
  void applied(Context&) {}
  void save(nlohmann::json&) const {}
  void restore(const StateReader&) {}
};

/// Several losses as one: forwards every call to each of them, in order.
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
  void applied(Context& ctx) {
    each([&](auto& loss) { loss.applied(ctx); });
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
