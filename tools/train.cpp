// sluice train: train, or resume.
#include <memory>
#include <optional>

#include "commands.h"
#include "ranks.h"
#include "run/run.h"

namespace sluice {
namespace {

/// How long ranks wait for each other before training starts. Problems of the configuration are reported
/// after that.
double start_limit(const RunOptions& options) {
  try {
    return load_config(options.config_path, options.overrides).parallel.timeout_seconds;
  } catch (const Error&) {
    return ParallelConfig().timeout_seconds;
  }
}

}  // namespace

void add_train_command(Command& app, int& exit_code) {
  Command* command =
      app.add_subcommand("train", "train, or resume from the newest valid checkpoint of the run folder");
  auto options = std::make_shared<RunOptions>();
  auto run_dir = std::make_shared<std::string>();
  command->add_option("config", options->config_path, "configuration file")->required()->type_name("CONFIG");
  command->add_option("overrides", options->overrides, "override of a configuration key")
      ->type_name("key=value");
  command->add_option("--run-dir", *run_dir, "run folder (same as run_dir=)")->type_name("FOLDER");
  command->add_flag("--fresh", options->fresh,
                    "do not resume: an error if the folder already contains a run");
  command
      ->add_option("--allow-change", options->allow_change,
                   "key that may differ from the checkpoint's configuration (optimizer.lr, "
                   "train.max_steps...); repeatable")
      ->type_name("KEY")
      ->allow_extra_args(false);
  command->footer(
      "SIGUSR1, SIGUSR2, SIGTERM, SIGHUP, SIGXCPU and Ctrl-C finish the step, save and exit with 75; the "
      "same command goes "
      "on.\n\n"
      "Examples:\n"
      "  sluice train configs/quickstart/gated.yaml\n"
      "  sluice train configs/quickstart/gated.yaml optimizer.lr=2e-3 run_dir=runs/lr2e-3\n");
  command->callback([options, run_dir, &app, &exit_code] {
    if (!run_dir->empty()) {
      const std::string override = "run_dir=" + *run_dir;
      for (const std::string& text : options->overrides)
        if (text.starts_with("run_dir=") && text != override)
          fail(ExitCode::usage, "--run-dir {} and {}: two run folders; leave one of them out", *run_dir,
               text);
      options->overrides.push_back(override);
    }
    options->command_line = app.program() + " train " + options->config_path;
    for (const std::string& text : options->overrides) options->command_line += " '" + text + "'";
    for (const std::string& key : options->allow_change) options->command_line += " --allow-change " + key;
    std::optional<StopSignals> signals(std::in_place);  // before the world is created, which takes a while
    options->signals = &*signals;
    run_as_rank(
        [&](Communicator& world) {
          options->ranks = &world;
          exit_code = static_cast<int>(run_training(*options));
        },
        start_limit(*options),
        /*before_abort=*/[&] { signals.reset(); });  // later signals end the process immediately
  });
}

}  // namespace sluice
