#pragma once
// Low-rank adapters (LoRA, Hu et al. 2021; ops/low_rank.h): which matrices get one, and the adapter's
// parameters.
#include <array>
#include <string>
#include <vector>

#include "config/config.h"
#include "params/spec.h"

namespace sluice {

/// The adapter of a matrix, or of one of a joined group.
struct Adapter {
  ParamId matrix, a, b;
  int64_t begin;  // its first row in the group
};

/// lora.targets: a target is the end of a module's name, from a point on: gate_proj (the attention gate's and
/// the feed-forward network's), or self_attn.gate_proj.
class AdapterTargets {
 public:
  explicit AdapterTargets(const LoraConfig& lora) : lora_(lora), used_(lora.targets.size(), false) {}

  /// Whether there are adapters; everything else is then frozen.
  bool active() const { return lora_.rank > 0; }
  /// Whether a target names the parameter's module, which counts as a use of it. Error(usage) where the
  /// parameter can have no adapter.
  bool take(const ParamSpec& spec);
  /// Error(usage) if a target matches no matrix.
  void check_used() const;

  /// The two matrices beside a matrix (out, in), named as PEFT names them: MODULE.lora_A.weight (r, in),
  /// normal with the variance 1 / (3 in) of that library's uniform one, and MODULE.lora_B.weight (out, r),
  /// zero.
  std::array<ParamSpec, 2> specs_for(const ParamSpec& matrix) const;
  /// Of an adapter's output: alpha / rank.
  double scale() const { return lora_.alpha / static_cast<double>(lora_.rank); }

 private:
  LoraConfig lora_;
  std::vector<bool> used_;
};

}  // namespace sluice
