#pragma once
// AdamW, Muon, the learning rate, rules by parameter name.
#include <optional>
#include <string>
#include <vector>

#include "config/enum_names.h"

namespace sluice {

enum class OptimizerType : uint8_t { adamw, muon };
enum class Schedule : uint8_t { constant, cosine, linear, wsd };

SLUICE_ENUM_NAMES(OptimizerType, "adamw", "muon");
SLUICE_ENUM_NAMES(Schedule, "constant", "cosine", "linear", "wsd");

struct ParameterRule {
  std::string match;
  double lr_multiplier = 1.0;
  std::optional<bool> weight_decay;
  bool trainable = true;

  template <class V>
  void fields(V& f) {
    f("match", match, "the rule applies to parameters whose name contains this text; later rules win");
    f("lr_multiplier", lr_multiplier, "factor on the learning rate");
    f("weight_decay", weight_decay,
      "true or false; null: the layer's own setting (matrices yes, norms and sinks no)");
    f("trainable", trainable, "false: frozen, without gradients, moments or weight decay");
  }
};

/// Muon (Jordan et al. 2024): orthogonalised momentum for the matrices of the blocks. Embedding, output head
/// and all other parameters use AdamW.
struct MuonConfig {
  double lr = 0.02;
  double momentum = 0.95;
  double initial_momentum = 0.85;
  int64_t momentum_warmup_steps = 300;
  bool nesterov = true;
  int64_t newton_schulz_steps = 5;
  double weight_decay = 0.0;

  template <class V>
  void fields(V& f) {
    f("lr", lr, "Muon's peak learning rate; it follows the same schedule");
    f("momentum", momentum, "");
    f("initial_momentum", initial_momentum, "momentum at step 0; it rises linearly to momentum");
    f("momentum_warmup_steps", momentum_warmup_steps, "steps over which it rises");
    f("nesterov", nesterov, "");
    f("newton_schulz_steps", newton_schulz_steps,
      "iterations of the quintic Newton-Schulz orthogonalisation");
    f("weight_decay", weight_decay, "decoupled weight decay of the matrices that Muon updates");
  }
};

struct OptimizerConfig {
  OptimizerType type = OptimizerType::adamw;
  double lr = 1e-3;
  double min_lr = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  Schedule schedule = Schedule::cosine;
  int64_t warmup_steps = 0;
  int64_t decay_steps = 0;
  MuonConfig muon;
  std::vector<ParameterRule> rules;

  template <class V>
  void fields(V& f) {
    f("type", type, "muon: Muon for the matrices of the blocks, AdamW for all other parameters");
    f("lr", lr, "AdamW's peak learning rate");
    f("min_lr", min_lr, "final learning rate of cosine, linear and wsd");
    f("beta1", beta1, "");
    f("beta2", beta2, "");
    f("eps", eps, "");
    f("weight_decay", weight_decay, "decoupled; applied to matrices only unless a rule says otherwise");
    f("schedule", schedule, "shape after the warm-up; wsd holds lr, then decays linearly over decay_steps");
    f("warmup_steps", warmup_steps, "steps of linear warm-up from 0");
    f("decay_steps", decay_steps, "wsd: steps of the final decay; 0: a fifth of the run");
    f("muon", muon, "");
    f("rules", rules, "learning-rate multipliers, weight decay and freezing by parameter name");
  }
};

}  // namespace sluice
