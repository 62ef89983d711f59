#pragma once
// Parts of a step that are the same sequence of ops every time, as CUDA graphs.
#include <array>

#include "core/context.h"
#include "core/device.h"

namespace sluice {

/// From the second step on, when the backend has made its plans, a part is recorded where it first comes and
/// replayed from then on.
class StepGraphs {
 public:
  enum class Part { micro_batch, update };

  /// enabled: on a GPU.
  explicit StepGraphs(bool enabled) : enabled_(enabled) {}

  /// Runs `ops`, or replays them. A profile needs them one by one.
  template <class Ops>
  void replay_or_run(Context& ctx, Part part, Ops&& ops) {
    if (!enabled_ || !warm_ || ctx.profile) return ops();
    Graph& graph = graphs_[static_cast<size_t>(part)];
    if (!graph.recorded()) graph.record(ctx, ops);
    graph.launch(ctx);
  }
  /// A step was computed.
  void step_done() { warm_ = true; }
  /// The ops of a step are others from now on: the next one is computed op by op, and the one after it
  /// recorded.
  void ops_changed() {
    warm_ = false;
    for (Graph& graph : graphs_) graph = {};
  }

 private:
  bool enabled_, warm_ = false;
  std::array<Graph, 2> graphs_;
};

}  // namespace sluice
