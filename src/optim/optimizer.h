#pragma once
// AdamW over a ParamStore: flat moments and, for bf16 models, f32 master weights; decay masks and multipliers per
// parameter.
#include <vector>

#include "config/config.h"
#include "core/arena.h"
#include "ops/adamw.h"
#include "params/param_store.h"

namespace sluice {

class Optimizer {
 public:
  /// After the model has registered its parameters. Rules are applied in order, the last that matches a name
  /// wins; one that matches no name is Error(usage).
  Optimizer(const OptimizerConfig& config, ParamStore& store);

  /// m, v and master (only when the store's dtype is bf16), laid out like the store's values.
  void allocate(Context& ctx, Arena& arena);
  /// Master weights from the current values (after initialise or after loading weights alone).
  void sync_master(Context& ctx);

  /// (kUpdateControl) f64, on the device: the trainer writes its first part before a step and reads the rest after.
  const Tensor& control() const { return control_; }
  /// Sums the squares of all gradients into control, judges, and updates if the judgement allows it. Asks the host
  /// nothing.
  void update(Context& ctx);
  /// The host has learnt that the update was applied.
  void count_applied() { ++steps_applied_; }

  /// A whole update driven from the host, for programs without a trainer (benchmarks, tests): clips to max_grad_norm
  /// (0: not), waits, and returns what was judged.
  UpdateControl step(Context& ctx, double lr, double max_grad_norm);

  /// t of Adam's bias correction: updates applied so far. In the checkpoint.
  int64_t steps_applied() const { return steps_applied_; }
  void set_steps_applied(int64_t t) { steps_applied_ = t; }

  Tensor m(ParamStore::Id id) const { return store_.part(m_, id); }
  Tensor v(ParamStore::Id id) const { return store_.part(v_, id); }
  /// Empty when values are their own master.
  Tensor master(ParamStore::Id id) const { return master_ ? store_.part(master_, id) : Tensor(); }

 private:
  OptimizerConfig config_;
  ParamStore& store_;
  std::vector<double> lr_multiplier_, weight_decay_;  // per parameter, rules applied
  Tensor m_, v_, master_;                             // flat
  Tensor segments_, control_;                         // (parameters, 4) and (kUpdateControl) f64
  int64_t steps_applied_ = 0;
};

}  // namespace sluice
