#pragma once
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "config/config.h"
#include "nn/gate.h"
#include "nn/layer.h"
#include "nn/mlp.h"
#include "ops/permute.h"
#include "ops/router.h"
#include "params/param_store.h"

namespace sluice {

/// What the routers of a step add up over its micro-batches, and what of it their losses' gradients need.
struct RouterLoad {
  Tensor totals = {};  // (layers, router_totals_size(E)) f64, ops/router.h; rows of dense layers stay 0. Empty: nothing is added
  double share = 1;  // of the global batch's tokens, in this micro-batch
  /// Others that compute micro-batches of the same step at the same time; host memory then. And (layers, E) f64: the counts of
  /// all of them so far.
  Communicator* ranks = nullptr;
  Tensor counts = {};

  Tensor layer(int64_t i) const { return totals ? totals.rows(i, 1).view({totals.dim(1)}) : Tensor(); }
  /// (E) f64: how often each expert of layer i was chosen in the step so far, here or by all ranks.
  Tensor layer_counts(int64_t i, int64_t experts) const {
    return counts ? counts.rows(i, 1).view({experts}) : layer(i).rows(0, experts);
  }
};

/// Mixture of experts (SPEC 1.2): every token goes to K of E SwiGLU experts of its router's choice, none is dropped, and to
/// the shared expert if there is one:
///   y = sum over k of weight_k expert_k(x) [+ shared(x), or sigmoid(x w) shared(x)]
/// The balance and z losses have no output: backward adds their gradients to the logits'. Names as in Qwen3-MoE and
/// Qwen3-Next; experts lie behind each other, so that one grouped product serves all.
class Moe {
 public:
  /// T tokens, E experts, K per token, R = T K rows sorted by expert, F = moe_intermediate_size, C = hidden_size. wide =
  /// accumulate_dtype.
  struct Saved {
    Tensor probabilities;     // (T, E) wide
    Tensor lse;               // (T) wide: of the router's logits
    Tensor weights;           // (T, K) wide
    Tensor experts;           // (T, K) i32
    Tensor counts;            // (E) f64: rows of each expert
    Permutation permutation;  // which row is which token's
    Tensor gate_up;           // (R, 2F): [gate | up]; empty when backward is to compute it again
    Tensor inner;             // (R, F): weight silu(gate) up; the same
    Mlp::Saved shared;        // y (T, C); empty without a shared expert
    Gate::Saved shared_gate;  // y (T, 1, C); empty without
    Tensor y;                 // (T, C)
  };

  /// experts: the ranks that share them (Mesh::expert); this one registers its own alone. None: all are here.
  Moe(const ModelConfig& config, ParamStore& store, const std::string& prefix, int64_t layer, Communicator* experts = nullptr);
  Saved make_saved(Arena& arena, const std::string& name, int64_t num_tokens, DType dtype, bool keep_inner) const;

  /// s.y from x (T, C).
  void forward(Context& ctx, const Tensor& x, const RouterLoad& load, Saved& s) const;
  /// dx (T, C) overwritten. With scope global_batch the balance loss sees what `load` has counted so far in this step, this
  /// micro-batch included; without totals, this micro-batch.
  void backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const RouterLoad& load, const Saved& s) const;

 private:
  void count_with_ranks(Context& ctx, const RouterLoad& load) const;
  void inner_forward(Context& ctx, const Saved& s, const Tensor& x) const;
  /// s, or temporaries in the place of what it does not keep.
  Saved kept_or_temporary(ScratchScope& t, const Saved& s, const Tensor& x) const;
  void shared_forward(Context& ctx, const Tensor& x, Saved& s) const;
  void shared_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Saved& s) const;
  Tensor shared_y(const Saved& s) const;

  MoeConfig config_;
  ParamStore& store_;
  int64_t layer_, hidden_size_;
  ParamStore::Id router_, gate_up_proj_ = 0, down_proj_ = 0;
  std::optional<Mlp> shared_;
  std::optional<Gate> shared_gate_;
};
static_assert(Layer<Moe, RouterLoad>);

}  // namespace sluice
