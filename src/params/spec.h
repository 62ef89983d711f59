#pragma once
// The description of a parameter that a layer registers, on which optimizer, checkpoint, plan and export
// rely.
#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

/// A parameter's number, in the order of registration.
using ParamId = int;

struct Init {
  enum class Kind { normal, constant } kind = Kind::normal;
  double value = 0.02;  // standard deviation, or the constant
  static Init normal(double std_dev) { return {Kind::normal, std_dev}; }
  static Init constant(double v) { return {Kind::constant, v}; }
};

/// How a layer treats the gradient of a frozen parameter.
enum class WhenFrozen : uint8_t {
  discarded,  // computes it, into shared memory that is never read
  skipped,    // asks ParamStore::trains, and computes none
  adapted     // the same, of a matrix of linear_* alone: it may have a low-rank adapter
};

/// The axis of the mesh (comm/mesh.h), beside data, over which a parameter is sharded.
enum class SplitAxis : uint8_t { none, expert };
struct Split {
  /// The parameter itself is not sliced: one rank of the axis holds all of it, and the other ranks register
  /// others of its kind, as with experts.
  static constexpr int kWhole = -1;
  SplitAxis axis = SplitAxis::none;
  int dim = kWhole;  // which dimension of the shape the axis cuts; no axis of this version cuts one
};

struct ParamSpec {
  std::string name;            // Hugging Face name
  std::vector<int64_t> shape;  // [out, in] for matrices; rank 1 or 2
  Init init = {};
  bool weight_decay = true;
  bool packed = false;     // a matrix used by linear_*: keeps packed copies
  bool joined = false;     // lies directly behind the parameter before it, so that both are one matrix, or
                           // one vector (ParamStore::joined)
  bool joined_in_backward = false;  // of a joined group's matrices: forward multiplies with each by itself. A
                                    // matrix that cannot be joined to the one before it is not joined
  int64_t groups = 1;      // of the first of a joined group: so many equal weights (ops/grouped_linear.h)
  double active = 1;       // share of the tokens that this parameter takes part in
  bool orthogonal = true;  // of a block's matrix: Muon may update it (optim/rules.h)
  Split split = {};
  WhenFrozen when_frozen = WhenFrozen::discarded;
  bool vocabulary = false;  // a row for each token of the vocabulary: the embedding, the head
  bool statistic = false;   // no weight, but a number that training measures: never trained by an optimizer
  bool summed_by_products = false;  // a matrix whose gradient comes from ParamStore::next_sum
  bool mlp_inner = false;   // its product is computed again in backward with train.recompute: mlp

  bool trainable = true;  // set by the store: not frozen
  bool apart = false;     // set by the store, with joined_in_backward: not joined because one is frozen
  bool adapter = false;   // set by the store: one of the two matrices of an adapter
  int unit = 0;           // set by the store: what is gathered and released together (ParamStore::begin_unit)

  /// Parameters start at multiples of this many elements in flat buffers: 64 bytes for bf16, more for wider
  /// types, so that a parameter has one element offset whatever the dtype.
  static constexpr int64_t kAlignElements = 32;

  bool of_expert() const { return split.axis == SplitAxis::expert; }
  int64_t numel() const {
    int64_t n = 1;
    for (const int64_t d : shape) n *= d;
    return n;
  }
};

}  // namespace sluice
