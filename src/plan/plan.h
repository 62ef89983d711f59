#pragma once
// The plan of a run: parameters, FLOPs, memory, steps. Everything is counted on the real model, parameter
// store and trainer in a dry step, so that no separate formulas can deviate from them.
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "config/load.h"
#include "nn/flops.h"
#include "train/trainer.h"

namespace sluice {

/// How a model was narrowed to the parameter count of another one.
struct ParameterMatch {
  std::string path;            // of the other configuration
  std::string key;             // narrowed key: intermediate_size, or moe_intermediate_size with experts
  int64_t target = 0;          // its number of parameters
  double exact_width = 0;      // value of key at which the counts are equal
  int64_t width = 0;           // chosen value: the largest multiple of match_multiple not above exact_width
  int64_t parameters = 0;      // of this model at that width
  double difference() const {  // relative
    return static_cast<double>(parameters - target) / static_cast<double>(target);
  }
};

/// The number of parameters of a model, counted by building its store. vocab_size must be set.
int64_t count_parameters(const ModelConfig& model);

/// Resolves model.match_parameters_of: sets intermediate_size (of a mixture of experts:
/// moe_intermediate_size) so that the model has as many parameters as the one of that configuration (the
/// parity rule of Qiu et al. 2025, table 2), and empties the key, so that the resolved configuration stands
/// alone. Nothing happens when the key is empty. A vocab_size of 0 becomes the tokenizer's first (opens its
/// file). Error(usage) when no width does it, or configurations match each other in a circle.
std::optional<ParameterMatch> resolve_parameter_match(Config& config);

/// Cost of dispatch and combine for one layer and micro-batch. Every token has K rows, wherever they are
/// sent; memory is allocated for the worst case, and no token is ever dropped.
struct DispatchPlan {
  int64_t layers = 0;         // MoE layers
  int64_t rows = 0;           // T K
  int64_t most_of_one = 0;    // most rows of one expert: T, that is, all tokens
  int64_t received = 0;       // receive-buffer capacity in rows; 0 without expert parallelism
  int64_t routing_bytes = 0;  // probabilities, weights, ids, permutation
  int64_t kept_bytes = 0;     // activations of the experts saved for backward
  int64_t sets = 0;           // number of sets of both in memory: layers, or 1 if the layers share one
  int64_t scratch_bytes = 0;  // peak during a layer's forward or backward
};

struct Plan {
  struct Parameter {
    std::string name;
    std::vector<int64_t> shape;
    int64_t count = 0;
    double active = 1;        // fraction of the tokens that use it
    bool of_expert = false;   // sharded over the expert axis
    bool in_product = false;  // is the weight of a matrix product
    bool mlp_inner = false;   // ParamSpec::mlp_inner
    bool trained = true;      // neither frozen nor a statistic
    bool statistic = false;   // ParamSpec::statistic
    int unit = 0;             // ParamSpec::unit
  };
  Config config;  // resolved
  std::optional<ParameterMatch> match;
  std::vector<Parameter> parameters;  // in the order of the store
  int64_t total = 0;
  int64_t active = 0;           // parameters active for one token, with only its K experts
  int64_t trained = 0;          // all that optimizer.rules do not freeze, or only the lora adapters
  int64_t frozen = 0;           // the rest, without statistics, which no optimizer ever trains
  int64_t non_embedding = 0;    // without the token embedding, and without an untied head
  int64_t gate_parameters = 0;  // added by attention.gates
  int64_t switch_parameters =
      0;  // added by attention.switch_heads: routers, and experts beyond one projection
  int64_t matmul_parameters =
      0;  // active parameters in matrix products, including the output head but not the embedding look-up
  Flops flops;                 // of one token's forward pass, the sum of what the layers report
  double flops_per_token = 0;  // forward and backward, without recomputation; averaged over the run where it
                               // begins with a dense warm-up of sparse attention
  double recomputed = 0;       // FLOPs per token that backward computes again (train.recompute)
  std::optional<DispatchPlan> dispatch;                // for MoE models
  int64_t ranks = 1;                                   // number of ranks
  MemoryPlan memory;                                   // of each rank
  int64_t steps = 0, tokens_per_step = 0, tokens = 0;  // steps and tokens 0: length not given
  int64_t accumulation_steps = 0;                      // micro-batches per step, of all ranks
};

/// Resolves the configuration and measures the plan without allocating the model's memory. ranks: number of
/// ranks, which need not exist. Error(usage) if the configuration cannot run on them, with the keys' places
/// from `places`.
Plan make_plan(Config config, int64_t ranks = 1, const KeyPlaces& places = {});

/// The tables that `sluice plan` prints. Identical layers are shown once, and so are experts.
std::string plan_text(const Plan& plan);
nlohmann::json plan_json(const Plan& plan);

}  // namespace sluice
