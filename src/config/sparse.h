#pragma once
// Sparse attention: the indexer, the number of keys, the indexer's loss.
#include <optional>

#include "config/enum_names.h"
#include "core/kinds.h"

namespace sluice {

enum class IndexScope : uint8_t { all_heads, kv_head };
enum class SparsePhase : uint8_t { dense_warm_up, sparse };

SLUICE_ENUM_NAMES(IndexScope, "all_heads", "kv_head");
SLUICE_ENUM_NAMES(IndexActivation, "sigmoid", "relu");
SLUICE_ENUM_NAMES(IndexHeadWeights, "sigmoid", "linear", "none");
SLUICE_ENUM_NAMES(BudgetPolicy, "fixed", "eq8", "inverse", "entropy", "code");
SLUICE_ENUM_NAMES(SparsePhase, "dense_warm_up", "sparse");

/// The indexer of sparse attention, which scores every key for every query (src/ops/indexer.h).
struct IndexerConfig {
  int64_t heads = 4;
  int64_t head_dim = 64;
  IndexActivation activation = IndexActivation::sigmoid;
  IndexHeadWeights head_weights = IndexHeadWeights::sigmoid;
  bool bias = true;
  std::optional<double> scale;
  bool rope = false;
  bool key_norm = false;
  bool detach_input = true;

  template <class V>
  void fields(V& f) {
    f("heads", heads, "query heads of the indexer, which share one key per token");
    f("head_dim", head_dim, "even if the indexer has rope");
    f("activation", activation,
      "of every head's scaled product of query and key: sigmoid (GSA) or relu (DSA)");
    f("head_weights", head_weights,
      "weights of the heads in the sum over them: sigmoid of a projection of the hidden state, that "
      "projection itself, or 1");
    f("bias", bias, "a learned bias per head, of the products, and another of the head weights");
    f("scale", scale, "factor on the products; null: 1 / sqrt(head_dim)");
    f("rope", rope, "rotary embedding of the indexer's queries and keys, with theta of model.rope");
    f("key_norm", key_norm, "RMSNorm of the indexer's keys");
    f("detach_input", detach_input,
      "the indexer's loss trains the indexer alone; false: also the layers below");
  }
};

/// How many keys, or blocks of keys, a query selects (002, equation 8; src/ops/README.md).
struct BudgetConfig {
  BudgetPolicy policy = BudgetPolicy::fixed;
  int64_t base = 2048;
  int64_t min = 256;
  int64_t max = 4096;
  double temperature = 1.0;
  double momentum = 0.99;

  template <class V>
  void fields(V& f) {
    f("policy", policy,
      "fixed: base; by the variance of a query's scores relative to its running mean over training: eq8 "
      "grows "
      "with it (the paper's equation 8), inverse falls (its text), code falls within (0.5, 1.5] base; "
      "entropy: "
      "by the entropy of the scores' softmax");
    f("base", base, "keys, or blocks, per query");
    f("min", min, "lower bound of an adaptive k");
    f("max", max, "upper bound of an adaptive k");
    f("temperature", temperature, "code and entropy: factor on the relative variance, or on the entropy");
    f("momentum", momentum, "momentum of the running mean of the variance");
  }
};

/// The indexer's loss: the divergence of the indexer's distribution over keys from that of attention.
struct IndexLossConfig {
  double coefficient = 1.0;
  double temperature = 1.0;
  bool learn_temperature = false;

  template <class V>
  void fields(V& f) {
    f("coefficient", coefficient,
      "weight of KL(p || softmax(temperature * scores)) over the selected keys, or all of them in the dense "
      "warm-up, where p is the mean of attention over heads; mean over counted tokens and layers; 0: off");
    f("temperature", temperature, "factor on the scores, or its initial value");
    f("learn_temperature", learn_temperature, "train the temperature of every layer");
  }
};

/// Sparse attention over the keys that an indexer selects: GSA (002), DSA, QSA, MSA.
struct SparseConfig {
  IndexScope scope = IndexScope::all_heads;
  int64_t block = 1;
  IndexerConfig indexer;
  BudgetConfig k;
  bool force_self = false;
  bool sink = false;
  IndexLossConfig loss;
  SparsePhase phase = SparsePhase::sparse;
  int64_t phase_steps = 0;

  /// Whether attention sees every key in a step, counted from 0.
  bool dense_in_step(int64_t step) const { return phase == SparsePhase::dense_warm_up || step < phase_steps; }
  /// Likewise of a model that has taken `steps` steps: as the last one of them computed it.
  bool dense_after(int64_t steps) const { return dense_in_step(steps > 0 ? steps - 1 : 0); }

  template <class V>
  void fields(V& f) {
    f("scope", scope, "one set of keys per query for all heads, or one per key/value head");
    f("block", block,
      "keys are selected in blocks of this many tokens, counted from the start of a document, by the mean of "
      "their index keys; above 1 a query always sees its own block, in addition to k others");
    f("indexer", indexer, "");
    f("k", k, "");
    f("force_self", force_self, "block 1: a query always selects its own key, as one of its k");
    f("sink", sink, "one learned logit per head in the denominator of the softmax, as with kind: sink");
    f("loss", loss, "");
    f("phase", phase, "dense_warm_up: attention sees every key while the indexer learns from it");
    f("phase_steps", phase_steps, "steps of dense warm-up at the start of a run in the sparse phase");
  }
};

}  // namespace sluice
