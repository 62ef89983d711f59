// sluice eval: validation of a trained model.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "commands.h"
#include "config/derived.h"
#include "config/load.h"
#include "core/cores.h"
#include "data/token_check.h"
#include "eval/evaluate.h"
#include "eval/trained_model.h"
#include "run/metrics.h"
#include "validation_sets.h"

namespace sluice {
namespace {

struct EvalOptions {
  std::string path, device, tokenizer;
  std::vector<std::string> sets, data;
  int64_t max_tokens = 0;
  bool json = false;
  std::string zeroed = "none";
  double sink_threshold = -1;  // -1: not given
};

/// Nothing for `none`.
std::optional<ValueZeroing> value_zeroing(const EvalOptions& options) {
  if (options.sink_threshold >= 0 && options.zeroed != "sinks")
    fail(ExitCode::usage, "--sink-threshold has no effect without --zero-first-value sinks");
  if (options.zeroed == "none") return std::nullopt;
  if (options.zeroed == "all") return ValueZeroing{};
  return ValueZeroing{options.sink_threshold >= 0 ? options.sink_threshold : 0.75};
}

void evaluate(const EvalOptions& options) {
  const std::optional<ValueZeroing> zeroed = value_zeroing(options);
  const ValueZeroing* const zeroing = zeroed ? &*zeroed : nullptr;
  const CheckpointInfo checkpoint = find_checkpoint(options.path);
  const Config config = checkpoint_config(checkpoint, options.device);
  use_threads(config.train.threads);
  const int64_t tokens = config.train.micro_batch_size * config.data.seq_len;
  const TrainedModel trained(checkpoint, tokens, options.device, options.tokenizer);
  const Evaluator evaluator(chosen_sets(options.data, options.sets, config), config, trained.tokenizer(),
                            options.max_tokens);
  for (const auto& set : evaluator.blends()) check_tokens(*set, trained.tokenizer(), config);

  Context dry(0, trained.device());
  Arena measure("activations", 0, trained.device()), measure_host("host");
  ForwardBuffers shapes = make_forward_buffers(trained, measure, measure_host, tokens, Recompute::none);
  trained.model().forward(dry, shapes.batch, shapes.saved, {}, nullptr, zeroing);
  trained.model().loss_forward(dry, shapes.losses, shapes.batch, shapes.saved);
  SummaryAccumulator(trained.model()).add(dry, shapes.batch, shapes.saved);
  Arena activations("activations", measure.high_water(), trained.device()),
      host("host", measure_host.high_water());
  Context ctx(std::max<int64_t>(dry.scratch.high_water(), 64), trained.device());
  ForwardBuffers buffers = make_forward_buffers(trained, activations, host, tokens, Recompute::none);

  const auto result = evaluator.run(
      ctx, trained.model(), buffers, buffers, [] { return false; }, zeroing);
  const int64_t trained_tokens = checkpoint.step * tokens_per_step(config);
  if (options.json) {
    nlohmann::ordered_json line = to_json(checkpoint.step, trained_tokens, *result);
    if (zeroing) line["zero_first_value"] = options.zeroed;
    if (zeroing && zeroing->sinks_above) line["sink_threshold"] = *zeroing->sinks_above;
    fmt::print("{}\n", line.dump());
    return;
  }
  fmt::print("{}  step {}{}\n\n", checkpoint.path, checkpoint.step,
             !zeroing ? ""
             : zeroing->sinks_above
                 ? fmt::format("  first values zeroed for heads above {:.2f}", *zeroing->sinks_above)
                 : "  first values zeroed");
  fmt::print("{:<24}{:>10}{:>12}{:>12}{:>12}\n", "set", "loss", "perplexity", "bits/byte", "tokens");
  for (const SetResult& set : result->sets)
    fmt::print("{:<24}{:>10}{:>12}{:>12}{:>12}{}\n", set.name, figure(set.loss, 4), figure(set.perplexity, 3),
               figure(set.bits_per_byte, 4), set.tokens, set.loss_of_text.describe("  "));
  const ModelSummary& a = result->analysis;
  fmt::print("\n{:<8}{:>14}{:>14}{:>34}{:>34}\n", "layer", "first token", "gate score",
             "attention max: output, residual", "FFN max: output, residual");
  for (size_t i = 0; i < a.layers.size(); ++i) {
    const LayerSummary& layer = a.layers[i];
    std::string gates = layer.gate_scores.empty() ? "-" : "";
    for (const double score : layer.gate_scores)
      gates += fmt::format("{}{:.3f}", gates.empty() ? "" : " ", score);
    fmt::print("{:<8}{:>13.1f}%{:>14}{:>22.2f}{:>12.2f}{:>22.2f}{:>12.2f}\n", i,
               100 * layer.first_token_attention, gates, layer.attention_output_max,
               layer.attention_residual_max, layer.ffn_output_max, layer.ffn_residual_max);
  }
  fmt::print("{:<8}{:>13.1f}%{:>14}   largest residual {:.2f}\n", "all", 100 * a.first_token_attention,
             a.mean_gate_score ? fmt::format("{:.3f}", *a.mean_gate_score) : "-", a.largest_residual);
}

}  // namespace

void add_eval_command(Command& app, int&) {
  Command* command = app.add_subcommand(
      "eval", "loss, perplexity and bits per byte on the validation sets, and a summary of attention");
  auto options = std::make_shared<EvalOptions>();
  command->add_option("model", options->path, "run folder (its newest valid checkpoint) or checkpoint")
      ->required()
      ->type_name("RUN|CKPT");
  add_set_options(*command, options->sets, options->data);
  command->add_option("--max-tokens", options->max_tokens, "tokens per set; 0: all")->not_negative();
  command->add_option("--device", options->device, "auto, cpu or cuda; overrides the run's train.device")
      ->type_name("DEVICE");
  add_tokenizer_option(*command, options->tokenizer);
  command
      ->add_option("--zero-first-value", options->zeroed,
                   "zero the value of every sequence's first token for: none, all heads, or sinks (heads "
                   "whose mean attention on it over a micro-batch exceeds --sink-threshold)")
      ->type_name("HEADS")
      ->one_of({"none", "all", "sinks"});
  command->add_option("--sink-threshold", options->sink_threshold, "0.75 if not given")
      ->type_name("SHARE")
      ->between(0.0, 1.0);
  command->add_flag("--json", options->json, "print one line of JSON, as in eval.jsonl");
  command->footer(
      "Examples:\n"
      "  sluice eval runs/gated\n"
      "  sluice eval runs/gated/ckpt/step_00001000 --data news=data/news --json\n");
  command->callback([options] { evaluate(*options); });
}

}  // namespace sluice
