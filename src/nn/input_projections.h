#pragma once
// The matrices that a layer multiplies its input with, as one product in backward.
#include <array>
#include <vector>

#include "nn/layer.h"
#include "params/param_store.h"

namespace sluice {

/// Matrices W_i (n_i, C) that all multiply one input x (T, C): of attention queries, keys, values and the
/// logits of a gate. Forward multiplies x with each of them. Backward has the gradients of the products side
/// by side in a matrix dy (T, n_1 + ...), and W_1, ... behind each other in memory
/// (ParamSpec::joined_in_backward), so that dx = dy W and dW += dy^T x are one product each: dx is rounded
/// and written once, and the gradients of matrices with few rows are computed at the speed of large ones.
/// Where some of them are frozen, W is a copy of all, so that dx keeps its bits. Matrices whose sizes do not
/// allow it (ParamRegistry) have products of their own.
class InputProjections {
 public:
  static constexpr size_t kMost = 4;

  explicit InputProjections(ParamStore& store) : store_(store) {}
  /// Of a matrix that takes part. In the order in which they are registered.
  void add(ParamStore::Id matrix);

  /// The gradients of the products: a matrix for each group.
  using Gradients = std::array<Tensor, kMost>;
  Gradients make_gradients(ScratchScope& t, int64_t num_tokens, DType dtype) const;
  /// The place of one product's gradient (T, n), which is to be overwritten: columns of a matrix.
  Tensor gradient(const Gradients& gradients, ParamStore::Id matrix) const;
  /// Writes it there, from rows (T, ...) that are contiguous.
  void put(Context& ctx, const Gradients& gradients, ParamStore::Id matrix, const Tensor& rows) const;

  /// dx (T, C) is written according to `into`, which becomes Into::add; the matrices' gradients are added to.
  void backward(Context& ctx, const Tensor& dx, const Gradients& gradients, const Tensor& x,
                Into& into) const;

 private:
  /// Rows [begin, begin + rows) of a group's W that lie behind each other in memory.
  struct Piece {
    ParamStore::Id first;
    int64_t begin, rows;
  };
  struct Group {
    std::vector<Piece> pieces = {};
    int64_t rows = 0;
  };
  struct Part {
    ParamStore::Id matrix;
    size_t group;
    int64_t begin, rows;  // among the rows of the group
  };
  const Part& part(ParamStore::Id matrix) const;
  void backward_of_pieces(Context& ctx, const Tensor& dx, const Tensor& dy, const Tensor& x,
                          const Group& group, Into into) const;

  ParamStore& store_;
  std::vector<Group> groups_;
  std::vector<Part> parts_;
};

}  // namespace sluice
