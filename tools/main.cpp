// The program `sluice`. Every failure is reported here, once, and gives a documented exit code
// (core/error.h).
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "commands.h"
#include "config/yaml.h"
#include "core/build_info.h"
#include "core/caught.h"
#include "process.h"
#include "run/program_facts.h"

namespace {

constexpr const char* kHelp =
    "sluice {} - pretraining of transformers in which attention and its gates are the object of study\n"
    "\n"
    "  sluice train CONFIG [key=value...]    train, or resume\n"
    "  sluice plan CONFIG [key=value...]     parameters, FLOPs, memory\n"
    "  sluice config SUBCOMMAND              reference, show, diff\n"
    "  sluice eval RUN|CKPT|FOLDER           loss, perplexity, bits per byte, summary of attention\n"
    "  sluice analyze RUN|CKPT|FOLDER -o DIR attention, gates, heads, activations: JSON and NumPy arrays\n"
    "  sluice generate RUN|CKPT|FOLDER -p T  continue a text\n"
    "  sluice ruler RUN|CKPT --lengths 1k,4k RULER's long-context tasks\n"
    "  sluice tokenize INPUT... -o PREFIX    text to token files\n"
    "  sluice tokenizer SUBCOMMAND           train a BPE tokenizer, encode, decode\n"
    "  sluice synthesize TASK -o PREFIX      token files of synthetic tasks with a known best loss\n"
    "  sluice export RUN|CKPT -o FOLDER      a Hugging Face folder\n"
    "  sluice import FOLDER -o CONFIG        a configuration from a Hugging Face folder\n"
    "  sluice checkpoint SUBCOMMAND          list, verify, compare checkpoints\n"
    "  sluice serve RUN|CKPT                 HTTP server for completions, as OpenAI's; for lm-eval\n"
    "  sluice watch RUN...                   what runs are doing: a table that follows them\n"
    "  sluice bench                          speed of operations and of whole steps\n"
    "  sluice doctor                         features of this build and machine\n"
    "  sluice completion bash|zsh            shell script that completes commands and options\n"
    "  sluice --version                      version, commit, compiler, CUDA, MPI\n"
    "\n"
    "Each has its own help with examples:    sluice train --help (without a command: this text)\n"
    "Every configuration key is explained:   sluice config reference\n"
    "Exit codes: 0 ok, 1 a comparison found differences, 64 usage or configuration, 65 bad data, 66 missing\n"
    "input, 70 internal, 71 out of memory, 73 cannot create, 74 final save failed, 75 stopped by a signal "
    "and\n"
    "saved, 76 a rank hung or was lost, 78 too many bad steps, 79 memory changed, or ranks hold different "
    "bits\n";

int report(const std::string& message, sluice::ExitCode code) {
  // Pending warnings are printed first.
  std::fflush(stdout);
  // fmt::print would throw where standard error is full or its reader has gone; the exit code remains.
  const std::string line = fmt::format("error: {}\n", message);
  std::fwrite(line.data(), 1, line.size(), stderr);
  return static_cast<int>(code);
}

/// CLI11's message without class names, with a reference to the help.
/// first: the first argument.
std::string usage_message(const CLI::App& app, const CLI::ParseError& error, const std::string& first) {
  std::string command = "sluice";
  for (const CLI::App* at = &app; !at->get_subcommands().empty();) {
    at = at->get_subcommands()[0];
    command += " " + at->get_name();
  }
  std::string what = error.what();
  if (what.empty()) what = error.get_name();
  if (command == "sluice" && dynamic_cast<const CLI::ExtrasError*>(&error)) {
    what = first.starts_with("-")
               ? "unknown option" + what.substr(std::min(what.rfind(": ") + 1, what.size()))
               : "unknown command " + first;
    std::vector<std::string> names;
    for (const CLI::App* known : app.get_subcommands({})) names.push_back(known->get_name());
    if (const std::string near = sluice::yaml::nearest(first, names); !near.empty())
      what += "; did you mean " + near + "?";
  }
  return fmt::format("{} (see {} --help)", what, command);
}

/// The exit code of a command whose result is its output.
int finish(int exit_code) {
  const char* problem = "";
  if (sluice::flush_standard_output(&problem)) return exit_code;
  return report(std::string("cannot write to standard output: ") + problem, sluice::ExitCode::cannot_create);
}

void add_help(CLI::App& app) {
  for (CLI::App* command : app.get_subcommands({})) {
    command->set_help_flag("-h,--help", "this text");
    add_help(*command);
  }
}

}  // namespace

int main(int argc, char** argv) {
  sluice::open_standard_streams();
  sluice::settle_threads(argv);
  // A full quota and a closed pipe become errors of the call instead of killing the process.
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("sluice", std::make_shared<spdlog::sinks::stderr_color_sink_mt>()));
  spdlog::set_pattern("%^%l%$: %v");

  int exit_code = 0;
  CLI::App app{"", "sluice"};
  app.set_help_flag();
  bool help = false, version = false;
  app.add_flag("-h,--help", help);
  app.add_flag("--version", version);
  app.require_subcommand(0, 1);
  sluice::Command program(app);
  sluice::add_train_command(program, exit_code);
  sluice::add_plan_command(program, exit_code);
  sluice::add_config_command(program, exit_code);
  sluice::add_eval_command(program, exit_code);
  sluice::add_analyze_command(program, exit_code);
  sluice::add_generate_command(program, exit_code);
  sluice::add_ruler_command(program, exit_code);
  sluice::add_tokenize_command(program, exit_code);
  sluice::add_tokenizer_command(program, exit_code);
  sluice::add_serve_command(program, exit_code);
  sluice::add_watch_command(program, exit_code);
  sluice::add_synthesize_command(program, exit_code);
  sluice::add_export_command(program, exit_code);
  sluice::add_import_command(program, exit_code);
  sluice::add_checkpoint_command(program, exit_code);
  sluice::add_bench_command(program, exit_code);
  sluice::add_doctor_command(program, exit_code);
  sluice::add_completion_command(program);
  add_help(app);

  try {
    try {
      app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
      fmt::print("{}", app.help());
      return finish(0);
    }
    if (version) {
      fmt::print("{}", sluice::program_text());
    } else if (app.get_subcommands().empty()) {
      fmt::print(kHelp, sluice::build_info().version);
    }
    // The results of training are in its folder, so errors of the console are ignored.
    return app.got_subcommand("train") ? exit_code : finish(exit_code);
  } catch (const CLI::ParseError& error) {
    return report(usage_message(app, error, argc > 1 ? argv[1] : ""), sluice::ExitCode::usage);
  } catch (const std::exception& exception) {
    const auto* system = dynamic_cast<const std::system_error*>(&exception);
    // fmt::print throws if it cannot write. A reader that has closed the pipe of the results has enough.
    if (system && std::ferror(stdout) && system->code().value() == EPIPE) return 0;
    if (system && (std::ferror(stdout) || std::ferror(stderr)))
      return report(fmt::format("standard {}: {}", std::ferror(stdout) ? "output" : "error", system->what()),
                    sluice::ExitCode::cannot_create);
    const sluice::Error error = sluice::caught_error();
    return report(error.what(), error.code());
  }
}
