#pragma once
// What a training will be, before it is: parameters, FLOPs, memory, steps. Everything is counted on the real
// model, parameter store and trainer, measured by a dry step; there is no second formula.
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "train/trainer.h"

namespace sluice {

/// How a model was narrowed to another one's number of parameters.
struct ParameterMatch {
  std::string path;  // of the other configuration
  std::string key;   // what was narrowed: intermediate_size, or moe_intermediate_size where there are experts
  int64_t target = 0;          // its parameters
  double exact_width = 0;      // of key, at which both are equal
  int64_t width = 0;           // chosen: the largest multiple of match_multiple not above it
  int64_t parameters = 0;      // of this model at that width
  double difference() const {  // relative
    return static_cast<double>(parameters - target) / static_cast<double>(target);
  }
};

/// Parameters of a model, counted by building its store. vocab_size must be known.
int64_t count_parameters(const ModelConfig& model);

/// Resolves model.match_parameters_of: sets intermediate_size (of a mixture of experts:
/// moe_intermediate_size) so that the model has as many parameters as the one of that configuration (the
/// parity rule of Qiu et al. 2025, table 2), and empties the key, so that the resolved configuration stands
/// alone. Nothing happens when the key is empty. A vocab_size of 0 becomes the tokenizer's first (opens its
/// file). Error(usage) when no width does it, or configurations match each other in a circle.
std::optional<ParameterMatch> resolve_parameter_match(Config& config);

/// What going to the experts and back costs one layer and micro-batch. A token has as many rows as experts,
/// wherever it is sent: the bound is what is taken, and nothing is ever dropped.
struct DispatchPlan {
  int64_t layers = 0;         // with experts
  int64_t rows = 0;           // T K
  int64_t most_of_one = 0;    // rows that one expert can get: T, all of the tokens
  int64_t received = 0;       // rows of other ranks' tokens at once, at most; 0 where ranks share no experts
  int64_t routing_bytes = 0;  // probabilities, weights, ids, permutation
  int64_t kept_bytes = 0;     // what experts compute of every row and backward reads
  int64_t sets = 0;           // of both in memory: layers, or 1 where they share
  int64_t scratch_bytes = 0;  // at most, while a layer's forward or backward computes
};

struct Plan {
  struct Parameter {
    std::string name;
    std::vector<int64_t> shape;
    int64_t count = 0;
    double active = 1;  // share of the tokens that it takes part in
    bool of_expert = false,
         in_product = false;  // lies on one rank of the expert axis; is a matrix of a product
    int unit = 0;             // ParamSpec::unit
  };
  Config config;  // resolved
  std::optional<ParameterMatch> match;
  std::vector<Parameter> parameters;  // in the order of the store
  int64_t total = 0;
  int64_t active = 0;           // those that one token takes part in: of the experts, those it goes to
  int64_t trained = 0;          // all, or the adapters of lora
  int64_t non_embedding = 0;    // without the token embedding, and without an untied head
  int64_t gate_parameters = 0;  // added by attention.gates
  int64_t switch_parameters =
      0;  // added by attention.switch_heads: routers, and what experts hold beyond one projection
  int64_t matmul_parameters =
      0;  // active ones in matrix products: the head counts, the embedding look-up does not
  double flops_per_token = 0;  // 6 matmul_parameters (4 of what is frozen) + 6 L S H D: forward and backward,
                               // causal half
  std::optional<DispatchPlan> dispatch;                // of a mixture of experts
  int64_t ranks = 1;                                   // that share the training
  MemoryPlan memory;                                   // of each
  int64_t steps = 0, tokens_per_step = 0, tokens = 0;  // steps and tokens 0: length not given
  int64_t accumulation_steps = 0;                      // micro-batches per step, of all ranks
};

/// Resolves and measures. No memory of the model's size is touched. ranks: that would share the training,
/// none of which has to be there. Error(usage) where they cannot.
Plan make_plan(Config config, int64_t ranks = 1);

/// The tables `sluice plan` prints. Layers alike are shown once, and so are experts.
std::string plan_text(const Plan& plan);
nlohmann::json plan_json(const Plan& plan);

}  // namespace sluice
