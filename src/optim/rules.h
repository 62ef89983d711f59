#pragma once
// How parameters are updated from their gradients: one rule for each kind of update. An optimizer is a list
// of rules. A new one is a class like these, its entries in UpdateRule and rules_of, and its name in
// OptimizerType.
#include <concepts>
#include <variant>
#include <vector>

#include "config/config.h"
#include "core/context.h"
#include "ops/adamw.h"
#include "params/param_store.h"

namespace sluice {

/// Factors of the update of one parameter: a multiple of the step's learning rate, and its weight decay.
struct UpdateFactors {
  double lr_multiplier = 1, weight_decay = 0;
};

/// A stretch of the flat buffers that a rule updates at once: whole parameters, or, where ranks share the
/// update (ZeRO), this rank's parts of them. Padding between members is not changed.
struct UpdateRange {
  struct Member {
    ParamStore::Id id = 0;
    const ParamSpec* spec = nullptr;
    int64_t begin = 0, count = 0;  // elements of the parameter
    int64_t at = 0;                // where they begin in the range
    UpdateFactors factors = {};
  };
  std::vector<Member> members;       // ascending
  Tensor value = {}, gradient = {};  // (n), of the store's type and of accumulate_dtype
  Tensor master = {};                // (n) of accumulate_dtype; empty where value is its own master
  std::vector<Tensor> state = {};    // (n) each of accumulate_dtype, in the order of the rule's state_names
  Tensor segments =
      {};  // (members, 4) f64 on the device: begin, end, lr multiplier, weight decay (ops/adamw.h)
  /// (members, 2) i32, or empty: what an applied update read and wrote of value, master and state, as
  /// adamw_update_summed's sums.
  Tensor sums = {};
};

/// sums (member, column) = the sum of word_bits of what the member holds. On a CPU alone.
void sum_of_bits(Context& ctx, const UpdateRange& range, size_t member, int64_t column);

template <class Rule>
concept IsUpdateRule = requires(const Rule& rule, const ParamSpec& spec, Context& ctx,
                                const UpdateRange& range, const Tensor& control) {
  /// Whether the rule can update a parameter. If several can, the last one does.
  { rule.takes(spec) } -> std::same_as<bool>;
  /// The state per element, as suffixes of the parameter's name in a checkpoint: ".m".
  { rule.state_names() } -> std::same_as<std::vector<const char*>>;
  /// Under optimizer.rules' multiplier, and where the parameter decays at all.
  { rule.factors(1.0, true) } -> std::same_as<UpdateFactors>;
  /// Called after judge_update has filled control; nothing changes if control has apply = 0. Fills range.sums
  /// where it is there.
  { rule.update(ctx, range, control) } -> std::same_as<void>;
};

inline AdamwSettings adamw_settings(const OptimizerConfig& config) {
  return {.beta1 = config.beta1, .beta2 = config.beta2, .eps = config.eps};
}

/// AdamW (ops/adamw.h), of any parameter.
class AdamwRule {
 public:
  explicit AdamwRule(const OptimizerConfig& config) : config_(config) {}
  bool takes(const ParamSpec&) const { return true; }
  std::vector<const char*> state_names() const { return {".m", ".v"}; }
  UpdateFactors factors(double lr_multiplier, bool decays) const;
  void update(Context& ctx, const UpdateRange& range, const Tensor& control) const;

 private:
  OptimizerConfig config_;
};

/// Muon (ops/muon.h): orthogonalised momentum. Its learning rate has its own peak and the common schedule.
/// Matrices are processed one at a time; scratch memory is that of the largest. Needs whole parameters.
class MuonRule {
 public:
  explicit MuonRule(const OptimizerConfig& config) : config_(config) {}
  /// Matrices of blocks whose layer has nothing against it: projections, gates, feed-forward networks, every
  /// expert by itself. Not embedding and head, norms, sinks and learned constants (which do not decay), nor
  /// routers.
  bool takes(const ParamSpec& spec) const {
    return spec.unit > 0 && spec.shape.size() == 2 && spec.weight_decay && spec.orthogonal;
  }
  std::vector<const char*> state_names() const { return {".m"}; }
  UpdateFactors factors(double lr_multiplier, bool decays) const;
  void update(Context& ctx, const UpdateRange& range, const Tensor& control) const;

 private:
  OptimizerConfig config_;
};

using UpdateRule = std::variant<AdamwRule, MuonRule>;
static_assert(IsUpdateRule<AdamwRule> && IsUpdateRule<MuonRule>);

/// The rules of optimizer.type, each before those that go before it.
std::vector<UpdateRule> rules_of(const OptimizerConfig& config);

}  // namespace sluice
