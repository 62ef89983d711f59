#pragma once
// The optimizer of a ParamStore: which rule (optim/rules.h) updates which parameter, the state that each rule
// keeps and, for bf16 models, f32 master weights; learning rates and decay per parameter.
#include <string_view>
#include <utility>
#include <vector>

#include "config/config.h"
#include "core/arena.h"
#include "ops/adamw.h"
#include "optim/rules.h"
#include "params/param_store.h"

namespace sluice {

/// Behind a parameter's name: its f32 master weights, in the state of a bf16 model.
constexpr const char* kMasterSuffix = ".master";

class Optimizer {
 public:
  /// Tensors with the suffix that they have behind a parameter's name in a checkpoint: ".m", ".master".
  using State = std::vector<std::pair<const char*, Tensor>>;
  /// State of a parameter on this rank: of the whole parameter, or of the part in one of this rank's pieces.
  struct Part {
    ParamStore::Id id = 0;
    int64_t begin = 0;  // element of the parameter
    State state;        // flat
  };

  /// After the model has registered its parameters. optimizer.rules are applied in order, the last that
  /// matches a name wins. Error(usage) for one that matches no name, or, unless it freezes, only names of
  /// frozen parameters; and where nothing is left to train. Not so with `part`: the store holds some of the
  /// model's experts, and rules may be for the others.
  Optimizer(const OptimizerConfig& config, ParamStore& store, bool part = false);

  /// The rules' state and master weights (only when the store's dtype is bf16).
  void allocate(Context& ctx, Arena& arena) { allocate(ctx, arena, {}); }
  /// The same for these pieces alone, each where its `at` says; none: all of the store. Muon takes no pieces.
  void allocate(Context& ctx, Arena& arena, const std::vector<ParamStore::Piece>& pieces);
  /// Master weights from the current values (after initialise or after loading weights alone): the store's,
  /// or the pieces'.
  void sync_master(Context& ctx, const std::vector<Tensor>& values = {});

  /// (kUpdateControl) f64, on the device: the trainer writes its first part before a step and reads the rest
  /// after.
  const Tensor& control() const { return control_; }
  /// Sums the squares of all gradients into control, judges the update, and applies it if allowed, without
  /// waiting for the host.
  void update(Context& ctx);
  /// The same where squares are known already, over the store's values and gradients, or the pieces' (one
  /// tensor each).
  void judge_and_update(Context& ctx, const std::vector<Tensor>& values = {},
                        const std::vector<Tensor>& grads = {});
  /// Called when the host knows that the update was applied.
  void count_applied() { ++steps_applied_; }

  /// A whole update driven from the host, for programs without a trainer (benchmarks, tests): clips to
  /// max_grad_norm (0: not), waits, and returns what was judged.
  UpdateControl step(Context& ctx, double lr, double max_grad_norm);

  // Memory that changes between two updates. Each update of a CPU sums the bits that it reads and writes,
  // while they are in registers; what it reads must be what the last one wrote. So a flip in weights, master
  // weights or moments is found by the next update, on any layout.

  /// Before allocate: keeps these sums. Not on a GPU.
  void watch_bits() { watches_bits_ = true; }
  /// What was written is what is there now: before the first update, and after weights or state came from
  /// outside (forget_bits).
  void take_bits(Context& ctx, const std::vector<Tensor>& values = {});
  void forget_bits() { knows_bits_ = false; }
  bool wants_bits() const { return watches_bits_ && !knows_bits_; }
  /// Compares what is there now with what was written, as the next update will.
  void check_bits(Context& ctx, const std::vector<Tensor>& values = {});
  /// Parameters whose values or state were found changed, in the order in which this was found; and updates
  /// applied before the first of them.
  struct ChangedBits {
    std::vector<ParamStore::Id> parameters;
    int64_t after_updates = 0;
  };
  const ChangedBits& changed_bits() const { return changed_; }

  /// t of Adam's bias correction and of Muon's momentum: updates applied so far. In the checkpoint.
  int64_t steps_applied() const { return steps_applied_; }
  void set_steps_applied(int64_t t) { steps_applied_ = t; }

  /// The local state of every trained parameter, in the order of the buffers.
  std::vector<Part> parts() const;
  /// Of a parameter, in its shape, where all of the store's are here; empty for a frozen one.
  State state(ParamStore::Id id) const;
  /// One of them; an empty tensor if there is none of that name.
  Tensor state(ParamStore::Id id, std::string_view suffix) const;
  /// Whole buffers, master weights last.
  State flat_state() const;
  /// What is kept of a parameter, by suffix; the parameter may be another rank's.
  std::vector<const char*> state_names(const ParamSpec& spec) const;

 private:
  /// A range, and where it lies: in its rule's state, and in its piece (or the whole store) and master.
  struct Placed {
    size_t rule = 0, piece = 0;
    int64_t state_at = 0, from = 0, master_at = 0, count = 0;
    UpdateRange range = {};             // value and gradient are filled in for an update
    std::vector<int32_t> written = {};  // sums of the last update, by member
  };
  struct RuleState {
    UpdateRule rule;
    std::vector<Tensor> buffers;  // in the order of its state_names
  };
  size_t rule_of(const ParamSpec& spec) const;
  std::vector<const char*> names_of(size_t rule) const;
  std::vector<ParamStore::Slice> slices_of(const ParamStore::Piece& piece) const;
  void cut_into_ranges();
  State state_of(const Placed& placed, const UpdateRange::Member& member) const;
  Tensor value_of(const Placed& placed, const std::vector<Tensor>& values) const;
  void sum_what_is_there(Context& ctx, const std::vector<Tensor>& values);
  void compare_sums(bool updated);

  OptimizerConfig config_;
  ParamStore& store_;
  std::vector<RuleState> rules_;
  std::vector<UpdateFactors> factors_;     // per parameter, optimizer.rules applied
  Tensor master_;                          // flat
  std::vector<ParamStore::Piece> pieces_;  // none: all
  std::vector<Placed> ranges_;
  Tensor control_;  // (kUpdateControl) f64
  int64_t steps_applied_ = 0;
  bool watches_bits_ = false, knows_bits_ = false;
  ChangedBits changed_;
};

}  // namespace sluice
