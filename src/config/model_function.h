#pragma once
// Which model keys change the function that given weights compute, and in which keys two models differ. A run
// that starts from another model's weights (train.init_from) compares the two.
#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"

namespace sluice {

/// Whether `name` covers `key`: it is the key itself, or a section or list that contains it ("model.rope" for
/// "model.rope.theta"). An index may be empty or left out: "model.attention.gates[].heads",
/// "model.attention.gates.heads".
bool names_key(std::string_view name, std::string_view key);

/// "model.attention.gates.heads" of "model.attention.gates[3].heads".
std::string without_indices(std::string_view key);

/// Whether the same weights compute another function when the key's value changes. This holds for every model
/// key except those known to affect only initialisation, training or speed.
bool changes_function(std::string_view key);

/// Whether any layer has a dense network, whose width is model.intermediate_size.
bool has_dense_layer(const ModelConfig& model);

/// The model as it computes after `steps` steps of training, the first step if there are none: until
/// model.attention.sparse.phase_steps have been taken, sparse attention is in its dense warm-up.
ModelConfig model_after(ModelConfig model, int64_t steps);

struct FunctionDifference {
  std::string key;           // "model.rope.theta"; lists of different lengths differ as a whole
  std::string source, here;  // the values, as YAML writes them
};
/// The keys in which the functions of two models differ, in the order of the reference. Keys without effect
/// in either model (experts per token where there are no experts) are ignored; numbers are compared in single
/// precision.
std::vector<FunctionDifference> function_differences(const ModelConfig& source, const ModelConfig& here);

constexpr const char* kIgnoreTokenizer = "data.tokenizer";

/// What is wrong with a name in train.init_ignore, with a suggestion; empty for a model key or section and
/// kIgnoreTokenizer.
std::string init_ignore_problem(const std::string& name);

}  // namespace sluice
