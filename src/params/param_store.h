#pragma once
// ParamStore: all parameters of a model, each registered once by the layer that owns it, with their memory.
// Optimizer, checkpoint, plan, clip and export iterate over the specs; parameters are listed nowhere else.
#include <array>
#include <vector>

#include "config/config.h"
#include "core/arena.h"
#include "core/context.h"
#include "ops/linear.h"
#include "params/layout.h"
#include "params/packed.h"
#include "params/registry.h"
#include "params/token_rows.h"

namespace sluice {

enum class Pass { forward, backward };

/// Is notified when a model starts and stops using a unit, to gather its weights and reduce its gradients.
class UnitUser {
 public:
  virtual ~UnitUser() = default;
  virtual void begin(Context& ctx, int unit, Pass pass) = 0;
  virtual void end(Context& ctx, int unit, Pass pass) = 0;
};

/// A registry of parameters (params/registry.h), laid out flat (params/layout.h), in memory, with packed
/// copies (params/packed.h).
class ParamStore {
 public:
  using Id = ParamId;
  using Adapter = sluice::Adapter;
  using Piece = BucketPiece;
  using Slice = PieceSlice;
  explicit ParamStore(const LoraConfig& lora = {}, const std::vector<ParameterRule>& rules = {})
      : registry_(lora, rules) {}

  /// For layer constructors: ParamRegistry's.
  Id add(ParamSpec spec) { return registry_.add(std::move(spec)); }
  void begin_unit(int unit) { registry_.begin_unit(unit); }
  bool trains(Id id) const { return registry_.spec(id).trainable; }
  const std::vector<Adapter>& adapters(Id first) const { return registry_.adapters(first); }
  const std::vector<ParamSpec>& specs() const { return registry_.specs(); }
  const ParamSpec& spec(Id id) const { return registry_.spec(id); }
  int64_t numel(Id id) const { return registry_.spec(id).numel(); }
  int64_t total() const { return registry_.total(); }
  int64_t total_trained() const { return registry_.total_trained(); }
  int64_t total_frozen() const { return registry_.total_frozen(); }
  int64_t total_active() const { return registry_.total_active(); }

  /// Allocates values (dtype), gradients (accumulate_dtype(dtype)) and packed copies for products of about
  /// `rows` rows. gradients == nullptr: none (evaluation). Arenas may measure. Error(usage) where a target of
  /// adapters has named no matrix.
  void allocate(Context& ctx, DType dtype, int64_t rows, Arena& values, Arena* gradients,
                const StoreLayout& layout = {});
  const StoreLayout& layout() const { return layout_; }

  /// FlatLayout's, once allocated.
  const std::vector<Bucket>& buckets() const { return flat_.buckets(); }
  int64_t flat_size() const { return flat_.size(); }
  int num_units() const { return static_cast<int>(flat_.units().size()); }
  std::vector<Piece> pieces(int dense_rank, int expert_rank) const {
    return flat_.pieces(dense_rank, expert_rank);
  }
  /// Of a buffer of all pieces.
  static int64_t size_of(const std::vector<Piece>& pieces) {
    return pieces.empty() ? 0 : pieces.back().at + pieces.back().count;
  }
  std::vector<Slice> slices(const Piece& piece) const { return flat_.slices(piece); }

  /// Where a unit whose values (gradients) are not kept is placed when it is used: blocks in turn at 0 and 1,
  /// what lies around them at 2.
  static int slot_of(int unit) { return unit == 0 ? 2 : unit % 2; }
  /// All of a unit's values, flat: where they are kept, or at its slot.
  Tensor unit_values(int unit) const;
  /// Moves the unit's views to its slot.
  void place_values(int unit);
  void place_grads(int unit);
  /// A bucket's values, or gradients of one source, where its unit is placed now.
  Tensor bucket_values(const Bucket& bucket) const;
  Tensor bucket_grads(const Bucket& bucket, int source = 0) const;

  /// Gradients are to be sums over the tokens of these ranks together (params/token_rows.h), which outlive
  /// the store's use.
  void sum_whole(const TokenRows* tokens) { token_rows_ = tokens; }
  /// Where a layer gathers the operands of such a sum; nullptr: it has all that the sum is over.
  const TokenRows* token_rows() const { return token_rows_; }

  void add_user(UnitUser* user) { users_.push_back(user); }
  /// Called by the model before and after it uses a unit.
  void begin_use(Context& ctx, int unit, Pass pass) const {
    for (UnitUser* user : users_) user->begin(ctx, unit, pass);
  }
  void end_use(Context& ctx, int unit, Pass pass) const {
    for (UnitUser* user : users_) user->end(ctx, unit, pass);
  }

  DType dtype() const { return dtype_; }
  Tensor value(Id id) const { return values_[static_cast<size_t>(id)].value; }
  /// For a frozen parameter, according to its WhenFrozen: memory that is never read, or empty.
  Tensor grad(Id id) const;
  /// A parameter by itself, for products. A member of a joined group has no packed copies, or with
  /// joined_in_backward only forward's.
  const LinearWeight& linear(Id id) const { return values_[static_cast<size_t>(id)]; }
  /// `count` parameters from `first` on as one matrix of stacked rows (specs[first + 1..] are `joined`), with
  /// its own packed copies; vectors as one vector.
  const LinearWeight& joined(Id first) const { return joined_[static_cast<size_t>(first)]; }
  Tensor joined_grad(Id first) const { return joined_grad(first, 0); }
  /// Gradients of experts are kept apart by the rank of the expert axis whose tokens they are of, where that
  /// is asked for (so that sums have the order they would have without that axis): source < grad_sources();
  /// source 0 is joined_grad(first).
  int grad_sources() const { return layout_.grad_sources; }
  Tensor joined_grad(Id first, int source) const;
  /// All values / gradients of what is trained in one flat view, padding (always zero) included; empty where
  /// they are not kept.
  Tensor flat_values() const { return flat_values_; }
  Tensor flat_grads() const { return flat_grads_; }
  /// Where a trained parameter begins in them, in elements; and its part of any buffer laid out like them.
  int64_t offset(Id id) const { return flat_.offset(id); }
  Tensor part(const Tensor& flat, Id id) const;

  /// Initial values of all parameters whose memory is here (params/init.h); of a slice of one, into part
  /// (count).
  void initialize(Context& ctx, uint64_t seed);
  void initialize_slice(Context& ctx, const Slice& slice, const Tensor& part, uint64_t seed) const;
  /// Refreshes the packed copies after values changed: all; those of a unit, of all units, which are trained;
  /// the frozen ones.
  void pack(Context& ctx);
  void pack(Context& ctx, int unit) { pack(ctx, flat_.unit(unit).ids); }
  void pack_trained(Context& ctx);
  void pack_frozen(Context& ctx) { pack(ctx, flat_.frozen().ids); }
  void zero_grads(Context& ctx);

  /// Before and after the sums of a unit's gradients, which begin at zero. On a CPU those of trained matrices
  /// with ParamSpec::summed_by_products do so without a pass over memory: the first product overwrites them,
  /// and end_sums fills what none has overwritten.
  void begin_sums(Context& ctx, int unit);
  void end_sums(Context& ctx, int unit);
  /// The gradient of such a matrix (the first of a joined group; one source of an expert's) for its next
  /// product. Until there was one, grad and joined_grad refuse.
  struct Sum {
    Tensor to;
    Into into;
  };
  Sum next_sum(Id first, int source = 0);

 private:
  /// Current position of a unit of the layout.
  struct Place {
    char *values = nullptr, *grads = nullptr, *source_grads = nullptr;
  };
  struct Slot {
    Tensor values, grads, source_grads, packed;
  };

  void make_views(bool gradients);
  /// Whether begin_sums leaves the group that begins with this matrix to its first product.
  bool begins_with_product(Id first) const;
  void check_begun(Id id) const;
  void allocate_slots(Arena& values, Arena* gradients);
  void place_discarded(Arena& gradients);
  void pack(Context& ctx, const std::vector<Id>& ids);
  void pack_of(Context& ctx, Id id);
  void set_value_views(const FlatLayout::Unit& unit, const Place& place);
  void set_grad_views(const FlatLayout::Unit& unit, const Place& place);
  Place& place(int unit) { return places_[static_cast<size_t>(unit)]; }
  const Place& place(int unit) const { return places_[static_cast<size_t>(unit)]; }
  const Slot& slot(int unit) const { return slots_[static_cast<size_t>(slot_of(unit))]; }

  ParamRegistry registry_;
  StoreLayout layout_;
  FlatLayout flat_;
  PackedCopies packed_;
  Device device_ = Device::cpu;
  DType dtype_ = DType::f32;
  std::vector<Place> places_;  // of units
  Place frozen_;
  std::array<Slot, 3> slots_;  // two for blocks, one for unit 0
  std::vector<UnitUser*> users_;
  const TokenRows* token_rows_ = nullptr;
  std::vector<LinearWeight> values_, joined_;
  std::vector<Tensor> grads_, joined_grads_;
  std::vector<bool> unbegun_;  // by the first of a joined group: its sum waits for its first product
  Tensor flat_values_, flat_grads_, discarded_;
};

/// While this exists, layers compute with the tokens of whole sequences, and gather nothing.
class WholeSequences {
 public:
  explicit WholeSequences(ParamStore& store) : store_(store), tokens_(store.token_rows()) {
    store.sum_whole(nullptr);
  }
  ~WholeSequences() { store_.sum_whole(tokens_); }
  WholeSequences(const WholeSequences&) = delete;
  WholeSequences& operator=(const WholeSequences&) = delete;

 private:
  ParamStore& store_;
  const TokenRows* tokens_;
};

}  // namespace sluice
