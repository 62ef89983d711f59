#include "nn/input_projections.h"

#include <algorithm>

#include "nn/weight_gradient.h"
#include "ops/columns.h"
#include "ops/elementwise.h"
#include "ops/linear.h"

namespace sluice {

void InputProjections::add(ParamStore::Id matrix) {
  const ParamSpec& spec = store_.spec(matrix);
  if (!spec.joined && !spec.apart) groups_.emplace_back();
  SLUICE_CHECK(!groups_.empty() && groups_.size() <= kMost,
               "input projections: {} is one too many, or joined to another", spec.name);
  Group& group = groups_.back();
  if (!spec.joined) group.pieces.push_back({matrix, group.rows, 0});
  group.pieces.back().rows += spec.shape[0];
  parts_.push_back({matrix, groups_.size() - 1, group.rows, spec.shape[0]});
  group.rows += spec.shape[0];
}

InputProjections::Gradients InputProjections::make_gradients(ScratchScope& t, int64_t num_tokens,
                                                             DType dtype) const {
  Gradients gradients;
  for (size_t i = 0; i < groups_.size(); ++i)
    gradients[i] = t.alloc("gradients of input projections", dtype, {num_tokens, groups_[i].rows});
  return gradients;
}

const InputProjections::Part& InputProjections::part(ParamStore::Id matrix) const {
  const auto found =
      std::find_if(parts_.begin(), parts_.end(), [matrix](const Part& p) { return p.matrix == matrix; });
  SLUICE_CHECK(found != parts_.end(), "input projections: {} is none of them", store_.spec(matrix).name);
  return *found;
}

Tensor InputProjections::gradient(const Gradients& gradients, ParamStore::Id matrix) const {
  const Part& p = part(matrix);
  return gradients[p.group].columns(p.begin, p.rows);
}

void InputProjections::put(Context& ctx, const Gradients& gradients, ParamStore::Id matrix,
                           const Tensor& rows) const {
  const Part& p = part(matrix);
  put_columns(ctx, gradients[p.group], rows.view({rows.dim(0), p.rows}), p.begin);
}

void InputProjections::backward(Context& ctx, const Tensor& dx, const Gradients& gradients, const Tensor& x,
                                Into& into) const {
  for (size_t i = 0; i < groups_.size(); ++i) {
    const Group& group = groups_[i];
    if (group.pieces.size() == 1) {
      const ParamStore::Id first = group.pieces[0].first;
      linear_backward_input(ctx, dx, gradients[i], store_.joined(first), into);
      weight_backward(ctx, store_, first, gradients[i], x);
    } else {
      backward_of_pieces(ctx, dx, gradients[i], x, group, into);
    }
    into = Into::add;
  }
}

void InputProjections::backward_of_pieces(Context& ctx, const Tensor& dx, const Tensor& dy, const Tensor& x,
                                          const Group& group, Into into) const {
  ScratchScope t(ctx.scratch);
  const Tensor whole = t.alloc("input projections", dx.dtype, {group.rows, dx.dim(1)});
  for (const Piece& piece : group.pieces)
    cast(ctx, whole.rows(piece.begin, piece.rows), store_.joined(piece.first).value);
  linear_backward_input(ctx, dx, dy, {.value = whole, .packed = {}, .packed_transposed = {}}, into);
  for (const Piece& piece : group.pieces) {
    if (!store_.trains(piece.first)) continue;
    ScratchScope part(ctx.scratch);
    const Tensor columns = part.alloc("gradient of an input projection", dy.dtype, {dy.dim(0), piece.rows});
    take_columns(ctx, columns, dy, piece.begin);
    weight_backward(ctx, store_, piece.first, columns, x);
  }
}

}  // namespace sluice
