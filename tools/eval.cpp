// sluice eval: validation of a trained model.
#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "commands.h"
#include "config/derived.h"
#include "data/token_check.h"
#include "eval/evaluate.h"
#include "eval/token_records.h"
#include "eval/trained_model.h"
#include "eval_tasks.h"
#include "model_inputs.h"
#include "outputs.h"
#include "ranks.h"
#include "run/metrics.h"
#include "run/rank_threads.h"
#include "validation_sets.h"

namespace sluice {
namespace {

struct EvalOptions {
  std::string path, device, tokenizer;
  std::vector<std::string> overrides, sets, data;
  TokenRecordFiles records;
  int64_t max_tokens = 0;
  bool json = false, force = false;
  std::string zeroed = "none";
  double sink_threshold = -1;  // -1: not given
  EvalTasksOptions tasks;
};

/// Nothing for `none`.
std::optional<ValueZeroing> value_zeroing(const EvalOptions& options) {
  if (options.sink_threshold >= 0 && options.zeroed != "sinks")
    fail(ExitCode::usage, "--sink-threshold has no effect without --zero-first-value sinks");
  if (options.zeroed == "none") return std::nullopt;
  if (options.zeroed == "all") return ValueZeroing{};
  return ValueZeroing{options.sink_threshold >= 0 ? options.sink_threshold : 0.75};
}

/// A table of layers: the head with the most attention on the first token, and what tells that token apart.
void print_heads(const ModelSummary& a) {
  fmt::print("\n{:<8}{:>18}{:>25}{:>28}{:>37}\n", "layer", "strongest sink", "||value||: first, rest",
             "max residual: first, rest", "gate scores < 0.05, > 0.95; shut");
  const auto percent = [](double x) { return figure(100 * x, 1) + (std::isnan(x) ? "" : "%"); };
  for (size_t i = 0; i < a.layers.size(); ++i) {
    const LayerSummary& layer = a.layers[i];
    const auto& later = layer.heads.later;
    const auto strongest = std::max_element(later.begin(), later.end());
    const GateShares gates = shares_of(layer.gate_health);
    fmt::print("{:<8}{:>18}{:>14}{:>11}{:>17}{:>11}{:>20}{:>9}{:>8}\n", i,
               strongest == later.end()
                   ? "-"
                   : fmt::format("head {}: {}", strongest - later.begin(), percent(*strongest)),
               figure(layer.value_norm.first, 2), figure(layer.value_norm.rest, 2),
               figure(layer.residual_max.first, 2), figure(layer.residual_max.rest, 2), percent(gates.below),
               percent(gates.above), percent(gates.shut_heads));
  }
  for (size_t i = 0; i < a.layers.size(); ++i)
    if (const auto& x = a.layers[i].selection)
      fmt::print(
          "{:<8}selects {:.1f} keys: {} of dense attention, {} of its largest; 8 neighbours together {:.2f} "
          "times as many\n",
          i, x->keys, percent(x->mass), percent(x->top), x->union_ratio);
  fmt::print("Sink^{:g}: {} of heads and sequences, {} within {} tokens; strongest: layer {} head {}, {}\n",
             a.sink_threshold, percent(a.sinks.share), percent(a.sinks.leading_share), a.sink_length,
             a.sinks.layer, a.sinks.head, describe_strongest(a));
}

/// Tasks compute losses of their own, of texts of their own.
void refuse_beside_tasks(const EvalOptions& options) {
  const std::pair<const char*, bool> given[] = {{"--zero-first-value", options.zeroed != "none"},
                                                {"--sink-threshold", options.sink_threshold >= 0},
                                                {"--max-tokens", options.max_tokens > 0},
                                                {"--per-token", !options.records.losses.empty()},
                                                {"--logits", !options.records.logits.empty()},
                                                {"--set", !options.sets.empty()},
                                                {"--data", !options.data.empty()}};
  for (const auto& [option, is_given] : given)
    if (is_given) fail(ExitCode::usage, "{} has no effect on --tasks; leave one of them out", option);
}

/// Neither a file of the model nor the tokens of a set are lost to the arrays of single tokens.
void check_records(const EvalOptions& options, const std::vector<DataSource>& sets) {
  std::vector<std::string> inputs;
  for (const DataSource& set : sets)
    for (const char* ending : {"", ".bin", ".idx", ".json"}) inputs.push_back(set.path + ending);
  check_array_outputs({{"--per-token", options.records.losses}, {"--logits", options.records.logits}}, inputs,
                      options.force);
}

void evaluate(const EvalOptions& options, Communicator& ranks) {
  OpenOptions how{options.overrides, options.device, options.tokenizer, ModelUse::losses};
  if (!options.tasks.files.empty()) {
    refuse_beside_tasks(options);
    how.use = ModelUse::tasks;
    return evaluate_tasks(ranks, options.path, how, options.tasks, options.json);
  }
  for (const auto& [option, value] : {std::pair("--shots", options.tasks.task.shots),
                                      std::pair("--max-questions", options.tasks.task.max_questions)})
    if (value > 0) fail(ExitCode::usage, "{} has no effect without --tasks FILE", option);
  const std::optional<ValueZeroing> zeroed = value_zeroing(options);
  const ValueZeroing* const zeroing = zeroed ? &*zeroed : nullptr;
  if (ranks.rank() != 0) spdlog::set_level(spdlog::level::err);  // warnings come from rank 0
  ModelInputs inputs;
  std::vector<DataSource> sets;
  agree_on_start(ranks, [&](StartFacts& facts) {
    facts.set("--max-tokens", std::to_string(options.max_tokens));
    inputs = read_model(facts, ranks, "eval", options.path, how);
    sets = chosen_sets(options.data, options.sets, inputs.config);
    if (ranks.size() > 1) state_sets(facts, sets, inputs.config);
  });
  const Config config = inputs.config;
  use_threads(config.train.threads, ranks);
  const std::string path = inputs.files.path, step_text = inputs.files.step_text();
  const int64_t step = inputs.files.step, trained_tokens = inputs.files.tokens;
  const bool leads = ranks.rank() == 0;
  const bool records = !options.records.losses.empty() || !options.records.logits.empty();
  if (records && sets.size() > 1)
    fail(ExitCode::usage, "--per-token and --logits take one set; choose it with --set NAME");
  require_sharing(ranks, "eval", config);
  if (ranks.size() > 1 && (records || zeroing))
    fail(ExitCode::usage,
         "--per-token, --logits and --zero-first-value take whole samples; leave out parallel.context");
  check_records(options, sets);
  const int64_t tokens = tokens_per_micro_batch(config);
  const TrainedModel trained(std::move(inputs.files), tokens, ranks.size() > 1 ? &ranks : nullptr);
  const Evaluator evaluator(sets, config, trained.tokenizer(), options.max_tokens);
  for (const auto& set : evaluator.blends()) check_tokens(*set, trained.tokenizer(), config);

  if (records) write_token_records(trained, sets[0], options.max_tokens, options.records, zeroing);

  Context dry(0, trained.device());
  Arena measure("activations", 0, trained.device()), measure_host("host");
  ForwardBuffers shapes = make_forward_buffers(trained, measure, measure_host, tokens, Recompute::none);
  trained.model().forward(dry, shapes.batch, shapes.saved, {}, nullptr, zeroing);
  trained.model().loss_forward(dry, shapes.losses, shapes.batch, shapes.saved);
  SummaryAccumulator(trained.model(), trained.store(), config.analysis).add(dry, shapes.batch, shapes.saved);
  Arena activations("activations", measure.high_water(), trained.device()),
      host("host", measure_host.high_water());
  Context ctx(std::max<int64_t>(dry.scratch.high_water(), 64), trained.device());
  ForwardBuffers buffers = make_forward_buffers(trained, activations, host, tokens, Recompute::none);

  const auto result = evaluator.run(
      ctx, trained.model(), trained.store(), buffers, buffers, [] { return false; }, zeroing);
  if (!leads) return;
  if (options.json) {
    nlohmann::ordered_json line = to_json(std::max<int64_t>(step, 0), trained_tokens, *result);
    if (step < 0) line["step"] = line["tokens"] = nullptr;
    if (zeroing) line["zero_first_value"] = options.zeroed;
    if (zeroing && zeroing->sinks_above) line["sink_threshold"] = *zeroing->sinks_above;
    fmt::print("{}\n", line.dump());
    return;
  }
  fmt::print("{}{}{}\n\n", path, step_text,
             !zeroing ? ""
             : zeroing->sinks_above
                 ? fmt::format("  first values zeroed for heads above {:.2f}", *zeroing->sinks_above)
                 : "  first values zeroed");
  fmt::print("{:<24}{:>10}{:>12}{:>12}{:>12}\n", "set", "loss", "perplexity", "bits/byte", "tokens");
  for (const SetResult& set : result->sets) {
    fmt::print("{:<24}{:>10}{:>12}{:>12}{:>12}{}\n", set.name, figure(set.loss, 4), figure(set.perplexity, 3),
               figure(set.bits_per_byte, 4), set.tokens, set.loss_of_text.describe("  "));
    for (const ClassResult& c : set.classes)
      fmt::print("  after {:<16}{:>10}{:>12}{:>12}{:>12}\n", c.name, figure(c.loss, 4),
                 figure(std::exp(c.loss), 3), "", c.tokens);
    if (set.by_position.size() > 1)
      for (const PositionResult& octave : set.by_position)
        fmt::print("  {:<22}{:>10}{:>12}{:>12}{:>12}\n",
                   fmt::format("positions {} to {}", octave.from, octave.to), figure(octave.loss, 4),
                   figure(std::exp(octave.loss), 3), "", octave.tokens);
  }
  for (const RulerChoice& choice : result->ruler) fmt::print("{}\n", describe(choice));
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
  print_heads(a);
}

}  // namespace

void add_eval_command(Command& app, int&) {
  Command* command = app.add_subcommand(
      "eval", "loss, perplexity and bits per byte on the validation sets, and a summary of attention");
  auto options = std::make_shared<EvalOptions>();
  add_model_argument(*command, options->path);
  command
      ->add_option("overrides", options->overrides,
                   "keys of the configuration, such as data.seq_len or model.rope.scaling.type")
      ->type_name("key=value");
  add_set_options(*command, options->sets, options->data);
  command->add_option("--max-tokens", options->max_tokens, "tokens per set; 0: all")->not_negative();
  command->add_option("--device", options->device, "auto, cpu or cuda; overrides the run's train.device")
      ->type_name("DEVICE");
  add_tokenizer_option(*command, options->tokenizer);
  command
      ->add_option("--zero-first-value", options->zeroed,
                   "zero the value of every sequence's first token for: none, all heads, or sinks (in each "
                   "sequence, heads whose mean attention on it exceeds --sink-threshold)")
      ->type_name("HEADS")
      ->one_of({"none", "all", "sinks"});
  command->add_option("--sink-threshold", options->sink_threshold, "0.75 if not given")
      ->type_name("SHARE")
      ->between(0.0, 1.0);
  add_task_options(*command, options->tasks);
  command
      ->add_option("--per-token", options->records.losses,
                   "also write the loss of every token: (samples, seq_len) nats, NaN without a target")
      ->type_name("FILE.npy");
  command
      ->add_option("--logits", options->records.logits,
                   "also write all logits: (samples, seq_len, vocab_size)")
      ->type_name("FILE.npy");
  command->add_flag("--force", options->force, "replace existing files of --per-token and --logits");
  command->add_flag("--json", options->json, "print one line of JSON, as in eval.jsonl");
  command->footer(
      "With parallel.context=N, N ranks share every sample, on CPUs, and so the memory of its "
      "activations.\n\n"
      "Examples:\n"
      "  sluice eval runs/gated\n"
      "  sluice eval runs/gated --tasks hellaswag.jsonl arc_easy.jsonl --shots 5\n"
      "  sluice eval runs/gated/ckpt/step_00001000 --data news=data/news --json\n"
      "  sluice eval FOLDER --data long=data/books model.rope.scaling.type=yarn \\\n"
      "      model.rope.scaling.factor=4 data.seq_len=16384\n"
      "  mpirun -n 4 sluice eval runs/gated data.seq_len=32768 parallel.context=4\n"
      "  sluice eval runs/gated --set news --max-tokens 4096 --per-token losses.npy --logits logits.npy\n");
  command->callback([options] { run_as_rank([&](Communicator& ranks) { evaluate(*options, ranks); }); });
}

}  // namespace sluice
