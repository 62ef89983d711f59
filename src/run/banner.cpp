#include "run/banner.h"

#include <spdlog/fmt/fmt.h>

#include "config/derived.h"
#include "config/fields.h"
#include "core/build_info.h"
#include "core/cpu_features.h"
#include "core/parallel_for.h"
#include "data/token_check.h"
#include "run/console.h"

namespace sluice {
namespace {

int64_t layers_with_experts(const ModelConfig& model) {
  int64_t layers = 0;
  for (int64_t i = 0; i < model.num_hidden_layers; ++i) layers += model.moe.in_layer(i);
  return layers;
}

std::string tokenizer_note(const Blend& data, size_t source) {
  return tokenizer_known(data, source) ? "" : "  tokenizer unknown: no .json beside the files";
}

/// "experts  8 of 64 x 128 in 6 of 6 layers  11.2M parameters active  balance 0.01 over the global batch  z
/// 0.001".
std::string experts_text(const ModelConfig& model, const Plan& plan) {
  const MoeConfig& moe = model.moe;
  return fmt::format(
      "experts  {} of {} x {}{}  in {} of {} layers  {} parameters active  balance {} ({})  z {}",
      moe.num_experts_per_tok, moe.num_experts, moe.moe_intermediate_size,
      moe.shared_expert_intermediate_size > 0
          ? fmt::format(" + {} shared", moe.shared_expert_intermediate_size)
          : "",
      layers_with_experts(model), model.num_hidden_layers, format_count(static_cast<double>(plan.active)),
      moe.load_balance.coefficient, enum_name(moe.load_balance.scope), moe.router_z_loss_coefficient);
}

}  // namespace

std::string device_text(Device device) {
  if (device == Device::cpu) return "cpu";
  const DeviceInfo info = cuda_devices().at(static_cast<size_t>(chosen_cuda_device()));
  return fmt::format("cuda: {}, {:.1f} GiB, compute capability {}.{}", info.name,
                     static_cast<double>(info.memory_bytes) / (1 << 30), info.compute_capability / 10,
                     info.compute_capability % 10);
}

std::vector<std::string> banner(const Config& config, const Plan& plan, Trainer& trainer, const Blend& data,
                                const Evaluator& evaluator) {
  std::vector<std::string> lines;
  const ModelConfig& m = config.model;
  const auto total = static_cast<double>(plan.total);
  std::string attention(enum_name(m.attention.kind));
  if (m.attention.window > 0)
    attention += fmt::format(" + window of {}{}", m.attention.window,
                             m.attention.window_pattern > 0
                                 ? fmt::format(", but one in {} layers", m.attention.window_pattern)
                                 : "");
  for (const GateConfig& gate : m.attention.gates)
    attention += fmt::format(" + {} {} gate at {}", enum_name(gate.granularity), enum_name(gate.activation),
                             enum_name(gate.position));
  lines.push_back(
      fmt::format("sluice {}  run {}  ->  {}", build_info().version, config.name, config.run_dir));
  lines.push_back(fmt::format(
      "model    {} parameters ({} without embeddings)  layers {}  hidden {}  heads {}/{} x {}  "
      "{}vocabulary {}",
      format_count(total), format_count(static_cast<double>(plan.non_embedding)), m.num_hidden_layers,
      m.hidden_size, m.num_attention_heads, m.num_key_value_heads, m.head_dim,
      layers_with_experts(config.model) < m.num_hidden_layers ? fmt::format("FFN {}  ", m.intermediate_size)
                                                              : "",
      m.vocab_size));
  if (m.attention.exclusive != ExclusiveAttention::none)
    attention += fmt::format(" + exclusive ({})", enum_name(m.attention.exclusive));
  if (m.gated_norm.rank > 0) attention += fmt::format(" + gated norms of rank {}", m.gated_norm.rank);
  if (const SwitchHeadsConfig& s = m.attention.switch_heads; s.num_experts > 0)
    attention += fmt::format(" + {} of {} experts of each {} head", s.num_experts_per_tok, s.num_experts,
                             s.projections == SwitchProjections::value ? "value" : "key and value");
  lines.push_back("attn     " + attention);
  if (config.lora.rank > 0)
    lines.push_back(fmt::format("lora     {} parameters of rank {} trained, alpha {}, of {}  from {}",
                                format_count(static_cast<double>(plan.trained)), config.lora.rank,
                                config.lora.alpha, fmt::join(config.lora.targets, " "),
                                config.train.init_from));
  else if (plan.frozen > 0)
    lines.push_back(fmt::format("frozen   {} of {} parameters (optimizer.rules)",
                                format_count(static_cast<double>(plan.frozen)), format_count(total)));
  if (m.moe.num_experts > 0) lines.push_back(experts_text(config.model, plan));
  const auto sources = data.sources();
  const auto epochs = data.epochs(trainer.max_steps() * config.train.global_batch_size);
  for (size_t s = 0; s < sources.size(); ++s)
    lines.push_back(fmt::format(
        "data     {}  {} tokens in {} file{}{}  {:.0f}% of the samples  {:.2f} epochs{}{}", sources[s].name,
        format_count(static_cast<double>(sources[s].tokens)), sources[s].files,
        sources[s].files == 1 ? "" : "s", sources[s].describe_untrained(), 100 * sources[s].weight,
        epochs[s].second, tokenizer_note(data, s), sources[s].loss.describe("  ")));
  for (const auto& blend : evaluator.blends())
    for (const Blend::SourceInfo& source : blend->sources())
      lines.push_back(fmt::format("held out {}  {} tokens{}{}{}", source.name,
                                  format_count(static_cast<double>(source.tokens)), source.describe_unread(),
                                  tokenizer_note(*blend, 0), source.loss.describe("  ")));
  const double tokens =
      static_cast<double>(trainer.max_steps()) * static_cast<double>(tokens_per_step(config));
  lines.push_back("device   " + device_text(trainer.context().device));
  if (trainer.ranks().size() > 1)
    lines.push_back(fmt::format(
        "ranks    {} ({}{}{})  each {}{} micro-batches of {} a step  gradients {}", trainer.ranks().size(),
        trainer.ranks().name(),
        trainer.communication().transport().empty() ? "" : "; GPUs: ", trainer.communication().transport(),
        config.parallel.context > 1 ? fmt::format("1/{} of ", config.parallel.context) : "",
        trainer.plan().micro_batches(), config.train.micro_batch_size,
        config.parallel.determinism == Determinism::exact
            ? fmt::format("exact, {}", enum_name(config.parallel.exact_sum))
            : "same bits on the same layout"));
  lines.push_back(fmt::format(
      "train    {} tokens = {} steps x {}  {:.2g} tokens per parameter  {} FLOPs  {}, {} thread{}, {}",
      format_count(tokens), trainer.max_steps(), tokens_per_step(config), tokens / total,
      format_exponent(plan.flops_per_token * tokens), enum_name(config.train.precision), num_threads(),
      num_threads() == 1 ? "" : "s", isa_name(cpu_isa())));
  const MemoryPlan& memory = trainer.memory();
  lines.push_back("memory   MiB");
  for (const auto& [name, bytes] : std::initializer_list<std::pair<const char*, int64_t>>{
           {"parameters", memory.parameters},
           {"gradients", memory.gradients},
           {"optimizer", memory.optimizer},
           {"activations", memory.activations},
           {"scratch", memory.scratch},
           {"batch", memory.batch},
           {memory.on_gpu ? "copy (host)" : "checkpoint copy", memory.snapshot},
           {"total", memory.total()}})
    lines.push_back(fmt::format("  {:<16}{:>10}", name, format_mib(bytes)));
  return lines;
}

}  // namespace sluice
