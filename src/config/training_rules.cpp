#include "config/training_rules.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "config/derived.h"
#include "config/model_function.h"
#include "core/device.h"

namespace sluice {
namespace {

void check_gradient_dtype(const Config& c, Checks& check) {
  check.require(c.parallel.gradient_dtype == GradientDtype::f32 || c.train.precision != Precision::f64,
                {"parallel.gradient_dtype", "train.precision"},
                "parallel.gradient_dtype: bf16 is available only for gradients computed in f32; with "
                "precision f64 use f32");
}

/// Rows of a micro-batch are counted in 32 bits.
void check_micro_batch(const Config& c, Checks& check) {
  const int64_t samples = c.train.micro_batch_size, length = c.data.seq_len;
  if (samples < 1 || length < 1 || samples > kMaxSize || length > kMaxSize) return;
  check.require(
      samples * length <= kMaxSize, {"train.micro_batch_size", "data.seq_len"},
      fmt::format("train.micro_batch_size = {} samples of data.seq_len = {} tokens are more than the "
                  "{} that a micro-batch may hold",
                  samples, length, kMaxSize));
  // A gradient's shape would not tell a learned score from the score of a token.
  const auto& gates = c.model.attention.gates;
  const bool learned_scores = std::any_of(gates.begin(), gates.end(), [](const GateConfig& gate) {
    return gate.input == GateInput::none || gate.bias.has_value();
  });
  check.require(
      !learned_scores || c.parallel.context < 1 || tokens_per_micro_batch(c) > 1,
      {"train.micro_batch_size", "data.seq_len", "model.attention.gates"},
      "a gate with a bias or with input: none needs micro-batches of at least two tokens on each rank "
      "(train.micro_batch_size x data.seq_len / parallel.context)");
  const int64_t experts = c.model.moe.num_experts_per_tok;
  check.require(
      c.model.moe.num_experts <= 0 || experts < 1 || samples * length > kMaxSize ||
          samples * length <= kMaxSize / experts,
      {"train.micro_batch_size", "data.seq_len", "model.moe.num_experts_per_tok"},
      fmt::format("train.micro_batch_size = {} samples of data.seq_len = {} tokens, each to {} experts, "
                  "are more than the {} rows that a micro-batch may have",
                  samples, length, experts, kMaxSize));
}

/// Every rank of an expert-parallel group holds the same number of experts.
void check_expert_ranks(const Config& c, Checks& check) {
  const int64_t ranks = c.parallel.expert, experts = c.model.moe.num_experts;
  if (ranks <= 1) return;
  check.require(
      experts > 0, {"parallel.expert", "model.moe.num_experts"},
      fmt::format("parallel.expert = {} needs experts, but model.moe.num_experts is 0; use 1", ranks));
  check.require(
      experts % ranks == 0, {"parallel.expert", "model.moe.num_experts"},
      fmt::format("parallel.expert = {} does not divide model.moe.num_experts = {}", ranks, experts));
}

void check_train(const TrainConfig& t, Checks& check) {
  check.require(t.device != DeviceChoice::cuda || built_with_cuda(), {"train.device"},
                "train.device: cuda is not in this build, which is CPU-only; use auto or cpu");
  check.require(t.device != DeviceChoice::cuda || t.precision != Precision::f64,
                {"train.precision", "train.device"},
                "train.precision: f64 is available on the CPU only; use f32 or bf16 with device cuda");
  check.size("train.threads", t.threads, 0);
  check.size("train.micro_batch_size", t.micro_batch_size);
  check.size("train.global_batch_size", t.global_batch_size);
  if (t.micro_batch_size > 0 && t.global_batch_size > 0 && t.micro_batch_size <= kMaxSize &&
      t.global_batch_size <= kMaxSize) {
    const int64_t below = t.global_batch_size / t.micro_batch_size * t.micro_batch_size;
    const int64_t above = below + t.micro_batch_size;
    check.require(
        t.global_batch_size % t.micro_batch_size == 0, {"train.global_batch_size", "train.micro_batch_size"},
        fmt::format("train.global_batch_size = {} is not a multiple of micro_batch_size = {}; nearest: {}",
                    t.global_batch_size, t.micro_batch_size,
                    below > 0 ? fmt::format("{} or {}", below, above) : std::to_string(above)));
  }
  check.count("train.max_steps", t.max_steps);
  check.count("train.max_tokens", t.max_tokens);
  check.not_negative("train.max_grad_norm", t.max_grad_norm);
  check.require(
      t.divergence_factor == 0 || (t.divergence_factor > 1 && std::isfinite(t.divergence_factor)),
      {"train.divergence_factor"},
      fmt::format("train.divergence_factor must be 0 or greater than 1, got {}", t.divergence_factor));
  for (const std::string& name : t.init_ignore)
    if (const std::string problem = init_ignore_problem(name); !problem.empty())
      check.require(false, {"train.init_ignore"}, problem);
  check.require(t.init_missing == InitMissing::refuse || !t.init_from.empty(),
                {"train.init_missing", "train.init_from"},
                "train.init_missing: fresh has no effect without train.init_from");
  check.require(t.init_missing_names.empty() || t.init_missing == InitMissing::fresh,
                {"train.init_missing_names", "train.init_missing"},
                "train.init_missing_names has no effect while train.init_missing is refuse");
  for (const std::string& name : t.init_missing_names)
    check.require(!name.empty(), {"train.init_missing_names"},
                  "train.init_missing_names: the empty text is part of every name; leave the list empty");
  check.require(t.on_nonfinite != BadStepPolicy::count, {"train.on_nonfinite"},
                "train.on_nonfinite: count would apply an update that is not finite; use skip or stop");
}

void check_optimizer(const OptimizerConfig& o, Checks& check) {
  check.positive("optimizer.lr", o.lr);
  check.not_negative("optimizer.min_lr", o.min_lr);
  check.require(o.min_lr <= o.lr, {"optimizer.min_lr", "optimizer.lr"},
                fmt::format("optimizer.min_lr = {} is greater than lr = {}", o.min_lr, o.lr));
  check.require(o.beta1 >= 0 && o.beta1 < 1, {"optimizer.beta1"},
                fmt::format("optimizer.beta1 must be in [0, 1), got {}", o.beta1));
  check.require(o.beta2 >= 0 && o.beta2 < 1, {"optimizer.beta2"},
                fmt::format("optimizer.beta2 must be in [0, 1), got {}", o.beta2));
  check.positive("optimizer.eps", o.eps);
  constexpr double kLeastEps = std::numeric_limits<float>::min();
  check.require(
      !(o.eps > 0 && o.eps < kLeastEps), {"optimizer.eps"},
      fmt::format("optimizer.eps must be at least {:.1e}, got {}: with 0, which it would be in f32, a "
                  "weight without gradient becomes 0 / 0",
                  kLeastEps, o.eps));
  check.not_negative("optimizer.weight_decay", o.weight_decay);
  check.count("optimizer.warmup_steps", o.warmup_steps);
  check.count("optimizer.decay_steps", o.decay_steps);
  const MuonConfig& muon = o.muon;
  check.positive("optimizer.muon.lr", muon.lr);
  for (const auto& [key, value] : std::initializer_list<std::pair<const char*, double>>{
           {"optimizer.muon.momentum", muon.momentum},
           {"optimizer.muon.initial_momentum", muon.initial_momentum}})
    check.require(value >= 0 && value < 1, {key}, fmt::format("{} must be in [0, 1), got {}", key, value));
  check.count("optimizer.muon.momentum_warmup_steps", muon.momentum_warmup_steps);
  check.size("optimizer.muon.newton_schulz_steps", muon.newton_schulz_steps);
  check.not_negative("optimizer.muon.weight_decay", muon.weight_decay);
  for (size_t i = 0; i < o.rules.size(); ++i) {
    const std::string key = fmt::format("optimizer.rules[{}]", i);
    check.require(!o.rules[i].match.empty(), {key + ".match", key},
                  key + " needs match, a part of a parameter's name");
    check.not_negative(key + ".lr_multiplier", o.rules[i].lr_multiplier);
  }
}

/// Checks that the schedule fits into the run, if the length of the run is known.
void check_schedule(const Config& c, Checks& check) {
  const int64_t steps = training_steps(c);
  if (steps <= 0) return;
  const int64_t samples = c.train.global_batch_size, seq_len = c.data.seq_len;
  int64_t tokens = 0;
  if (c.train.max_steps > 0 && samples > 0 && seq_len > 0 && samples <= kMaxSize && seq_len <= kMaxSize)
    check.require(!__builtin_mul_overflow(samples * seq_len, steps, &tokens),
                  {"train.max_steps", "train.max_tokens"},
                  fmt::format("{} steps of {} tokens are more tokens than can be counted (9.2e18)", steps,
                              samples * seq_len));
  const OptimizerConfig& o = c.optimizer;
  if (o.warmup_steps < 0 || o.decay_steps < 0) return;  // reported by itself
  const std::string length = c.train.max_steps > 0 ? "train.max_steps" : "train.max_tokens";
  check.require(
      o.warmup_steps <= steps, {"optimizer.warmup_steps", length},
      fmt::format("optimizer.warmup_steps = {} is longer than the run of {} steps", o.warmup_steps, steps));
  check.require(
      o.schedule != Schedule::wsd || o.warmup_steps > steps || o.decay_steps <= steps - o.warmup_steps,
      {"optimizer.decay_steps", "optimizer.warmup_steps", length},
      fmt::format("optimizer.decay_steps = {} and warmup_steps = {} do not fit into the run of {} steps",
                  o.decay_steps, o.warmup_steps, steps));
  const std::string phase_steps = "model.attention.sparse.phase_steps";
  const AttentionConfig& a = c.model.attention;
  check.require(a.kind != AttentionKind::sparse || a.sparse.phase_steps < steps, {phase_steps, length},
                fmt::format("{} = {} leaves no sparse step in the run of {} steps; use fewer, or phase: "
                            "dense_warm_up for a run that stays dense",
                            phase_steps, a.sparse.phase_steps, steps));
}

void check_lora(const Config& c, Checks& check) {
  check.size("lora.rank", c.lora.rank, 0);
  if (c.lora.rank <= 0) return;
  check.positive("lora.alpha", c.lora.alpha);
  check.require(
      !c.train.init_from.empty(), {"lora.rank", "train.init_from"},
      fmt::format("lora.rank = {} trains adapters of an existing model; give train.init_from", c.lora.rank));
  check.require(!c.lora.targets.empty(), {"lora.targets", "lora.rank"},
                "lora.targets must name at least one matrix");
  check.require(c.optimizer.type == OptimizerType::adamw, {"optimizer.type", "lora.rank"},
                "optimizer.type: muon cannot train adapters (lora.rank); use adamw");
  std::set<std::string> names;
  for (const std::string& target : c.lora.targets)
    check.require(
        !target.empty() && names.insert(target).second, {"lora.targets"},
        target.empty() ? "lora.targets: an empty name" : fmt::format("lora.targets names {} twice", target));
}

void check_parallel(const ParallelConfig& p, Checks& check) {
  for (const auto& [key, ranks] : std::initializer_list<std::pair<const char*, int64_t>>{
           {"parallel.tensor", p.tensor}, {"parallel.pipeline", p.pipeline}})
    check.require(ranks == 1, {key},
                  ranks < 1 ? fmt::format("{} must be at least 1, got {}", key, ranks)
                            : fmt::format("{} = {} is not available in this version; use 1", key, ranks));
  check.size("parallel.expert", p.expert);
  check.require(
      p.expert_capacity > 0 && p.expert_capacity <= static_cast<double>(kMaxSize),
      {"parallel.expert_capacity"},
      fmt::format("parallel.expert_capacity must be greater than 0 and finite, got {}", p.expert_capacity));
  check.not_negative("parallel.timeout_seconds", p.timeout_seconds);
  check.count("parallel.verify_every_steps", p.verify_every_steps);
  check.require(p.gradient_dtype == GradientDtype::f32 || p.determinism == Determinism::same_layout,
                {"parallel.gradient_dtype", "parallel.determinism"},
                "parallel.gradient_dtype: bf16 rounds differently on each number of ranks; with determinism "
                "exact use f32");
  check.require(p.zero_stage >= 0 && p.zero_stage <= 3, {"parallel.zero_stage"},
                fmt::format("parallel.zero_stage must be 0, 1, 2 or 3, got {}", p.zero_stage));
}

/// What ranks that share sequences cannot do yet, each with its reason.
void check_context(const Config& c, Checks& check) {
  const int64_t ranks = c.parallel.context;
  check.size("parallel.context", ranks);
  if (ranks <= 1 || ranks > kMaxSize) return;
  check.require(
      c.data.seq_len % (2 * ranks) == 0, {"parallel.context", "data.seq_len"},
      fmt::format("parallel.context = {} cuts every sequence into {} equal chunks, but data.seq_len = "
                  "{} is no multiple of that; use {}",
                  ranks, 2 * ranks, c.data.seq_len, (c.data.seq_len / (2 * ranks) + 1) * 2 * ranks));
  const int64_t experts = c.parallel.expert;
  check.require(
      c.parallel.determinism == Determinism::same_layout || experts < 1 || experts % ranks == 0 ||
          ranks % experts == 0,
      {"parallel.expert", "parallel.context", "parallel.determinism"},
      fmt::format("parallel.determinism: exact counts every micro-batch once in the experts' gradients, "
                  "which needs one of parallel.expert and parallel.context to divide the other, so that "
                  "groups of ranks lie within groups; got {} and {}",
                  experts, ranks));
  check.require(
      c.train.device != DeviceChoice::cuda || c.parallel.determinism == Determinism::same_layout,
      {"parallel.context", "parallel.determinism", "train.device"},
      fmt::format(
          "parallel.determinism: exact needs train.device: cpu with parallel.context = {}: on a GPU the "
          "bits of a matrix product depend on its number of rows, which is that of a rank's tokens",
          ranks));
  const MoeConfig& moe = c.model.moe;
  check.require(c.train.device != DeviceChoice::cuda || moe.num_experts == 0 ||
                    moe.load_balance.scope != BalanceScope::micro_batch,
                {"parallel.context", "model.moe.load_balance.scope", "train.device"},
                fmt::format("model.moe.load_balance.scope: micro_batch with parallel.context = {} needs "
                            "train.device: cpu; use global_batch or previous_step",
                            ranks));
}

/// Muon orthogonalises whole matrices, which ZeRO would shard.
void check_muon_ranks(const Config& c, Checks& check) {
  check.require(
      c.optimizer.type != OptimizerType::muon || c.parallel.zero_stage == 0,
      {"optimizer.type", "parallel.zero_stage"},
      fmt::format(
          "optimizer.type: muon orthogonalises whole matrices, which parallel.zero_stage = {} shards; use 0",
          c.parallel.zero_stage));
}

}  // namespace

void check_training_rules(const Config& config, Checks& check) {
  check_train(config.train, check);
  check_micro_batch(config, check);
  check_optimizer(config.optimizer, check);
  check_schedule(config, check);
  check_expert_ranks(config, check);
  check_parallel(config.parallel, check);
  check_context(config, check);
  check_gradient_dtype(config, check);
  check_muon_ranks(config, check);
  check_lora(config, check);
}

}  // namespace sluice
