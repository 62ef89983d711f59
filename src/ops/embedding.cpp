#include "ops/embedding.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(embedding_forward)
SLUICE_DECLARE_BACKENDS(embedding_backward)

namespace sluice {

void embedding_forward(Context& ctx, Tensor y, const Tensor& tokens, const Tensor& weight) {
  check_floating("embedding_forward", "weight", weight);
  SLUICE_CHECK(weight.rank == 2, "embedding_forward: weight must be (V, C), got {}", weight.describe());
  SLUICE_CHECK(tokens.rank == 1 && tokens.dtype == DType::i32,
               "embedding_forward: tokens must be (T) i32, got {}", tokens.describe());
  check_tensor("embedding_forward", "y", y, weight.dtype, {tokens.dim(0), weight.dim(1)});
  SLUICE_DISPATCH(embedding_forward, ctx, y, tokens, weight);
}

void embedding_backward(Context& ctx, Tensor dweight, const Tensor& dy, const Tensor& tokens) {
  check_floating("embedding_backward", "dy", dy);
  SLUICE_CHECK(tokens.rank == 1 && tokens.dtype == DType::i32,
               "embedding_backward: tokens must be (T) i32, got {}", tokens.describe());
  SLUICE_CHECK(dweight.rank == 2, "embedding_backward: dweight must be (V, C), got {}", dweight.describe());
  check_tensor("embedding_backward", "dy", dy, dy.dtype, {tokens.dim(0), dweight.dim(1)});
  check_tensor("embedding_backward", "dweight", dweight, accumulate_dtype(dy.dtype),
               {dweight.dim(0), dy.dim(1)});
  SLUICE_DISPATCH(embedding_backward, ctx, dweight, dy, tokens);
}

}  // namespace sluice
