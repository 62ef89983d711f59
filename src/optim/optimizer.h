#pragma once
// AdamW over a ParamStore, or Muon for the blocks' matrices and AdamW for the rest: flat moments and, for
// bf16 models, f32 master weights; decay masks and multipliers per parameter. Muon has its own peak learning
// rate, in the shape of AdamW's schedule, and no second moments.
#include <utility>
#include <vector>

#include "config/config.h"
#include "core/arena.h"
#include "ops/adamw.h"
#include "optim/muon.h"
#include "params/param_store.h"

namespace sluice {

class Optimizer {
 public:
  /// After the model has registered its parameters. Rules are applied in order, the last that matches a name
  /// wins; one that matches no name is Error(usage).
  Optimizer(const OptimizerConfig& config, ParamStore& store);

  /// m, v (AdamW's parameters) and master (only when the store's dtype is bf16), laid out like the store's
  /// values.
  void allocate(Context& ctx, Arena& arena) { allocate(ctx, arena, {}); }
  /// The same for these pieces alone, each where its `at` says; none: all of the store. Muon takes no pieces.
  void allocate(Context& ctx, Arena& arena, const std::vector<ParamStore::Piece>& pieces);
  /// Master weights from the current values (after initialise or after loading weights alone): the store's,
  /// or the pieces'.
  void sync_master(Context& ctx, const std::vector<Tensor>& values = {});

  /// (kUpdateControl) f64, on the device: the trainer writes its first part before a step and reads the rest
  /// after.
  const Tensor& control() const { return control_; }
  /// Sums the squares of all gradients into control, judges, and updates if the judgement allows it. Asks the
  /// host nothing.
  void update(Context& ctx);
  /// The same where squares are known already, over the store's values and gradients, or the pieces' (one
  /// tensor each).
  void judge_and_update(Context& ctx, const std::vector<Tensor>& values = {},
                        const std::vector<Tensor>& grads = {});
  /// The host has learnt that the update was applied.
  void count_applied() { ++steps_applied_; }

  /// A whole update driven from the host, for programs without a trainer (benchmarks, tests): clips to
  /// max_grad_norm (0: not), waits, and returns what was judged.
  UpdateControl step(Context& ctx, double lr, double max_grad_norm);

  /// t of Adam's bias correction and of Muon's momentum: updates applied so far. In the checkpoint.
  int64_t steps_applied() const { return steps_applied_; }
  void set_steps_applied(int64_t t) { steps_applied_ = t; }

  /// AdamW's, of the pieces, behind each other: ".m", ".v" and, for bf16 models, ".master".
  std::vector<std::pair<const char*, Tensor>> flat_state() const;
  /// Of a parameter, where all of the store's are here.
  Tensor m(ParamStore::Id id) const { return store_.part(m_, id); }
  /// Empty for a matrix of Muon's.
  Tensor v(ParamStore::Id id) const;
  /// Empty when values are their own master.
  Tensor master(ParamStore::Id id) const { return master_ ? store_.part(master_, id) : Tensor(); }
  /// What is kept of a parameter, by suffix; the parameter may be another rank's.
  std::vector<const char*> state_names(const ParamSpec& spec) const;

 private:
  /// Where AdamW updates at once: a piece, or all of the store, or what lies between matrices of Muon's.
  struct Part {
    int64_t at = 0, count = 0;  // in m and master
    int64_t v_at = 0;           // in v
    Tensor segments;            // (slices, 4) f64
  };
  bool takes_muon(const ParamSpec& spec) const {
    return config_.type == OptimizerType::muon && Muon::takes(spec);
  }
  Part make_part(Context& ctx, Arena& arena, const std::vector<ParamStore::Slice>& slices, int64_t at,
                 int64_t count, int64_t v_at) const;
  std::vector<std::vector<ParamStore::Slice>> runs() const;

  OptimizerConfig config_;
  ParamStore& store_;
  Muon muon_;
  std::vector<double> lr_multiplier_, weight_decay_;  // per parameter, rules applied
  Tensor m_, v_, master_;                             // flat
  std::vector<ParamStore::Piece> pieces_;             // none: all
  std::vector<Part> parts_;                           // per piece
  Tensor control_;                                    // (kUpdateControl) f64
  int64_t steps_applied_ = 0;
};

}  // namespace sluice
