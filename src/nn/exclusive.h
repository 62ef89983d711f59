#pragma once
#include <optional>
#include <string>

#include "config/config.h"
#include "nn/layer.h"
#include "params/param_store.h"

namespace sluice {

/// Exclusive self attention (ops/exclusive.h; model.attention.exclusive): every head's output without its
/// component along the token's own value; the identity with none. Learned: s_h times that component, with s_h
/// = 0 at the start, where the layer is the identity. Where a norm follows, of a head or of the branch, y is
/// read as what it is without its rounding (ops/exclusive.h).
class Exclusive {
 public:
  struct Saved {
    Tensor y;  // (T, H, D); x itself with none
  };

  /// `name`: of the learned scales (H).
  Exclusive(const ModelConfig& config, ParamStore& store, const std::string& name);
  bool identity() const { return identity_; }
  /// x: the input of forward, (T, H, D); may be empty if this is the identity.
  Saved make_saved(Arena& arena, const std::string& name, const Tensor& x) const;

  /// s.y from x and the tokens' own values (T, Hkv, D), as the core reads them.
  void forward(Context& ctx, const Tensor& x, const Tensor& values, Saved& s) const;
  /// dx is overwritten and may alias dy; dvalues is overwritten with the gradient through this layer. The
  /// identity touches neither.
  void backward(Context& ctx, Tensor dx, Tensor dvalues, const Tensor& dy, const Tensor& x,
                const Tensor& values) const;

 private:
  Tensor scale() const { return scale_ ? store_.value(*scale_) : Tensor(); }

  ParamStore& store_;
  bool identity_, normed_;
  std::optional<ParamStore::Id> scale_;
};

}  // namespace sluice
