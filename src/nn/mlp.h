#pragma once
#include <string>

#include "config/config.h"
#include "nn/flops.h"
#include "nn/layer.h"
#include "params/param_store.h"

namespace sluice {

/// SwiGLU feed-forward network (Shazeer 2020): y = (silu(x Wgate^T) * (x Wup^T)) Wdown^T. gate_proj and
/// up_proj are contiguous, so that one product computes both. With hidden_act: relu2 (So et al. 2021) there
/// is no gate: y = max(x Wup^T, 0)^2 Wdown^T.
class Mlp {
 public:
  /// T tokens, F = intermediate_size, C = hidden_size.
  struct Saved {
    Tensor gate_up;  // (T, 2F): [gate | up], relu2: (T, F): up; empty if backward recomputes it
    Tensor inner;    // (T, F): silu(gate) * up, or max(up, 0)^2; likewise
    Tensor y;        // (T, C)
  };

  /// intermediate_size: that of the model or of the shared expert.
  Mlp(const ModelConfig& config, ParamStore& store, const std::string& prefix, int64_t intermediate_size);
  Saved make_saved(Arena& arena, const std::string& name, int64_t num_tokens, DType dtype,
                   bool keep_inner) const;

  /// s.y from x (T, C).
  void forward(Context& ctx, const Tensor& x, Saved& s) const;
  /// dx (T, C) overwritten.
  void backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Saved& s) const;
  Flops flops() const;

 private:
  /// Columns of gate_up.
  int64_t up_width() const { return gated_ ? 2 * intermediate_size_ : intermediate_size_; }
  void inner_forward(Context& ctx, const Saved& s, const Tensor& x) const;
  /// s, with temporaries for the tensors that it does not keep.
  Saved kept_or_temporary(ScratchScope& t, const Saved& s, const Tensor& x) const;

  ParamStore& store_;
  ParamStore::Id gate_up_proj_ = 0, down_proj_ = 0;
  int64_t hidden_size_, intermediate_size_;
  bool gated_;
};
static_assert(Layer<Mlp>);

}  // namespace sluice
