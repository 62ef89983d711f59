#pragma once
// AdamW over a ParamStore: moments and, for bf16 models, f32 master weights; decay masks and multipliers per
// parameter.
#include <vector>

#include "config/config.h"
#include "core/arena.h"
#include "params/param_store.h"

namespace sluice {

/// Global L2 norm of all gradients (f64 sums in fixed chunks). Non-finite if any element is.
double gradient_norm(Context& ctx, const ParamStore& store);

class Optimizer {
 public:
  /// After the model has registered its parameters. Rules are applied in order, the last that matches a name
  /// wins; one that matches no name is Error(usage).
  Optimizer(const OptimizerConfig& config, ParamStore& store);

  /// m, v and master (only when the store's dtype is bf16), each shaped like its parameter.
  void allocate(Arena& arena);
  /// Master weights from the current values (after initialise or after loading weights alone).
  void sync_master(Context& ctx);
  /// One update with learning rate lr; gradients are multiplied by gradient_scale first. Counts its own
  /// steps.
  void step(Context& ctx, double lr, double gradient_scale);

  /// t of Adam's bias correction: updates applied so far. In the checkpoint.
  int64_t steps_applied() const { return steps_applied_; }
  void set_steps_applied(int64_t t) { steps_applied_ = t; }

  Tensor m(ParamStore::Id id) const { return m_[static_cast<size_t>(id)]; }
  Tensor v(ParamStore::Id id) const { return v_[static_cast<size_t>(id)]; }
  /// Empty when values are their own master.
  Tensor master(ParamStore::Id id) const {
    return master_.empty() ? Tensor() : master_[static_cast<size_t>(id)];
  }

 private:
  OptimizerConfig config_;
  ParamStore& store_;
  std::vector<double> lr_multiplier_, weight_decay_;  // per parameter, rules applied
  std::vector<Tensor> m_, v_, master_;
  int64_t steps_applied_ = 0;
};

}  // namespace sluice
