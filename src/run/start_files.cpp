#include "run/start_files.h"

#include <spdlog/fmt/fmt.h>

#include <nlohmann/json.hpp>

#include "checkpoint/manifest.h"
#include "config/derived.h"
#include "config/fields.h"
#include "config/load.h"
#include "core/build_info.h"
#include "core/cpu_features.h"
#include "core/host.h"
#include "core/io.h"
#include "core/parallel_for.h"
#include "run/banner.h"
#include "run/program_facts.h"

namespace sluice {
namespace {

std::string text_if_there(const std::string& path) { return io::exists(path) ? io::read_file(path) : ""; }

/// Where the weights of step 0 were from, which a resumed run keeps from its first start; null for
/// train.seed.
nlohmann::ordered_json first_weights(const TrainingStart& start) {
  if (!start.init.path.empty()) return start.init.json();
  const std::string path = start.folder->file("run.json");
  if (!start.resumes() || !io::exists(path)) return nullptr;
  const auto first = nlohmann::ordered_json::parse(io::read_file(path), nullptr, false);
  return first.is_object() ? first.value("init_from", nlohmann::ordered_json()) : nullptr;
}

/// By set, the fingerprint of what evaluations read: losses on other text are not compared.
nlohmann::ordered_json validation_fingerprints(const Config& config, const Evaluator& evaluator) {
  auto out = nlohmann::ordered_json::object();
  for (size_t i = 0; i < evaluator.blends().size(); ++i)
    out[config.data.validation[i].name] = evaluator.blends()[i]->fingerprint();
  return out;
}

nlohmann::ordered_json run_json(const TrainingStart& start, const Trainer& trainer) {
  const Config& config = start.config;
  return {{"schema", 1},
          {"name", config.name},
          {"version", build_info().version},
          {"build", program_json()},
          {"parameters", start.plan.total},
          {"parameters_active", start.plan.active},
          {"parameters_non_embedding", start.plan.non_embedding},
          {"config_hash", config_hash(config)},
          {"max_steps", trainer.max_steps()},
          {"tokens_per_step", tokens_per_step(config)},
          {"precision", enum_name(config.train.precision)},
          {"ranks", trainer.ranks().size()},
          {"threads", num_threads()},
          {"instruction_set", isa_name(cpu_isa())},
          {"bf16_products", bf16_unit_name(bf16_unit())},
          {"device", device_text(trainer.context().device)},
          {"data_fingerprint", start.data->fingerprint()},
          {"validation_fingerprints", validation_fingerprints(config, *start.evaluator)},
          {"tokenizer_fingerprint", start.tokenizer->fingerprint()},
          {"started", utc_now()},
          {"init_from", first_weights(start)},
          {"changes", start.changes},
          {"resumed_from_step", trainer.next_step()}};
}

}  // namespace

void write_start_files(const RunOptions& options, const TrainingStart& start, const Trainer& trainer) {
  const RunFolder& folder = *start.folder;
  folder.write("config.yaml", fmt::format("# hash {}\n{}", config_hash(start.config), start.config_yaml));
  std::string input = fmt::format("# {}\n{}", options.config_path, io::read_file(options.config_path));
  for (const std::string& text : options.overrides) input += fmt::format("# on the command line: {}\n", text);
  folder.write("config.input.yaml", input);
  const std::string& model = start.tokenizer->model();
  if (!model.empty()) folder.write(tokenizer_file(model), model);
  folder.write("cmdline.txt", text_if_there(folder.file("cmdline.txt")) + options.command_line + "\n");
  folder.write("run.json", run_json(start, trainer).dump(2) + "\n");
}

void write_finished_status(const TrainingStart& start) {
  auto status =
      nlohmann::ordered_json::parse(text_if_there(start.folder->file("status.json")), nullptr, false);
  if (!status.is_object()) status = nlohmann::ordered_json::object();
  if (status.value("state", "") == "done") return;
  status.erase("loss");
  const int64_t step = start.resumed.step;
  status.update({{"state", "done"},
                 {"step", step},
                 {"max_steps", training_steps(start.config)},
                 {"tokens", step * tokens_per_step(start.config)},
                 {"seconds_left", 0.0},
                 {"saved_step", step}});
  start.folder->write_status(status);
}

}  // namespace sluice
