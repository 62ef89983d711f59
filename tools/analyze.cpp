// sluice analyze: statistics of attention, gates and heads of a trained model.
#include "eval/analyze.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>

#include "comm/mesh.h"
#include "commands.h"
#include "core/io.h"
#include "model_inputs.h"
#include "ranks.h"
#include "run/rank_threads.h"
#include "validation_sets.h"

namespace sluice {
namespace {

struct Options {
  std::string path, folder, device, tokenizer;
  std::vector<std::string> overrides, sets, data;
  AnalyzeOptions analyze;
  bool force = false, quiet = false;
};

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
  for (const auto& set : a["sets"])
    if (const auto padded = set["padded_samples"].get<int64_t>(); padded > 0)
      fmt::print("{}: {} sample{} left out, since {} in padding\n", set["name"].get<std::string>(), padded,
                 padded == 1 ? "" : "s", padded == 1 ? "it ends" : "they end");
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
  const auto &sinks = a["total"]["sinks"], &strongest = sinks["strongest"];
  std::string classes;
  if (strongest.contains("by_class"))
    for (const auto& [name, value] : strongest["by_class"].items())
      classes += fmt::format(", {} on \"{}\"", cell(value, 0, 1, 100, "%"), name);
  fmt::print(
      "\nSink^{:g}: {} of heads and sequences, {} within {} tokens; strongest: layer {} head {}, {}{}\n",
      sinks["threshold"].get<double>(), cell(sinks["share"], 0, 1, 100, "%"),
      cell(sinks["share_leading"], 0, 1, 100, "%"), sinks["length"].get<int64_t>(),
      strongest["layer"].get<size_t>(), strongest["head"].get<size_t>(),
      cell(strongest["first_token_attention"], 0, 1, 100, "%"), classes);
}

void run(const Options& options, Communicator& ranks) {
  const bool leads = ranks.rank() == 0;
  if (!leads) spdlog::set_level(spdlog::level::err);  // warnings come from rank 0
  ModelInputs inputs;
  std::vector<DataSource> sets;
  agree_on_start(ranks, [&](StartFacts& facts) {
    facts.set("--tokens", std::to_string(options.analyze.tokens));
    inputs = read_model(facts, ranks, "analyze", options.path,
                        {options.overrides, options.device, options.tokenizer, ModelUse::analysis});
    sets = chosen_sets(options.data, options.sets, inputs.config);
    if (ranks.size() > 1) state_sets(facts, sets, inputs.config);
  });
  const auto& [files, config] = inputs;
  use_threads(config.train.threads, ranks);
  const std::string path = files.path;
  const int64_t step = std::max<int64_t>(files.step, 0), trained_tokens = files.tokens;
  const auto context = static_cast<int>(config.parallel.context);
  require_groups(ranks, fmt::format("parallel.context = {}", context), context);
  if (leads) prepare_folder(options);

  const Mesh mesh(ranks, {.context = context});
  const TrainedModel trained(std::move(inputs.files), config.data.seq_len / context,
                             context > 1 ? &mesh.context() : nullptr);
  AnalyzeOptions analyze_options = options.analyze;
  analyze_options.measures = config.analysis;
  Analysis analysis = analyze(trained, sets, config.data, analyze_options, mesh.data());
  if (!leads) return;
  analysis.checkpoint = path;
  analysis.step = step;
  analysis.trained_tokens = trained_tokens;
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
  add_model_argument(*command, options->path);
  command->add_option("-o,--output", options->folder, "folder for analysis.json and the arrays; new or empty")
      ->required()
      ->type_name("FOLDER");
  command
      ->add_option("overrides", options->overrides,
                   "keys of the configuration, such as data.seq_len, analysis.sink_threshold or "
                   "model.rope.scaling.type")
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
      "Under mpirun the ranks divide the samples; the result is bitwise equal. With parallel.context=N, N "
      "ranks\n"
      "share every sample, and so the memory of its activations; sums over tokens are rounded in another "
      "order.\n\n"
      "Examples:\n"
      "  sluice analyze runs/gated -o runs/gated/analysis\n"
      "  sluice analyze runs/gated/ckpt/step_00001000 -o a --set news --tokens 65536\n"
      "  mpirun -n 4 sluice analyze runs/gated -o a data.seq_len=32768 parallel.context=4\n");
  command->callback([options] { run_as_rank([&](Communicator& ranks) { run(*options, ranks); }); });
}

}  // namespace sluice
