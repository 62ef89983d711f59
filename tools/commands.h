#pragma once
// The sub-commands of the program: one file each. A command registers itself; its callback sets exit_code or throws
// sluice::Error, which main prints once.
#include <CLI/CLI.hpp>

namespace sluice {

void add_train_command(CLI::App& app, int& exit_code);
void add_plan_command(CLI::App& app, int& exit_code);
void add_config_command(CLI::App& app, int& exit_code);
void add_eval_command(CLI::App& app, int& exit_code);
void add_generate_command(CLI::App& app, int& exit_code);
void add_tokenize_command(CLI::App& app, int& exit_code);
void add_checkpoint_command(CLI::App& app, int& exit_code);
void add_bench_command(CLI::App& app, int& exit_code);
void add_doctor_command(CLI::App& app, int& exit_code);

}  // namespace sluice
