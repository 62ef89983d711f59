#pragma once
#include <optional>
#include <string>

#include "config/config.h"
#include "nn/bias.h"
#include "nn/dispatch.h"
#include "nn/flops.h"
#include "nn/gate.h"
#include "nn/layer.h"
#include "nn/mlp.h"
#include "ops/permute.h"
#include "ops/router.h"
#include "params/param_store.h"

namespace sluice {

/// What the routers of a step add up over its micro-batches, and what of it their losses' gradients need.
struct RouterLoad {
  Tensor totals = {};  // (layers, router_totals_size(E)) f64, ops/router.h; rows of dense layers stay 0.
                       // Empty: nothing is added
  /// (1) f64: the weight of every token's losses, 1 / tokens of the global batch that are not padding. Empty:
  /// 1 / the tokens of this micro-batch.
  Tensor token_weight = {};
  /// (T) i32, of Batch: padding (core/targets.h) is not counted, and has no losses. Empty: there is none.
  Tensor targets = {};
  /// Others that compute micro-batches of the same step at the same time. And (layers, E) f64: the counts of
  /// all of them so far; on a GPU, (E) f64 of host memory where they pass.
  Communicator* ranks = nullptr;
  Tensor counts = {}, host_counts = {};
  /// With scope micro_batch: the ranks that share its sequences (Mesh::context); nullptr: none.
  Communicator* sequences = nullptr;
  Tensor previous =
      {};  // with scope previous_step: (layers, E) f64, the counts of the step before, of all ranks
  /// Where experts are shared by ranks: += the rounds beyond the first that the rows took on their way to
  /// them. Equal on all of these ranks.
  int64_t* extra_rounds = nullptr;

  Tensor layer(int64_t i) const { return totals ? totals.rows(i, 1).view({totals.dim(1)}) : Tensor(); }
  /// (E) f64: how often each expert of layer i was chosen in the step so far, here or by all ranks.
  Tensor layer_counts(int64_t i, int64_t experts) const {
    return counts ? counts.rows(i, 1).view({experts}) : layer(i).rows(0, experts);
  }
};

/// (layers, router_totals_size(E)) f64; empty for a dense model. The caller zeroes it where a step begins.
Tensor make_router_totals(const ModelConfig& config, Arena& arena);

/// Mixture of experts (ops/router.h): every token goes to the K of E SwiGLU experts that the router selects,
/// none is dropped, and to the shared expert if there is one:
///   y = sum over k of weight_k expert_k(x) [+ shared(x), or sigmoid(x w) shared(x)]
/// With model.moe.bias the router's logits and the experts' three projections have biases, with
/// model.moe.swiglu_limit the experts gpt-oss's SwiGLU (ops/activation.h). The balance loss and z-loss have
/// no output: backward adds their gradients to those of the logits. Names are as in Qwen3-MoE and Qwen3-Next;
/// experts are stored contiguously for grouped products. With expert parallelism, rows and their weights are
/// sent to the experts' ranks and back (nn/dispatch.h). A rank processes the received rows source by source,
/// so that y, dx and every source's gradients have the same bits as on a single rank.
class Moe {
 public:
  /// T tokens, E experts, K per token, F = moe_intermediate_size, C = hidden_size; R = T K rows sorted by
  /// expert, or, with ranks, room for as many rows of a first round, sorted by source, then expert. wide =
  /// accumulate_dtype.
  struct Saved {
    Tensor probabilities;     // (T, E) wide
    Tensor lse;               // (T) wide: of the router's logits
    Tensor weights;           // (T, K) wide
    Tensor experts;           // (T, K) i32
    Tensor counts;            // (E) f64: rows of each expert that are not padding's
    Permutation permutation;  // rows to tokens; with expert parallelism, rows as in Dispatch::plan
    Tensor gate_up;           // (R, 2F): [gate | up], with biases; empty if backward recomputes it
    Tensor inner;             // (R, F): weight silu(gate) up, or the clamped form; likewise
    Tensor rank_counts;       // (ranks, E) i32: rows of each rank's tokens; empty where ranks do not share
                              // experts, as are
    Tensor received_x;  // (R, C): rows that came from other ranks; empty too when they are to travel again
    Tensor received_weights;  // (R) wide: the same
    Mlp::Saved shared;        // y (T, C); empty without a shared expert
    Gate::Saved shared_gate;  // y (T, 1, C); empty without
    Tensor y;                 // (T, C)
  };

  /// experts: the expert-parallel ranks; this one has experts [rank E / size, (rank + 1) E / size) and
  /// registers no others. Error(usage) if size does not divide E.
  Moe(const ModelConfig& config, ParamStore& store, const std::string& prefix, int64_t layer,
      const ExpertRanks& experts = {});
  Saved make_saved(Arena& arena, const std::string& name, int64_t num_tokens, DType dtype,
                   bool keep_inner) const;

  /// s.y from x (T, C).
  void forward(Context& ctx, const Tensor& x, const RouterLoad& load, Saved& s) const;
  /// dx (T, C) overwritten. With scope global_batch the balance loss sees what `load` has counted so far in
  /// this step, this micro-batch included; without totals, this micro-batch.
  void backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const RouterLoad& load,
                const Saved& s) const;
  /// Of the router, the K experts that a token goes to, wherever they are, and the shared expert.
  Flops flops() const;

 private:
  /// Rows of one source for the local experts. An operand with an index is gathered by it.
  struct Rows {
    Tensor offsets;         // (experts here + 1) i32
    Tensor x, tokens;       // (R, C); or (any, C) and (R) i32
    Tensor weights, slots;  // (any) wide and (R) i32
    Tensor gate_up, inner;  // (R, 2F), (R, F)
    int source = 0;         // rank that the tokens belong to

    BiasRows weighted() const { return {.offsets = offsets, .weights = weights, .slots = slots}; }
  };

  /// backward where ranks share sequences, and parameters' gradients are sums over whole ones: forward and
  /// backward of the tokens of all these ranks, of which this rank keeps its own tokens' dx.
  void whole_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x,
                      const RouterLoad& load) const;

  /// Registers the local experts' weights, or their biases.
  void add_experts(const ModelConfig& config, const std::string& prefix, bool biases);

  Tensor balance_counts(const RouterLoad& load, const Saved& s) const;
  void count(Context& ctx, const RouterLoad& load, const Saved& s) const;
  void count_sequences(Context& ctx, const RouterLoad& load, const Saved& s) const;
  void count_with_ranks(Context& ctx, const RouterLoad& load) const;
  bool with_ranks() const { return ranks_.size() > 1; }

  /// All rows without expert parallelism; this rank's own rows of a round; the rows received from a rank.
  Rows all_rows(const Saved& s, const Tensor& x) const;
  Rows own_rows(const Saved& s, const Dispatch& dispatch, const Tensor& x) const;
  Rows received_rows(const Saved& s, const Dispatch& dispatch, int source) const;
  void inner_forward(Context& ctx, const Rows& rows) const;
  /// out (R, C) from rows.inner.
  void down_forward(Context& ctx, const Tensor& out, const Rows& rows) const;
  /// dx (R, C) is overwritten and may be dy without an index; dweights has the layout of weights; dgate_up
  /// may be the rows' gate_up.
  void rows_backward(Context& ctx, Tensor dx, Tensor dweights, Tensor dgate_up, const Tensor& dy,
                     const Tensor& dy_index, const Rows& rows) const;
  /// out (T K, C): the output of every row, from its expert on any rank.
  void ranks_forward(Context& ctx, Tensor out, const Tensor& x, const RouterLoad& load, const Saved& s) const;
  /// drows (T K, C), dweights (T, K) overwritten.
  void ranks_backward(Context& ctx, Tensor drows, Tensor dweights, const Tensor& dy, const Tensor& x,
                      const Saved& s) const;

  /// Sends x and weights of the current round to the experts' ranks.
  void send_rows(Dispatch& dispatch, const Saved& s, const Tensor& x) const;

  /// Capacity in rows for the local experts: one round, or all rows of num_tokens.
  int64_t rows_here(int64_t num_tokens) const;
  /// s, with temporaries for the row tensors that it does not keep.
  Saved temporary(ScratchScope& t, const Saved& s, const Tensor& x) const;
  void shared_forward(Context& ctx, const Tensor& x, Saved& s) const;
  void shared_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Saved& s) const;
  Tensor shared_y(const Saved& s) const;

  MoeConfig config_;
  ParamStore& store_;
  ExpertRanks ranks_;
  int64_t layer_, hidden_size_;
  ParamStore::Id router_, gate_up_proj_ = 0, down_proj_ = 0;
  Bias router_bias_;
  std::optional<ParamStore::Id> gate_up_bias_, down_bias_;
  std::optional<Mlp> shared_;
  std::optional<Gate> shared_gate_;
};
static_assert(Layer<Moe, RouterLoad>);

}  // namespace sluice
