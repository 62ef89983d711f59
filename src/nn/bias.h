#pragma once
#include <optional>
#include <string>

#include "nn/weight_gradient.h"
#include "ops/bias.h"

namespace sluice {

/// The learned bias of one linear map, which starts at 0 and is not decayed; or none.
class Bias {
 public:
  /// `name`: of the map, whose bias (n) is "<name>.bias". present = false: none.
  Bias(bool present, ParamStore& store, const std::string& name, int64_t n) : store_(store) {
    if (!present) return;
    bias_ = store.add({.name = name + ".bias",
                       .shape = {n},
                       .init = Init::constant(0),
                       .weight_decay = false,
                       .when_frozen = WhenFrozen::skipped});
  }

  explicit operator bool() const { return bias_.has_value(); }

  /// y (T, n) += bias: of the store's dtype, or of its accumulate_dtype.
  void forward(Context& ctx, const Tensor& y) const {
    if (bias_) bias_forward(ctx, y, store_.value(*bias_), {});
  }
  /// Adds the gradient of the bias, from dy (T, n).
  void backward(Context& ctx, const Tensor& dy) const {
    if (!bias_ || !store_.trains(*bias_)) return;
    ScratchScope t(ctx.scratch);
    bias_backward(ctx, store_.grad(*bias_), summed_rows(ctx, t, store_, dy), Tensor(), {});
  }

 private:
  ParamStore& store_;
  std::optional<ParamStore::Id> bias_;
};

}  // namespace sluice
