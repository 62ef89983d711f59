#include "config/sparse_rules.h"

#include <spdlog/fmt/fmt.h>

#include <limits>

namespace sluice {
namespace {

const std::string kAt = "model.attention.sparse.";

void check_sizes(const SparseConfig& s, ProblemSink& problem) {
  const auto size = [&](const std::string& key, int64_t value) {
    if (value < 1) problem({kAt + key}, fmt::format("{}{} must be at least 1, got {}", kAt, key, value));
    if (value > std::numeric_limits<int32_t>::max())
      problem({kAt + key}, fmt::format("{}{} is too large: {}", kAt, key, value));
  };
  size("block", s.block);
  size("indexer.heads", s.indexer.heads);
  size("indexer.head_dim", s.indexer.head_dim);
  size("k.base", s.k.base);
  size("k.min", s.k.min);
  size("k.max", s.k.max);
  const auto positive = [&](const std::string& key, double value) {
    if (!(value > 0))
      problem({kAt + key}, fmt::format("{}{} must be greater than 0, got {}", kAt, key, value));
  };
  positive("k.temperature", s.k.temperature);
  positive("loss.temperature", s.loss.temperature);
  if (s.indexer.scale) positive("indexer.scale", *s.indexer.scale);
  if (!(s.loss.coefficient >= 0))
    problem({kAt + "loss.coefficient"},
            fmt::format("{}loss.coefficient must not be negative, got {}", kAt, s.loss.coefficient));
  if (!(s.k.momentum >= 0 && s.k.momentum < 1))
    problem({kAt + "k.momentum"}, fmt::format("{}k.momentum must be in [0, 1), got {}", kAt, s.k.momentum));
  if (s.phase_steps < 0)
    problem({kAt + "phase_steps"},
            fmt::format("{}phase_steps must not be negative, got {}", kAt, s.phase_steps));
}

/// Keys of the section that contradict each other.
void check_section(const SparseConfig& s, ProblemSink& problem) {
  const auto refuse = [&](bool wrong, const std::vector<std::string>& keys, const std::string& why) {
    std::vector<std::string> all;
    for (const std::string& key : keys) all.push_back(kAt + key);
    if (wrong) problem(all, all[0] + why);
  };
  refuse(s.indexer.rope && s.indexer.head_dim % 2 != 0, {"indexer.head_dim", "indexer.rope"},
         fmt::format(" must be even (rotary pairs), got {}", s.indexer.head_dim));
  refuse(s.k.policy != BudgetPolicy::fixed && s.k.min > s.k.max, {"k.min", "k.max"},
         fmt::format(" = {} is greater than k.max = {}", s.k.min, s.k.max));
  refuse(s.block > 1 && s.force_self, {"force_self", "block"},
         " has no effect with blocks, of which a query always sees its own; leave it out");
  refuse(s.loss.learn_temperature && s.loss.coefficient == 0, {"loss.learn_temperature", "loss.coefficient"},
         " has no effect while the coefficient of the loss is 0");
  refuse(
      s.phase == SparsePhase::dense_warm_up && s.phase_steps > 0, {"phase_steps", "phase"},
      " is the warm-up before the sparse phase; with phase: dense_warm_up all steps are; use phase: sparse");
  refuse(s.phase == SparsePhase::dense_warm_up && s.loss.coefficient == 0, {"phase", "loss.coefficient"},
         ": dense_warm_up trains the indexer by its loss, whose coefficient is 0");
}

}  // namespace

void check_sparse(const Config& config, ProblemSink& problem) {
  const ModelConfig& m = config.model;
  if (m.attention.kind != AttentionKind::sparse) return;
  const SparseConfig& s = m.attention.sparse;
  check_sizes(s, problem);
  check_section(s, problem);
  const int64_t kv_heads = m.num_key_value_heads;
  if (s.scope == IndexScope::kv_head && kv_heads > 0 && s.indexer.heads > 0 &&
      s.indexer.heads % kv_heads != 0)
    problem({kAt + "indexer.heads", kAt + "scope", "model.num_key_value_heads"},
            fmt::format("{}indexer.heads = {} must be a multiple of num_key_value_heads = {}: with scope: "
                        "kv_head every key/value head has its own",
                        kAt, s.indexer.heads, kv_heads));
  if (m.attention.window > 0)
    problem({"model.attention.window", "model.attention.kind"},
            "model.attention.window has no effect on model.attention.kind: sparse, whose indexer selects the "
            "keys; set window: 0");
}

}  // namespace sluice
