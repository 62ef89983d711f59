// sluice checkpoint: lists, verifies, compares, prunes and exports checkpoints.
#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>

#include <cstdio>
#include <memory>

#include "checkpoint/compare.h"
#include "checkpoint/manifest.h"
#include "checkpoint/rotation.h"
#include "checkpoint/store.h"
#include "checkpoint/stored_tensors.h"
#include "commands.h"
#include "core/io.h"
#include "eval/portable.h"
#include "eval/trained_model.h"
#include "hf/export.h"
#include "hf/merge_adapters.h"
#include "validation_sets.h"

namespace sluice {
namespace {

struct CheckpointOptions {
  std::string path, other, output, tokenizer;
  int64_t keep_last = 0, keep_every = 0;
  bool all = false;
};

/// The folder of a run's checkpoints.
std::string checkpoint_folder(const std::string& run) {
  if (!io::is_directory(run)) fail(ExitCode::no_input, "no such run: {}", run);
  return io::is_directory(run + "/ckpt") ? run + "/ckpt" : run;
}

/// The checkpoint at a path, or all checkpoints of a run. Throws if there is none.
std::vector<std::string> checkpoints_of(const std::string& path) {
  if (!io::is_directory(path)) fail(ExitCode::no_input, "no such run or checkpoint: {}", path);
  if (io::exists(path + "/" + kManifestName)) return {path};
  const std::vector<std::string> all = list_checkpoints(checkpoint_folder(path));
  if (all.empty()) fail(ExitCode::no_input, "{} contains no checkpoint", path);
  return all;
}

std::string size_text(int64_t bytes) {
  if (bytes < (1 << 10)) return fmt::format("{} B", bytes);
  if (bytes < (1 << 20)) return fmt::format("{:.1f} KiB", static_cast<double>(bytes) / (1 << 10));
  if (bytes < (1 << 30)) return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
  return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / (1 << 30));
}

int64_t total_bytes(const Manifest& manifest) {
  int64_t bytes = 0;
  for (const FileRecord& f : manifest.files) bytes += f.bytes;
  return bytes;
}

void list(const CheckpointOptions& options) {
  for (const std::string& path : checkpoints_of(options.path)) {
    try {
      const Manifest manifest = read_manifest(path);
      fmt::print("step {:>10}  {:>10}  {}\n", manifest.step, size_text(total_bytes(manifest)), path);
    } catch (const Error& error) {
      fmt::print("damaged                      {}: {}\n", path, error.what());
    }
  }
}

void info(const CheckpointOptions& options) {
  const CheckpointInfo checkpoint = find_checkpoint(options.path);
  const Manifest manifest = read_manifest(checkpoint.path);
  int64_t parameters = 0;
  const StoredTensors model(checkpoint.path, manifest, kWeightsKind, StoredTensors::Check::size);
  for (const auto& [name, tensor] : model.tensors()) parameters += tensor.elements();
  fmt::print("checkpoint   {}\nstep         {}\nwritten by   sluice {}\nconfig       {}\nparameters   {}\n",
             checkpoint.path, manifest.step, manifest.build, manifest.config_hash, parameters);
  for (const FileRecord& f : manifest.files)
    fmt::print("{:<12} {:>10}  xxh3-128 {}  {}\n", "file", size_text(f.bytes), f.xxh3_128, f.name);
  fmt::print("state        {}\n", checkpoint.state.dump());
  if (!options.all) return;
  for (const TensorRecord& t : manifest.tensors)
    fmt::print("tensor       {} ({}) {}  {}{}\n", t.name, fmt::join(t.shape, ", "), t.dtype, t.file,
               t.is_slice() ? fmt::format("  elements [{}, {})", t.begin, t.end) : "");
}

int verify(const CheckpointOptions& options) {
  bool whole = true;
  for (const std::string& path : checkpoints_of(options.path)) {
    try {
      const CheckpointInfo checkpoint = verify_checkpoint(path);
      fmt::print("whole    {}  step {}\n", path, checkpoint.step);
    } catch (const Error& error) {
      whole = false;
      fmt::print("damaged  {}\n", error.what());
    }
  }
  return static_cast<int>(whole ? ExitCode::ok : ExitCode::data);
}

std::string resolve(const std::string& path) {
  // A file, or a folder of weights from another program, is used directly.
  if (!io::is_directory(path) || holds_model(path)) return path;
  return find_checkpoint(path).path;
}

int diff(const CheckpointOptions& options) {
  const std::string a = resolve(options.path), b = resolve(options.other);
  const Comparison comparison = compare_checkpoints(a, b);
  if (comparison.differences.empty()) {
    fmt::print("equal bit for bit: {} tensors, {} elements\n", comparison.tensors, comparison.elements);
    return 0;
  }
  const size_t shown = options.all ? comparison.differences.size() : 1;
  for (size_t i = 0; i < shown; ++i) {
    const TensorDifference& d = comparison.differences[i];
    fmt::print("{}: ", d.name);
    if (!d.problem.empty()) {
      fmt::print("{}\n", d.problem);
    } else {
      fmt::print(
          "{} of {} elements differ, the first is [{}]: {:.9g} and {:.9g}; largest difference {:.3g}\n",
          d.differing, d.elements, d.first, d.value_a, d.value_b, d.largest);
    }
  }
  fmt::print("{} tensors differ of {} compared, {} elements of {}{}\n", comparison.differences.size(),
             comparison.tensors, comparison.differing_elements(), comparison.elements,
             options.all || comparison.differences.size() == 1 ? "" : " (--all lists each)");
  return 1;
}

void prune(const CheckpointOptions& options) {
  const std::vector<std::string> removed =
      prune_checkpoints(checkpoint_folder(options.path), options.keep_last, options.keep_every);
  for (const std::string& path : removed) fmt::print("removed  {}\n", path);
  if (removed.empty()) fmt::print("nothing to remove\n");
}

/// Writes weights, config.json and tokenizer in Hugging Face's layout.
void export_weights(const CheckpointOptions& options) {
  const CheckpointInfo checkpoint = find_checkpoint(options.path);
  const std::vector<std::string> names = export_checkpoint(checkpoint, options.output, options.tokenizer);
  fmt::print("step {} -> {}/{}\n", checkpoint.step, options.output, fmt::join(names, ", "));
}

void merge(const CheckpointOptions& options) {
  const CheckpointInfo checkpoint = find_checkpoint(options.path);
  const int64_t matrices = merge_adapters(checkpoint, options.output, options.tokenizer);
  fmt::print("step {} -> {}: adapters of {} matrices merged\n", checkpoint.step, options.output, matrices);
}

}  // namespace

void add_checkpoint_command(Command& app, int& exit_code) {
  Command* command = app.add_subcommand("checkpoint", "list, verify, compare, prune and export checkpoints");
  command->require_subcommand(1);
  const auto options = std::make_shared<CheckpointOptions>();

  Command* sub = command->add_subcommand("list", "the checkpoints of a run, newest first");
  sub->add_option("run", options->path, "run folder")->required()->type_name("RUN");
  sub->callback([options] { list(*options); });

  sub = command->add_subcommand("info", "the contents of one checkpoint");
  sub->add_option("checkpoint", options->path, "checkpoint, or run folder (its newest valid checkpoint)")
      ->required()
      ->type_name("CKPT");
  sub->add_flag("--all", options->all, "also list every tensor");
  sub->callback([options] { info(*options); });

  sub = command->add_subcommand("verify", "check every byte against the manifest; exit code 65 if damaged");
  sub->add_option("path", options->path, "run folder (all its checkpoints) or checkpoint")
      ->required()
      ->type_name("RUN|CKPT");
  sub->callback([options, &exit_code] { exit_code = verify(*options); });

  sub = command->add_subcommand(
      "diff",
      "the first tensor that differs, and the extent of all differences; exit code 1 if there are any");
  sub->add_option("a", options->path, "checkpoint, run folder, or .safetensors file")
      ->required()
      ->type_name("A");
  sub->add_option("b", options->other, "the same")->required()->type_name("B");
  sub->add_flag("--all", options->all, "list every tensor that differs");
  sub->callback([options, &exit_code] { exit_code = diff(*options); });

  sub = command->add_subcommand("prune", "remove old checkpoints; damaged ones do not count as kept");
  sub->add_option("run", options->path, "run folder")->required()->type_name("RUN");
  sub->add_option("--keep-last", options->keep_last, "number of valid checkpoints to keep")
      ->required()
      ->between(1, 1'000'000)
      ->type_name("K");
  sub->add_option("--keep-every", options->keep_every, "also keep checkpoints at multiples of N steps")
      ->not_negative()
      ->type_name("N");
  sub->callback([options] { prune(*options); });

  sub = command->add_subcommand(
      "export", "export only weights, config.json and the tokenizer's file, for other programs");
  sub->add_option("checkpoint", options->path, "checkpoint, or run folder (its newest valid checkpoint)")
      ->required()
      ->type_name("CKPT");
  sub->add_option("-o,--output", options->output, "output folder; existing files are not replaced")
      ->required()
      ->type_name("DIR");
  add_tokenizer_option(*sub, options->tokenizer);
  sub->callback([options] { export_weights(*options); });

  sub = command->add_subcommand(
      "merge",
      "export weights with merged adapters (lora), config.json and the tokenizer's file, for other programs");
  sub->add_option("checkpoint", options->path, "checkpoint, or run folder (its newest valid checkpoint)")
      ->required()
      ->type_name("CKPT");
  sub->add_option("-o,--output", options->output, "output folder; existing files are not replaced")
      ->required()
      ->type_name("DIR");
  add_tokenizer_option(*sub, options->tokenizer);
  sub->callback([options] { merge(*options); });

  add_diff_bits_command(*command, exit_code);
  command->footer(
      "Examples:\n"
      "  sluice checkpoint verify runs/gated\n"
      "  sluice checkpoint diff runs/a/ckpt/step_00001000 runs/b/ckpt/step_00001000\n");
}

}  // namespace sluice
