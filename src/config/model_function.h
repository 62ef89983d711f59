#pragma once
// Which model keys change the function that given weights compute, and how two models differ in it. A
// training that starts from the weights of another one (train.init_from) compares them.
#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"

namespace sluice {

/// Whether `name` stands for `key`: it is the key, or a section or list that the key lies in ("model.rope"
/// for "model.rope.theta"). An index may be left empty or out: "model.attention.gates[].heads",
/// "model.attention.gates.heads".
bool names_key(std::string_view name, std::string_view key);

/// Whether another value of a model key makes the same weights compute another function. Every key does that
/// is not known to concern only how weights start, how they are trained, or how fast they are computed.
bool changes_function(std::string_view key);

struct FunctionDifference {
  std::string key;           // "model.rope.theta"; lists of different lengths differ as a whole
  std::string source, here;  // the values, as YAML writes them
};
/// The keys in which the functions of two models differ, in the order of the reference. Keys that have no
/// effect in either (experts per token of a model without experts) are not looked at; numbers are compared in
/// single precision.
std::vector<FunctionDifference> function_differences(const ModelConfig& source, const ModelConfig& here);

constexpr const char* kIgnoreTokenizer = "data.tokenizer";

/// What is wrong with a name in train.init_ignore, with a suggestion; empty for a model key or section and
/// kIgnoreTokenizer.
std::string init_ignore_problem(const std::string& name);

}  // namespace sluice
