// sluice import: a configuration from a Hugging Face folder.
#include "hf/import.h"

#include <spdlog/fmt/fmt.h>

#include <memory>

#include "commands.h"
#include "core/io.h"
#include "hf/open.h"
#include "outputs.h"

namespace sluice {
namespace {

struct ImportOptions {
  std::string folder, output;
  bool force = false;
};

void import_model(const ImportOptions& options) {
  if (!io::is_directory(options.folder)) fail(ExitCode::no_input, "there is no folder {}", options.folder);
  if (!is_hf_folder(options.folder))
    fail(ExitCode::no_input,
         "{} is not a Hugging Face folder: it needs config.json and model.safetensors, or shards with "
         "model.safetensors.index.json",
         options.folder);
  std::vector<std::string> inputs;  // what the model is made of, and not a configuration made of it
  for (const std::string& name : io::list_directory(options.folder))
    if (!name.ends_with(".yaml") && !name.ends_with(".yml")) inputs.push_back(options.folder + "/" + name);
  if (!options.output.empty()) refuse_inputs(options.output, inputs, "choose another file");
  if (!options.output.empty() && !options.force && io::exists(options.output))
    fail(ExitCode::cannot_create, "{} exists; use --force to replace it", options.output);
  const Import result = import_folder(options.folder);
  if (options.output.empty()) {
    fmt::print("{}", result.yaml);
    for (const std::string& line : result.report) fmt::print(stderr, "{}\n", line);
    return;
  }
  io::write_file_atomic(options.output, result.yaml);
  for (const std::string& line : result.report) fmt::print("{}\n", line);
  fmt::print("written      {}\n", options.output);
}

}  // namespace

void add_import_command(Command& app, int&) {
  Command* command =
      app.add_subcommand("import", "a configuration that continues from a Hugging Face folder");
  auto options = std::make_shared<ImportOptions>();
  command->add_option("folder", options->folder, "folder with config.json and safetensors")
      ->required()
      ->type_name("FOLDER");
  command
      ->add_option("-o,--output", options->output,
                   "configuration file to write; without it, it is printed and the report goes to the "
                   "standard error")
      ->type_name("FILE");
  command->add_flag("--force", options->force, "replace an existing file");
  command->footer(
      "Llama, Mistral, Qwen3, Qwen3-MoE, gpt-oss, Qwen3-Next (full attention), qiuzh20/gated_attention,\n"
      "and exports of Sluice. The report names everything that has no counterpart.\n\n"
      "Examples:\n"
      "  sluice import Qwen3-0.6B -o qwen3.yaml\n"
      "  sluice train qwen3.yaml 'model.attention.gates=[{activation: two_sigmoid, init: zero}]' \\\n"
      "    train.init_missing=fresh data.train=[...]\n");
  command->callback([options] { import_model(*options); });
}

}  // namespace sluice
