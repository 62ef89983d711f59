#pragma once
// What a training keeps of its routers from step to step: the counts of a step, and of the step before
// (model.moe.load_balance). Equal on all ranks between steps.
#include <nlohmann/json.hpp>

#include "checkpoint/state_reader.h"
#include "config/config.h"
#include "core/context.h"
#include "nn/transformer.h"

namespace sluice {

class RouterKeeper {
 public:
  /// Nothing is kept of a dense model.
  explicit RouterKeeper(const ModelConfig& config) : config_(config) {}
  /// Takes all memory. ranks: all that compute a step; each has `micro_batches` of it. experts_travel: to
  /// other ranks and back.
  void allocate(const Transformer& model, Arena& memory, Arena& host_memory, Communicator& ranks,
                int64_t micro_batches, bool experts_travel);
  const RouterLoad& load() const { return load_; }
  /// Whether ranks hear of each other's counts while they compute.
  bool asks_ranks() const { return bool(load_.counts); }

  // In a step, in this order:
  void begin_step(Context& ctx);
  /// Sends what this rank added up to the host; the caller synchronizes.
  void fetch(Context& ctx);
  /// The sums of all ranks. Counts are whole numbers: they do not tell who counted.
  void collect(Communicator& ranks);
  /// The update was applied: this step is the next one's previous.
  void applied();

  /// (layers, router_totals_size(E)) f64 on the host: the last step's, of all ranks, after collect; empty
  /// without experts.
  const Tensor& totals() const { return host_totals_; }
  /// Of the training so far: rounds beyond the first that rows took to shared experts.
  int64_t extra_rounds() const { return extra_rounds_; }

  /// For the checkpoint: the same for any number of ranks; null where nothing is kept.
  nlohmann::json state() const;
  /// Of a state without it, or of another shape: starts anew.
  void restore(const StateReader& state);

 private:
  ModelConfig config_;
  RouterLoad load_;
  int64_t extra_rounds_ = 0;
  Tensor host_totals_, host_previous_;  // on a CPU, the load's
};

}  // namespace sluice
