#pragma once
// Every parameter of a model, in the order in which its layers register them.
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "params/adapters.h"
#include "params/spec.h"

namespace sluice {

/// Whether a rule of optimizer.rules applies to a parameter: its name contains the rule's text.
inline bool matches(const ParameterRule& rule, const std::string& name) {
  return name.find(rule.match) != std::string::npos;
}

/// Decides what is trained. optimizer.rules freeze parameters by name, the last that matches a name wins.
/// With lora.rank > 0 all that layers add is frozen, whatever rules say, and each matrix that lora.targets
/// names gets an adapter beside it.
class ParamRegistry {
 public:
  explicit ParamRegistry(const LoraConfig& lora = {}, std::vector<ParameterRule> rules = {})
      : targets_(lora), rules_(std::move(rules)) {}

  /// Called by layer constructors. Names are unique. Adapters come behind the parameter, or joined group,
  /// they belong to. Error(usage) where a target names what can have none, and where rules freeze a part of a
  /// joined group.
  ParamId add(ParamSpec spec);
  /// Sets the unit of parameters added later: 0 for those outside of blocks, i + 1 for block i.
  void begin_unit(int unit);
  /// No parameters may be added afterwards. Error(usage) if a target of adapters matches no matrix.
  void close();

  const std::vector<ParamSpec>& specs() const { return specs_; }
  const ParamSpec& spec(ParamId id) const { return specs_[static_cast<size_t>(id)]; }
  /// Of a matrix, or of all of a joined group by its first; in the order of LinearWeight::low_rank.
  const std::vector<Adapter>& adapters(ParamId first) const { return adapters_[static_cast<size_t>(first)]; }
  double adapter_scale() const { return targets_.scale(); }

  int64_t total() const;  // number of parameters
  int64_t total_trained() const;
  int64_t total_frozen() const;  // neither trained nor statistics
  int64_t total_active() const;  // those that one token takes part in

 private:
  ParamId push(ParamSpec spec);
  bool trained(const ParamSpec& spec) const;
  /// Whether a matrix with joined_in_backward can lie directly behind the parameter before it: each keeps the
  /// alignment that it has by itself.
  bool can_join(const ParamSpec& spec) const;
  void add_adapters();

  AdapterTargets targets_;
  std::vector<ParameterRule> rules_;
  std::vector<ParamId> to_adapt_;               // matrices whose adapters are still to be added
  std::vector<std::vector<Adapter>> adapters_;  // by parameter
  std::vector<ParamSpec> specs_;
  std::unordered_set<std::string> names_;
  int unit_ = 0;
  bool closed_ = false;
};

}  // namespace sluice
