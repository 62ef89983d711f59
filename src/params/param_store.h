#pragma once
// ParamStore: every parameter of a model, said once by the layer that owns it. Optimizer, checkpoint, plan,
// clip and export iterate the specs; nobody else lists parameters.
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

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

struct ParamSpec {
  std::string name;            // Hugging Face name
  std::vector<int64_t> shape;  // [out, in] for matrices; rank 1 or 2
  Init init = {};
  bool weight_decay = true;
  bool packed = false;  // a matrix used by linear_*: keeps packed copies
  bool joined =
      false;  // lies directly behind the parameter before it, so that both are one matrix (joined())
  int64_t groups = 1;  // of the first of a joined group: as many equal weights behind each other (ops/grouped_linear.h)
  double active = 1;   // share of the tokens that this parameter takes part in
  bool of_expert = false;  // lies on one rank of the mesh's expert axis: other ranks register other experts'
  int unit = 0;            // set by the store: what is gathered and released together (ParamStore::begin_unit)
};

class ParamStore {
 public:
  using Id = int;

  /// Called by layer constructors. Names are unique.
  Id add(ParamSpec spec);
  /// Parameters added from now on belong to this unit: 0 what lies around the blocks, i + 1 block i.
  void begin_unit(int unit) { unit_ = unit; }

  const std::vector<ParamSpec>& specs() const { return specs_; }
  int64_t numel(Id id) const;
  int64_t total() const;         // number of parameters
  int64_t total_active() const;  // those that one token takes part in

  /// Allocates values (dtype), gradients (accumulate_dtype(dtype)) and packed copies for products of about
  /// `rows` rows. padded: the flat buffers' size for that many elements, for shards of equal size. gradients == nullptr: none (evaluation). Arenas may measure.
  void allocate(Context& ctx, DType dtype, int64_t rows, Arena& values, Arena* gradients,
                const std::function<int64_t(int64_t)>& padded = {});

  DType dtype() const { return dtype_; }
  Tensor value(Id id) const { return values_[static_cast<size_t>(id)].value; }
  Tensor grad(Id id) const { return grads_[static_cast<size_t>(id)]; }
  const LinearWeight& linear(Id id) const { return values_[static_cast<size_t>(id)]; }
  /// `count` parameters from `first` on as one matrix of stacked rows (specs[first + 1..] are `joined`), with
  /// its own packed copies.
  const LinearWeight& joined(Id first) const { return joined_[static_cast<size_t>(first)]; }
  Tensor joined_grad(Id first) const { return joined_grads_[static_cast<size_t>(first)]; }
  /// Gradients of experts are kept apart by the rank of the expert axis whose tokens they are of, where that is asked for
  /// (so that sums have the order they would have without that axis): source < grad_sources(); source 0 is joined_grad(first).
  int grad_sources() const { return grad_sources_; }
  Tensor joined_grad(Id first, int source) const;
  /// All values / gradients in one flat view, padding (always zero) included.
  Tensor flat_values() const { return flat_values_; }
  Tensor flat_grads() const { return flat_grads_; }
  /// Where a parameter begins in them, in elements; and its part of any buffer laid out like them.
  int64_t offset(Id id) const { return offsets_[static_cast<size_t>(id)]; }
  Tensor part(const Tensor& flat, Id id) const;

  /// Philox, key (seed, parameter's name): the same initial value whatever else the model holds.
  void initialize(Context& ctx, uint64_t seed);
  /// Refreshes the packed copies after values changed.
  void pack(Context& ctx);
  void zero_grads(Context& ctx);

 private:
  std::vector<ParamSpec> specs_;
  std::unordered_set<std::string> names_;
  int unit_ = 0, grad_sources_ = 1;
  std::vector<int64_t> offsets_;
  DType dtype_ = DType::f32;
  std::vector<LinearWeight> values_, joined_;
  std::vector<Tensor> grads_, joined_grads_;
  Tensor flat_values_, flat_grads_;
};

}  // namespace sluice
