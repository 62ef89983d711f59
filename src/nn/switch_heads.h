#pragma once
#include <optional>
#include <string>

#include "config/config.h"
#include "nn/flops.h"
#include "nn/layer.h"
#include "params/param_store.h"

namespace sluice {

/// Switch heads (Gated Attention, appendix A.1; ops/switch_heads.h): the values, or keys, of every key/value
/// head are sums of a few of its expert projections, selected and weighted by sigmoids of the hidden state.
/// This layer owns the router; the experts are rows of v_proj (k_proj), head by head, expert by expert. All
/// experts of a head project every token, and the sum omits those that are not selected. Projecting only the
/// selected ones would gather Hkv K copies of every token's C channels for w outputs each; one dense product
/// reads them once, and the paper's models select all, or 2 of 8. If values (keys) have no experts, the
/// projection itself is y, and forward and backward do nothing.
class SwitchHeads {
 public:
  enum class Of { keys, values };

  /// T tokens, Hkv heads, E experts of a head, K chosen, w channels of an expert.
  struct Saved {
    Tensor logits;     // (T, Hkv, E)
    Tensor projected;  // (T, Hkv, E, w): output of v_proj; y without experts
    Tensor chosen;     // (T, Hkv, K) i32
    Tensor y;          // (T, Hkv, D)
  };

  /// Rows of the projection: Hkv E w; without experts Hkv D.
  static int64_t rows(const ModelConfig& config, Of of);

  /// `name`: name of the router's weight [Hkv E, C].
  SwitchHeads(const ModelConfig& config, ParamStore& store, const std::string& name, Of of);
  bool identity() const { return !router_; }
  /// `name` + "_proj" and `name` + "_switch" are the tensors'.
  Saved make_saved(Arena& arena, const std::string& name, int64_t num_tokens, DType dtype) const;

  /// s.y from s.projected and hidden (T, C).
  void forward(Context& ctx, const Tensor& hidden, Saved& s) const;
  /// dprojected (the shape of s.projected) is overwritten, except without experts, where it is dy. dhidden
  /// (T, C): the gradient through the router, written according to `into`, which becomes Into::add.
  void backward(Context& ctx, Tensor dprojected, const Tensor& dy, const Tensor& hidden, const Saved& s,
                Tensor dhidden, Into& into) const;
  /// Of the router; the projection is the layer's.
  Flops flops() const { return router_ ? product_flops(store_, *router_) : Flops(); }

 private:
  ParamStore& store_;
  int64_t heads_, experts_, chosen_, width_, head_dim_;
  std::optional<ParamStore::Id> router_;
};

}  // namespace sluice
