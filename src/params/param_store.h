#pragma once
// ParamStore: every parameter of a model, said once by the layer that owns it. Optimizer, checkpoint, plan,
// clip and export iterate the specs; nobody else lists parameters.
#include <array>
#include <string>
#include <unordered_set>
#include <vector>

#include "config/config.h"
#include "core/arena.h"
#include "core/context.h"
#include "ops/linear.h"

namespace sluice {

struct Init {
  enum class Kind { normal, constant } kind = Kind::normal;
  double value = 0.02;  // standard deviation, or the constant
  static Init normal(double std_dev) { return {Kind::normal, std_dev}; }
  static Init constant(double v) { return {Kind::constant, v}; }
};

/// What a layer does about the gradient of a parameter that is frozen (ParamStore's LoRA).
enum class WhenFrozen : uint8_t {
  discarded,  // writes it as ever: into memory that all such share and nobody reads
  skipped,    // asks ParamStore::trains, and computes none
  adapted     // the same, of a matrix of linear_* alone: it may have a low-rank adapter
};

struct ParamSpec {
  std::string name;            // Hugging Face name
  std::vector<int64_t> shape;  // [out, in] for matrices; rank 1 or 2
  Init init = {};
  bool weight_decay = true;
  bool packed = false;  // a matrix used by linear_*: keeps packed copies
  bool joined =
      false;  // lies directly behind the parameter before it, so that both are one matrix (joined())
  int64_t groups =
      1;  // of the first of a joined group: as many equal weights behind each other (ops/grouped_linear.h)
  double active = 1;       // share of the tokens that this parameter takes part in
  bool orthogonal = true;  // of a block's matrix: Muon may update it (optim/optimizer.h)
  bool of_expert = false;  // lies on one rank of the mesh's expert axis: other ranks register other experts'
  WhenFrozen when_frozen = WhenFrozen::discarded;
  bool trainable = true;  // set by the store: not frozen
  int unit = 0;           // set by the store: what is gathered and released together (ParamStore::begin_unit)
};

/// How a store's flat buffers are cut and what of them is kept (ZeRO, Rajbhandari et al. 2020).
struct StoreLayout {
  /// Ranks that share the elements of every bucket in equal parts: of what all ranks hold alike, and of
  /// experts.
  int dense_ranks = 1, expert_ranks = 1;
  int grad_sources = 1;  // ParamStore::grad_sources
  /// false: of the blocks no values (gradients) are kept but those of two, which somebody brings and takes
  /// (UnitUser).
  bool whole_values = true, whole_grads = true;
};

/// A range of the flat buffers that is gathered and reduced as one: what is alike of a unit, or its experts.
struct Bucket {
  int unit = 0;
  bool of_expert = false;
  int64_t begin = 0, end = 0;  // elements; padded to a multiple of 32 times its ranks
};

enum class Pass { forward, backward };

/// Learns when a model begins and ends to use a unit: to bring its weights, to take its gradients.
class UnitUser {
 public:
  virtual ~UnitUser() = default;
  virtual void begin(Context& ctx, int unit, Pass pass) = 0;
  virtual void end(Context& ctx, int unit, Pass pass) = 0;
};

/// With lora.rank > 0 every parameter that layers add is frozen, and each matrix that lora.targets names gets
/// an adapter beside it (LoRA, Hu et al. 2021; ops/low_rank.h), named as PEFT names them:
/// MODULE.lora_A.weight [r, in], normal with the variance 1 / (3 in) of that library's uniform one, and
/// MODULE.lora_B.weight [out, r], zero. A target is the end of a module's name, from a point on: gate_proj
/// (the attention gate's and the feed-forward network's), or self_attn.gate_proj. Frozen parameters lie apart
/// from the flat buffers, which hold what is trained alone: buckets, gradients and moments are of that.
class ParamStore {
 public:
  using Id = int;
  explicit ParamStore(const LoraConfig& lora = {}) : lora_(lora), target_used_(lora.targets.size(), false) {}

  /// The adapter of a matrix, or of one of a joined group.
  struct Adapter {
    Id matrix, a, b;
    int64_t begin;  // its first row in the group
  };
  /// This rank's part of a bucket, and where it lies in a buffer of all its parts.
  struct Piece {
    Bucket of;
    int64_t begin = 0, count = 0, at = 0;
  };
  /// What a piece holds of a parameter.
  struct Slice {
    Id id = 0;
    int64_t begin = 0, count = 0;  // of the parameter's elements
    int64_t at = 0;                // in the piece
  };

  /// Called by layer constructors. Names are unique. Adapters come behind the parameter, or joined group,
  /// they belong to. Error(usage) where a target names what can have none.
  Id add(ParamSpec spec);
  /// Parameters added from now on belong to this unit: 0 what lies around the blocks, i + 1 block i.
  void begin_unit(int unit) {
    add_adapters();
    unit_ = unit;
  }
  bool trains(Id id) const { return specs_[static_cast<size_t>(id)].trainable; }
  /// Of a matrix, or of all of a joined group by its first; in the order of LinearWeight::low_rank.
  const std::vector<Adapter>& adapters(Id first) const { return adapters_[static_cast<size_t>(first)]; }

  const std::vector<ParamSpec>& specs() const { return specs_; }
  int64_t numel(Id id) const;
  int64_t total() const;  // number of parameters
  int64_t total_trained() const;
  int64_t total_active() const;  // those that one token takes part in

  /// Allocates values (dtype), gradients (accumulate_dtype(dtype)) and packed copies for products of about
  /// `rows` rows. gradients == nullptr: none (evaluation). Arenas may measure. Error(usage) where a target of
  /// adapters has named no matrix.
  void allocate(Context& ctx, DType dtype, int64_t rows, Arena& values, Arena* gradients,
                const StoreLayout& layout = {});
  const StoreLayout& layout() const { return layout_; }

  /// Flat positions, whether or not anything lies there: units ascend, each with what is alike before its
  /// experts.
  const std::vector<Bucket>& buckets() const { return buckets_; }
  int64_t flat_size() const { return buckets_.empty() ? 0 : buckets_.back().end; }
  int num_units() const { return static_cast<int>(units_.size()); }
  /// The part of every bucket that falls to a rank, in the buckets' order; and the size of a buffer of all.
  std::vector<Piece> pieces(int dense_rank, int expert_rank) const;
  static int64_t size_of(const std::vector<Piece>& pieces) {
    return pieces.empty() ? 0 : pieces.back().at + pieces.back().count;
  }
  std::vector<Slice> slices(const Piece& piece) const;

  /// Where a unit whose values (gradients) are not kept is placed when it is used: blocks in turn at 0 and 1,
  /// what lies around them at 2.
  static int slot_of(int unit) { return unit == 0 ? 2 : unit % 2; }
  /// All of a unit's values, flat: where they are kept, or at its slot.
  Tensor unit_values(int unit) const;
  /// The unit's views are of its slot from now on.
  void place_values(int unit);
  void place_grads(int unit);
  /// A bucket's values, or gradients of one source, where its unit is placed now.
  Tensor bucket_values(const Bucket& bucket) const;
  Tensor bucket_grads(const Bucket& bucket, int source = 0) const;

  void add_user(UnitUser* user) { users_.push_back(user); }
  /// For the model: it uses the unit between these.
  void begin_use(Context& ctx, int unit, Pass pass) const {
    for (UnitUser* user : users_) user->begin(ctx, unit, pass);
  }
  void end_use(Context& ctx, int unit, Pass pass) const {
    for (UnitUser* user : users_) user->end(ctx, unit, pass);
  }

  DType dtype() const { return dtype_; }
  Tensor value(Id id) const { return values_[static_cast<size_t>(id)].value; }
  /// Of a frozen parameter: as its WhenFrozen says, memory that nobody reads, or empty.
  Tensor grad(Id id) const { return grads_[static_cast<size_t>(id)]; }
  const LinearWeight& linear(Id id) const { return values_[static_cast<size_t>(id)]; }
  /// `count` parameters from `first` on as one matrix of stacked rows (specs[first + 1..] are `joined`), with
  /// its own packed copies.
  const LinearWeight& joined(Id first) const { return joined_[static_cast<size_t>(first)]; }
  Tensor joined_grad(Id first) const { return joined_grads_[static_cast<size_t>(first)]; }
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
  int64_t offset(Id id) const { return offsets_[static_cast<size_t>(id)]; }
  Tensor part(const Tensor& flat, Id id) const;

  /// Philox, key (seed, parameter's name): the same initial value whatever else the model holds.
  void initialize(Context& ctx, uint64_t seed, bool frozen_too = true);
  /// The same for `slice` of a parameter, into part (count).
  void initialize_slice(Context& ctx, const Slice& slice, const Tensor& part, uint64_t seed) const;
  /// Refreshes the packed copies after values changed: all; those of a unit, of all units, which are trained;
  /// the frozen ones.
  void pack(Context& ctx);
  void pack(Context& ctx, int unit) { pack(ctx, units_[static_cast<size_t>(unit)]); }
  void pack_trained(Context& ctx);
  void pack_frozen(Context& ctx) { pack(ctx, frozen_); }
  void zero_grads(Context& ctx);

 private:
  /// A unit, and where it lies now.
  struct Unit {
    std::vector<Id> ids;
    int64_t begin = 0, end = 0, expert_begin = 0;  // flat; experts behind expert_begin
    char *values = nullptr, *grads = nullptr, *source_grads = nullptr;
    int64_t packed_bytes = 0;  // of its packed copies, where they move with it
  };
  struct Slot {
    Tensor values, grads, source_grads, packed;
  };

  Id push(ParamSpec spec);
  bool targeted(const std::string& name);
  void add_adapters();
  void check_targets() const;
  void lay_out();
  void place_discarded(Arena& gradients);
  void pack(Context& ctx, const Unit& unit);
  void measure_packed(Context& ctx, int64_t rows, Arena& values, bool transposed);
  void set_value_views(const Unit& unit);
  void set_grad_views(const Unit& unit);

  LoraConfig lora_;
  std::vector<bool> target_used_;
  std::vector<Id> to_adapt_;                    // matrices whose adapters are still to be added
  std::vector<std::vector<Adapter>> adapters_;  // by parameter
  std::vector<ParamSpec> specs_;
  std::unordered_set<std::string> names_;
  int unit_ = 0;
  StoreLayout layout_;
  Device device_ = Device::cpu;
  std::vector<Bucket> buckets_;
  std::vector<Unit> units_;    // what is trained of them
  Unit frozen_;                // whatever unit it is used in; offsets are its own
  std::array<Slot, 3> slots_;  // two for blocks, one for unit 0
  std::vector<int64_t> packed_offsets_,
      packed_transposed_offsets_;  // of a group's first, in its unit's packed copies; -1
  std::vector<UnitUser*> users_;
  std::vector<int64_t> offsets_;
  DType dtype_ = DType::f32;
  std::vector<LinearWeight> values_, joined_;
  std::vector<Tensor> grads_, joined_grads_;
  Tensor flat_values_, flat_grads_, discarded_;
};

}  // namespace sluice
