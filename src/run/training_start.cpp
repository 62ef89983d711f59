#include "run/training_start.h"

#include <spdlog/fmt/fmt.h>

#include "checkpoint/rotation.h"
#include "comm/reduce.h"
#include "config/idle_settings.h"
#include "config/load.h"
#include "config/problems.h"
#include "core/faults.h"
#include "core/io.h"
#include "data/token_check.h"
#include "eval/portable.h"
#include "plan/model_rules.h"
#include "run/limits_check.h"
#include "run/rank_threads.h"
#include "run/resume_check.h"
#include "run/start_facts.h"

namespace sluice {
namespace {

/// What a rank finds out, and finds wrong, before ranks do anything together.
void read_inputs(TrainingStart& start, KeyPlaces& places, StartFacts& facts, const RunOptions& options,
                 Communicator& ranks) {
  Config& config = start.config;
  state_program(facts);
  require_known_keys(options.allow_change);
  config =
      load_config(options.config_path, options.overrides, &places, {.ranks = ranks.size(), .training = true});
  start.idle = idle_settings(config, places, options.config_path);
  state_configuration(facts, config);
  facts.set("--fresh", options.fresh ? "given" : "not given");
  facts.set("--allow-change", fmt::format("{}", fmt::join(options.allow_change, " ")));
  state_device(facts, config);
  start.tokenizer = training_tokenizer(config);
  facts.set("the tokenizer", start.tokenizer->fingerprint(), ExitCode::data);
  with_places(places, [&] { resolve_model(config, *start.tokenizer); });
  require_model_rules(config, ranks.size(), places);
  state_configuration(facts, config);
  require_training_data(config);
  start.data = std::make_unique<Blend>(config.data.train, config);
  start.evaluator =
      std::make_unique<Evaluator>(config.data.validation, config, *start.tokenizer, config.eval.max_tokens);
  start.evaluator->also(read_tasks(config.eval.tasks), config, *start.tokenizer);
  if (ranks.rank() == 0) check_data(*start.data, start.evaluator->blends(), *start.tokenizer, config);
  if (ranks.size() > 1) state_data(facts, config, *start.data, *start.evaluator);
  start.data->fingerprint();  // files that cannot be read are an error of the start
  start.config_yaml = to_yaml(config);
}

/// The changes on the way to a checkpoint, and those that it is resumed with.
void keep_changes(TrainingStart& start, const std::vector<ConfigChange>& allowed) {
  const nlohmann::json& state = start.resumed.state;
  if (const auto before = state.find("changes"); before != state.end() && before->is_array())
    start.changes = *before;
  for (const ConfigChange& change : allowed)
    start.changes.push_back({{"step", start.resumed.step},
                             {"key", change.key},
                             {"before", change.before},
                             {"after", change.after}});
}

/// The checkpoint to go on from: of all ranks the same.
void find_checkpoint(TrainingStart& start, const std::string& checkpoints, const RunOptions& options,
                     Communicator& ranks) {
  const Config& config = start.config;
  agree_on_checkpoint(ranks, checkpoints, config.parallel.timeout_seconds);
  if (options.fresh && !list_checkpoints(checkpoints).empty())
    fail(ExitCode::usage,
         "--fresh: {} holds a training (newest checkpoint {}); remove the folder or choose another run_dir",
         config.run_dir, list_checkpoints(checkpoints).front());
  start.resumed = newest_valid_checkpoint(checkpoints, &ranks);
  if (start.resumes())
    keep_changes(start, check_resume(start.resumed, config, options.allow_change, *start.data,
                                     *start.tokenizer, ranks.rank() == 0));
}

}  // namespace

TrainingStart prepare_training(const RunOptions& options, Communicator& ranks) {
  TrainingStart start;
  KeyPlaces places;
  agree_on_start(ranks, [&](StartFacts& facts) { read_inputs(start, places, facts, options, ranks); });
  use_threads(start.config.train.threads, ranks);
  agree_on_threads(ranks, start.config);
  start.plan = make_plan(start.config, ranks.size(), places);
  const bool leads = ranks.rank() == 0;
  const std::string checkpoints = start.config.run_dir + "/ckpt";
  // A run that goes on has weights of its own.
  if (any_rank(ranks, leads && list_checkpoints(checkpoints).empty()))
    start.init = find_init_source(start.config, places, *start.tokenizer, &ranks);

  check_limits(start.plan, ranks);
  if (leads) start.folder = std::make_unique<RunFolder>(start.config.run_dir);
  faults::at("init", 0);
  ranks.barrier();  // no rank reads the folder before rank 0 holds its lock
  // Also of a training that is finished.
  if (leads && io::is_directory(checkpoints)) remove_litter(checkpoints);
  find_checkpoint(start, checkpoints, options, ranks);
  return start;
}

void resolve_model(Config& config, const Tokenizer& tokenizer) {
  if (config.model.vocab_size == 0) config.model.vocab_size = tokenizer.vocab_size();
  ProblemList problems;
  if (config.model.vocab_size < tokenizer.vocab_size())
    problems({"model.vocab_size"},
             fmt::format("model.vocab_size is {}, but the tokenizer has {} tokens (0 takes the tokenizer's)",
                         config.model.vocab_size, tokenizer.vocab_size()));
  // Ids that the configuration's own check could not judge where only the tokenizer says how many there are.
  const auto check_id = [&](const std::string& key, int64_t id) {
    if (id >= config.model.vocab_size)
      problems({key},
               fmt::format("{}: token {} is outside the vocabulary of {}", key, id, config.model.vocab_size));
  };
  if (config.data.begin_token) check_id("data.begin_token", *config.data.begin_token);
  for (size_t i = 0; i < config.analysis.query_classes.size(); ++i)
    for (const int64_t id : config.analysis.query_classes[i].tokens)
      check_id(fmt::format("analysis.query_classes[{}].tokens", i), id);
  problems.raise();
  resolve_parameter_match(config);
}

}  // namespace sluice
