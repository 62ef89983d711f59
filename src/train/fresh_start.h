#pragma once
// How parameters start that the first weights lack (train.init_missing: fresh): a gate, a sink or a shared
// expert that is added to a pretrained model keeps the function of its weights where that is possible.
#include <map>
#include <string>
#include <vector>

#include "config/config.h"
#include "core/context.h"
#include "core/tensor.h"

namespace sluice {

/// Of a gate that multiplies, a is the activation and z its initial logit (0, or the gate's bias): with zero
/// weights every score is a(z), and the projection before or behind the gate is multiplied by 1 / a(z):
///   query, key, value    q_proj, k_proj, v_proj
///   sdpa_output, dense   o_proj
/// For sigmoid the factor is 2, so that only exponents change and the logits keep their bits; for two_sigmoid
/// it is 1, and nothing changes; for ns_sigmoid it is 4/3, rounded. Learned constants of identity and silu
/// start where the activation is 1. A gate that adds keeps the function where a(z) is 0.
/// A sink starts at kSinkStart, where it takes less than 3.4e-4 of a query's attention as long as the logits'
/// log-sum-exp is not negative: so little that the function is nearly kept, and enough for its gradient,
/// which is as small, to stay above AdamW's epsilon. The down-projection of a shared expert starts at 0. An
/// indexer of sparse attention chooses nothing in a dense warm-up (phase: dense_warm_up, or phase_steps),
/// which keeps the function.
struct FreshStart {
  std::map<std::string, double> constants;    // missing parameters that start at one value
  std::map<std::string, double> factors;      // loaded parameters that are multiplied
  std::vector<std::string> missing;           // all missing parameters
  std::vector<std::string> changes_function;  // those of them that start as in a training from scratch

  /// "12 new parameters: self_attn.gate_proj.weight; the function is kept", for the console; empty if there
  /// are none.
  std::string text() const;
};

constexpr double kSinkStart = -8;

/// missing: names of the model's parameters that are not in the first weights.
FreshStart fresh_start(const ModelConfig& model, std::vector<std::string> missing);

/// The model `here` without what fresh parameters add to `source` while its function is kept: gates behind
/// those of the source, sinks, a shared expert, a learned scale of exclusive attention, an indexer in a dense
/// warm-up. Compared with `here` it shows what is left to differ.
ModelConfig grown(const ModelConfig& source, const ModelConfig& here);

/// Multiplies all values in place.
void scale_values(Context& ctx, const Tensor& values, double factor);

}  // namespace sluice
