// sluice export: a checkpoint as a Hugging Face folder.
#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>

#include <memory>

#include "commands.h"
#include "config/fields.h"
#include "eval/trained_model.h"
#include "hf/export_model.h"
#include "validation_sets.h"

namespace sluice {
namespace {

struct Options {
  std::string path, output, tokenizer, format = "auto", dtype;
};

void export_folder(const Options& options) {
  const CheckpointInfo checkpoint = find_checkpoint(options.path);
  ExportOptions how;
  if (options.format != "auto") how.format = enum_from_name<HfFormat>(options.format);
  how.dtype = options.dtype == "bf16" ? "BF16" : options.dtype == "f32" ? "F32" : "";
  how.tokenizer = options.tokenizer;
  const Exported result = export_model(checkpoint, options.output, how);
  for (const std::string& warning : result.warnings) spdlog::warn("{}", warning);
  fmt::print("step {} -> {} ({}): {}\n", checkpoint.step, options.output, enum_name(result.format),
             fmt::join(result.files, ", "));
}

}  // namespace

void add_export_command(Command& app, int&) {
  Command* command = app.add_subcommand("export", "a checkpoint as a Hugging Face folder");
  auto options = std::make_shared<Options>();
  command->add_option("checkpoint", options->path, "run folder (its newest valid checkpoint) or checkpoint")
      ->required()
      ->type_name("RUN|CKPT");
  command->add_option("-o,--output", options->output, "output folder; existing files are not replaced")
      ->required()
      ->type_name("FOLDER");
  std::vector<std::string> formats = {"auto"};
  for (const std::string_view name : EnumNames<HfFormat>::names) formats.emplace_back(name);
  command
      ->add_option(
          "--format", options->format,
          "auto: the first of qwen3, llama, qwen3_moe, qwen3_next, gpt_oss that holds the model exactly, "
          "otherwise sluice, whose code goes along (trust_remote_code); gated_attention: that of "
          "qiuzh20/gated_attention")
      ->type_name("FORMAT")
      ->one_of(formats);
  command->add_option("--dtype", options->dtype, "bf16 or f32; default: as the checkpoint stores them")
      ->type_name("TYPE")
      ->one_of({"bf16", "f32"});
  add_tokenizer_option(*command, options->tokenizer);
  command->footer(
      "A format that cannot hold the model is refused, with every reason.\n\n"
      "Examples:\n"
      "  sluice export runs/gated -o gated --dtype bf16\n"
      "  sluice export runs/gated/ckpt/step_00001000 -o next --format qwen3_next\n");
  command->callback([options] { export_folder(*options); });
}

}  // namespace sluice
