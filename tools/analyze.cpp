// sluice analyze: statistics of attention, gates and heads of a trained model.
#include "eval/analyze.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <memory>

#include "commands.h"
#include "config/derived.h"
#include "config/load.h"
#include "core/cores.h"
#include "core/io.h"
#include "ranks.h"
#include "validation_sets.h"

namespace sluice {
namespace {

struct Options {
  std::string path, folder, device, tokenizer;
  std::vector<std::string> overrides, sets, data;
  AnalyzeOptions analyze;
  bool force = false, quiet = false;
};

/// Keys that may be overridden: they select the data. All others belong to the trained model.
void check_overrides(const std::vector<std::string>& overrides) {
  const std::vector<std::string> allowed = {"data.seq_len", "data.validation", "data.document_mask",
                                            "train.threads"};
  for (const std::string& text : overrides)
    if (std::find(allowed.begin(), allowed.end(), text.substr(0, text.find('='))) == allowed.end())
      fail(ExitCode::usage, "{}: the trained model cannot be changed; only {} may be overridden", text,
           fmt::join(allowed, ", "));
}

void prepare_folder(const Options& options) {
  if (io::exists(options.folder) && !io::is_directory(options.folder))
    fail(ExitCode::cannot_create, "-o {}: is a file", options.folder);
  io::make_directories(options.folder);
  if (!options.force && !io::list_directory(options.folder).empty())
    fail(ExitCode::cannot_create, "-o {}: is not empty; use --force to write into it anyway", options.folder);
}

/// `value` as a cell of `width` characters; "-" for what does not exist.
std::string cell(const nlohmann::ordered_json& value, int width, int digits, double scale = 1,
                 const char* unit = "") {
  if (!value.is_number()) return fmt::format("{:>{}}", "-", width);
  return fmt::format("{:>{}}", fmt::format("{:.{}f}{}", scale * value.get<double>(), digits, unit), width);
}

void print_table(const nlohmann::ordered_json& a) {
  fmt::print("{}  step {}  {} sequences, {} tokens\n\n", a["checkpoint"].get<std::string>(),
             a["step"].get<int64_t>(), a["sequences"].get<int64_t>(), a["tokens"].get<int64_t>());
  fmt::print("{:<6}{:>12}{:>12}{:>12}{:>17}{:>21}{:>21}{:>18}\n", "", "attention", "gate", "imbalance",
             "mean |attention|", "max |attention|", "max |FFN|", "||value||");
  fmt::print("{:<6}{:>12}{:>12}{:>12}{:>8}{:>9}{:>10}{:>11}{:>10}{:>11}{:>9}{:>9}\n", "layer", "on first",
             "score", "of heads", "before", "gated", "output", "residual", "output", "residual", "first",
             "rest");
  const auto line = [](const std::string& name, const nlohmann::ordered_json& l,
                       const nlohmann::ordered_json& gate) {
    const auto &output = l["attention_output"], &max = l["max"];
    fmt::print("{:<6}{}{}{}{}{}{}{}{}{}{}{}\n", name, cell(l["first_token_attention"], 12, 1, 100, "%"),
               cell(gate, 12, 3), cell(l["imbalance"], 12, 3), cell(output["mean_abs_before"], 8, 3),
               cell(output["mean_abs_after"], 9, 3), cell(max["attention_output"], 10, 2),
               cell(max["attention_residual"], 11, 2), cell(max["ffn_output"], 10, 2),
               cell(max["ffn_residual"], 11, 2), cell(l["value_norm_first"], 9, 2),
               cell(l["value_norm_rest"], 9, 2));
  };
  for (size_t i = 0; i < a["layers"].size(); ++i) {
    const auto& layer = a["layers"][i];
    double scores = 0;
    for (const auto& gate : layer["gates"]) scores += gate["mean"].get<double>();
    line(fmt::format("{}", i), layer,
         layer["gates"].empty()
             ? nullptr
             : nlohmann::ordered_json(scores / static_cast<double>(layer["gates"].size())));
  }
  line("all", a["total"], a["total"]["mean_gate_score"]);
}

void run(const Options& options, Communicator& ranks) {
  const bool leads = ranks.rank() == 0;
  check_overrides(options.overrides);
  const CheckpointInfo checkpoint = find_checkpoint(options.path);
  std::vector<std::string> overrides = options.overrides;
  if (!options.device.empty()) overrides.push_back("train.device=" + options.device);
  const Config config = load_resolved_config(checkpoint.path + "/config.yaml", overrides);
  const std::vector<DataSource> sets = chosen_sets(options.data, options.sets, config);
  use_threads(config.train.threads);
  if (leads) prepare_folder(options);

  const TrainedModel trained(checkpoint, config.data.seq_len, options.device, options.tokenizer);
  Analysis analysis = analyze(trained, sets, config.data, options.analyze, ranks);
  if (!leads) return;
  analysis.checkpoint = checkpoint.path;
  analysis.step = checkpoint.step;
  analysis.trained_tokens = checkpoint.step * tokens_per_step(config);
  write_analysis(options.folder, analysis);
  if (options.quiet) return;
  print_table(to_json(analysis));
  fmt::print("\n{}/analysis.json\n", options.folder);
}

}  // namespace

void add_analyze_command(Command& app, int&) {
  Command* command = app.add_subcommand(
      "analyze",
      "statistics of attention, gates and heads on the validation sets, as JSON tables and NumPy arrays");
  auto options = std::make_shared<Options>();
  command->add_option("model", options->path, "run folder (its newest valid checkpoint) or checkpoint")
      ->required()
      ->type_name("RUN|CKPT");
  command->add_option("-o,--output", options->folder, "folder for analysis.json and the arrays; new or empty")
      ->required()
      ->type_name("FOLDER");
  command
      ->add_option("overrides", options->overrides,
                   "data.seq_len, data.validation, data.document_mask or train.threads")
      ->type_name("key=value");
  add_set_options(*command, options->sets, options->data);
  command
      ->add_option("--tokens", options->analyze.tokens,
                   "tokens per set, rounded up to whole samples (16384); 0: all")
      ->not_negative();
  command
      ->add_option("--sequences", options->analyze.map_sequences,
                   "number of sequences in attention maps and planes (8)")
      ->between(1, 1e6);
  command
      ->add_option("--map-tokens", options->analyze.map_tokens,
                   "number of first tokens of each of these sequences (64)")
      ->between(1, 4096);
  command->add_option("--device", options->device, "auto, cpu or cuda; overrides the run's train.device")
      ->type_name("DEVICE");
  add_tokenizer_option(*command, options->tokenizer);
  command->add_flag("--force", options->force, "write into a folder that is not empty");
  command->add_flag("--quiet", options->quiet, "no table");
  command->footer(
      "Under mpirun the ranks divide the samples; the result is bitwise equal.\n\n"
      "Examples:\n"
      "  sluice analyze runs/gated -o runs/gated/analysis\n"
      "  sluice analyze runs/gated/ckpt/step_00001000 -o a --set news --tokens 65536\n");
  command->callback([options] { run_as_rank([&](Communicator& ranks) { run(*options, ranks); }); });
}

}  // namespace sluice
