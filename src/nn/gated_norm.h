#pragma once
#include <optional>
#include <string>

#include "nn/flops.h"
#include "nn/rmsnorm.h"

namespace sluice {

/// The norm in front of a branch: RMSNorm, and with model.gated_norm a low-rank gate of its output, GatedNorm
/// (Qiu et al. 2026, arXiv 2601.22966): n = RMSNorm(x), y = n * sigmoid(U silu(D n)), D (r, C), U (C, r).
class GatedNorm {
 public:
  struct Saved {
    RmsNorm::Saved norm;         // y (T, C): n
    Tensor down, inner, logits;  // (T, r): D n, silu of it; (T, C): U inner; empty without a gate
    Tensor y;                    // (T, C); n itself without a gate
  };

  /// `name`: parameters are "<name>.weight", "<name>.gate_down.weight" and "<name>.gate_up.weight".
  GatedNorm(const ModelConfig& config, ParamStore& store, const std::string& name);
  Saved make_saved(Arena& arena, const std::string& name, DType dtype, int64_t num_tokens) const;

  void forward(Context& ctx, const Tensor& x, Saved& s) const;
  void forward(Context& ctx, const Residual& x, Saved& s) const;
  /// dx may alias dy; x is the input of forward.
  void backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Saved& s,
                Into into = Into::overwrite) const;

  /// Of the gate's two products.
  Flops flops() const;

 private:
  struct Projections {
    ParamStore::Id down, up;
  };
  void gate(Context& ctx, Saved& s) const;
  void gate_backward(Context& ctx, Tensor dn, const Tensor& dy, const Saved& s) const;

  ParamStore& store_;
  int64_t hidden_size_, rank_;
  RmsNorm norm_;
  std::optional<Projections> gate_;
};
static_assert(Layer<GatedNorm>);

}  // namespace sluice
