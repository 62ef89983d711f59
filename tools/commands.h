#pragma once
// The sub-commands of `sluice`, one thin file each. A command registers itself and does its work in a
// callback if it is selected. Failures are thrown (core/error.h) and caught in main.
#include "command.h"

namespace sluice {

/// exit_code is what main returns if nothing was thrown; a command sets it only to return another code than
/// 0.
void add_train_command(Command& app, int& exit_code);
void add_plan_command(Command& app, int& exit_code);
void add_config_command(Command& app, int& exit_code);
void add_eval_command(Command& app, int& exit_code);
void add_analyze_command(Command& app, int& exit_code);
void add_generate_command(Command& app, int& exit_code);
void add_ruler_command(Command& app, int& exit_code);
void add_tokenize_command(Command& app, int& exit_code);
void add_serve_command(Command& app, int& exit_code);
void add_watch_command(Command& app, int& exit_code);
void add_tokenizer_command(Command& app, int& exit_code);
void add_synthesize_command(Command& app, int& exit_code);
void add_export_command(Command& app, int& exit_code);
void add_import_command(Command& app, int& exit_code);
void add_checkpoint_command(Command& app, int& exit_code);
/// A sub-command of `checkpoint`.
void add_diff_bits_command(Command& checkpoint, int& exit_code);
void add_bench_command(Command& app, int& exit_code);
void add_doctor_command(Command& app, int& exit_code);
/// Behind all others, whose names it completes.
void add_completion_command(Command& app);

}  // namespace sluice
