#pragma once
// Overrides of a trained model's configuration that would change nothing.
#include <string>
#include <vector>

namespace sluice {

/// What a command computes with a model.
enum class ModelUse { losses, tasks, analysis, text };

/// Error(usage) for the first override ("key=value") whose key nothing reads that a model is used for: it
/// names the option that does what the key says, where there is one.
void refuse_idle_overrides(const std::vector<std::string>& overrides, ModelUse use);

}  // namespace sluice
