#include "run/run.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <cmath>
#include <optional>

#include "checkpoint/state_hash.h"
#include "checkpoint/state_reader.h"
#include "comm/collective_errors.h"
#include "comm/reduce.h"
#include "config/derived.h"
#include "core/caught.h"
#include "core/faults.h"
#include "core/steady_clock.h"
#include "run/banner.h"
#include "run/console.h"
#include "run/data_plan.h"
#include "run/evaluation.h"
#include "run/failure_status.h"
#include "run/json_lines.h"
#include "run/run_log.h"
#include "run/saving.h"
#include "run/start_files.h"
#include "run/step_watch.h"
#include "run/stragglers.h"
#include "run/timed_products.h"
#include "run/training_start.h"
#include "run/watchdog.h"
#include "train/trainer.h"

namespace sluice {
namespace {

/// A training from its start to its end: what happens in which order. Rank 0 leads: it reports, writes the
/// run's files, and evaluates where that does not take all ranks; the others compute and save.
class Run {
 public:
  explicit Run(const RunOptions& options);
  ExitCode train();

 private:
  bool leads() const { return ranks_->rank() == 0; }
  bool any_rank(bool mine) const { return sluice::any_rank(*ranks_, mine); }
  bool last_step_done() const { return trainer_->next_step() >= trainer_->max_steps(); }

  // Before the first step.
  bool already_finished();
  void make_trainer();
  void start_watchdog();
  void watch();
  void introduce();

  // The loop.
  struct Due {
    bool stop, evaluate, save;
  };
  bool between_steps();
  Due agree_on_due();
  bool evaluation_due() const;
  void step();
  void log_bits();
  bool evaluate();
  void save(bool keep_all = false);
  void enter(const char* phase);

  // The end.
  ExitCode finish(double seconds);
  bool complete() const;
  std::string steps_done(double seconds) const;
  std::string keep_trained_steps(ExitCode code, bool shared);
  FailureStatus::Reached reached(int64_t step) const;
  [[noreturn]] void fail_run(const std::exception& exception);
  void write_status(const char* state,
                    const nlohmann::ordered_json& more = nlohmann::ordered_json::object()) const;

  RunOptions options_;
  std::unique_ptr<Communicator> alone_;
  Communicator* ranks_;
  std::unique_ptr<StopSignals> own_signals_;
  const StopSignals& signals_;
  const TrainingStart start_;

  std::unique_ptr<Console> console_;  // rank 0's
  std::unique_ptr<ConsoleWarnings> warnings_;
  TimedProducts products_;
  std::unique_ptr<Trainer> trainer_;
  FreshStart fresh_;             // of parameters that train.init_from lacks
  std::unique_ptr<RunLog> log_;  // rank 0's
  std::unique_ptr<Saving> saving_;
  std::atomic<const Saving*> watched_saving_{nullptr};  // the watchdog's thread may ask before there is one
  std::optional<FailureStatus> failure_status_;         // this and the next: with several ranks
  std::unique_ptr<Watchdog> watchdog_;

  StepWatch watch_;
  Stragglers stragglers_;
  StepMetrics last_;
  std::optional<double> loss_;  // of the last step that had one, over all resumptions
  double own_seconds_ = 0;      // of the last step, without waiting for other ranks
  double train_seconds_ = 0;    // over all resumptions
  double heartbeat_at_ = 0;     // when status.json was last written between steps
};

Run::Run(const RunOptions& options)
    : options_(options),
      alone_(options.ranks ? nullptr : make_local_communicator()),
      ranks_(options.ranks ? options.ranks : alone_.get()),
      own_signals_(options.signals ? nullptr : std::make_unique<StopSignals>()),
      signals_(options.signals ? *options.signals : *own_signals_),
      start_(prepare_training(options_, *ranks_)),
      watch_(start_.config),
      stragglers_(ranks_->size()) {}

ExitCode Run::train() {
  if (leads()) {
    console_ =
        std::make_unique<Console>(start_.config.log.console, Terminal::detect(start_.config.log.console));
    warnings_ = std::make_unique<ConsoleWarnings>(*console_);
  } else {
    spdlog::set_level(spdlog::level::err);  // warnings come from rank 0
  }
  if (already_finished()) return ExitCode::ok;
  if (ranks_->size() > 1) failure_status_.emplace(start_.config.run_dir, ranks_->rank());
  make_trainer();
  start_watchdog();
  if (leads()) {
    console_->log_to(start_.folder->file("console.log"));
    write_start_files(options_, start_, *trainer_);
    log_ = std::make_unique<RunLog>(start_.config, *trainer_, *start_.folder, *console_);
  }
  saving_ = std::make_unique<Saving>(start_, *trainer_, console_.get());
  watched_saving_ = saving_.get();
  introduce();
  if (leads()) start_.folder->keep();
  try {
    const double begun = steady_seconds();
    while (!between_steps()) step();
    return finish(steady_seconds() - begun);
  } catch (const std::exception& exception) {
    fail_run(exception);
  }
}

// ---- before the first step

/// All steps were done and evaluated before this start: there is nothing to do but to say so.
bool Run::already_finished() {
  const CheckpointInfo& resumed = start_.resumed;
  const auto evaluated = [&] {
    return start_.evaluator->empty() ||
           JsonLines(start_.folder->file("eval.jsonl"), resumed.step).last_step() >= resumed.step;
  };
  const int64_t steps = training_steps(start_.config);
  if (!any_rank(leads() && start_.resumes() && resumed.step >= steps && evaluated())) return false;
  if (!leads()) return true;
  start_.folder->keep();
  write_finished_status(start_);
  console_->line(fmt::format(
      "{} is finished: step {} of {}, {}. More: train.max_steps=N --allow-change train.max_steps, "
      "or another run_dir.",
      start_.folder->path(), resumed.step, steps, resumed.path));
  return true;
}

void Run::make_trainer() {
  // Products are timed while the training's memory is not taken yet.
  const MemoryPlan memory = Trainer::measure(start_.config, ranks_);
  products_ = choose_algorithms(start_.folder.get(), start_.config, memory.products, *ranks_);
  trainer_ = std::make_unique<Trainer>(start_.config, *start_.data, ranks_, memory);
  trainer_->context().algorithms = &products_.algorithms;
  ranks_ = &trainer_->ranks();  // in turn with what a step leaves under way
  if (!start_.resumes()) {
    fresh_ = trainer_->initialize(start_.init.path, start_.init.map);
    return;
  }
  trainer_->restore(start_.resumed);
  const StateReader state(start_.resumed.state, start_.resumed.path + "/state.json");
  if (state.has("seconds")) train_seconds_ = state.number("seconds", 0);
  if (state.has("loss")) loss_ = state.number("loss");
  watch_.restore(state);
}

void Run::start_watchdog() {
  if (ranks_->size() == 1 || start_.config.parallel.timeout_seconds <= 0) return;
  if (leads()) watch();
  ranks_->barrier();  // rank 0 has emptied the file
  if (!leads()) watch();
}

void Run::watch() {
  watchdog_ = std::make_unique<Watchdog>(*options_.ranks, start_.config.run_dir + "/heartbeat",
                                         start_.config.parallel.timeout_seconds,
                                         [this](const std::string& why, int64_t step) {
                                           failure_status_->write(why, ExitCode::hang, reached(step));
                                         });
  watchdog_->at("start", trainer_->next_step());
}

/// What the console shows before the first step.
void Run::introduce() {
  for (const std::string& problem :
       {trainer_->communication().queue_problem(), watchdog_ ? watchdog_->problem() : std::string()})
    if (const std::string text = first_problem(*ranks_, problem); !text.empty() && leads())
      spdlog::warn("{}", text);
  if (!leads()) return;
  for (const std::string& line :
       banner(start_.config, start_.plan, *trainer_, *start_.data, *start_.evaluator))
    console_->line(line);
  if (!products_.text.empty()) console_->line("matmul   " + products_.text);
  if (!start_.init.path.empty()) console_->line("weights  from " + start_.init.text());
  if (start_.init.begins_alike(start_.config, start_.data->fingerprint()))
    spdlog::warn(
        "train.init_from: the weights were trained on the same data with the same train.seed ({}), so that "
        "this "
        "training begins with the samples that they have already seen; another train.seed gives another "
        "order",
        start_.init.seed);
  if (!fresh_.missing.empty()) console_->line("fresh    " + fresh_.text());
  if (start_.resumes())
    console_->line(fmt::format("resume   from {} (step {})", start_.resumed.path, trainer_->next_step()));
  for (const std::string& text : start_.idle) spdlog::warn("{}", text);
  for (const std::string& text :
       data_warnings(*start_.data, trainer_->max_steps() * start_.config.train.global_batch_size))
    spdlog::warn("{}", text);
  write_status("running");
}

// ---- the loop

/// Checkpoint, evaluation, signals. True when the loop is over.
bool Run::between_steps() {
  // Before the ranks meet: a rank that fails alone in the next step replaces this status.
  if (leads() && steady_seconds() - heartbeat_at_ > 15) {
    heartbeat_at_ = steady_seconds();
    write_status("running");
  }
  const Due due = agree_on_due();
  if (due.save) save();  // first: an evaluation that fails, or is cut short, costs no step then
  if (due.stop || (due.evaluate && !evaluate()) || last_step_done()) return true;
  saving_->report();
  return false;
}

/// The one small message of all ranks between two steps: whether any was asked to stop, how long each has
/// computed, and what rank 0, which has the clock and the files, finds due.
Run::Due Run::agree_on_due() {
  struct Message {
    double stop, seconds, evaluate, save;
  };
  const Message mine{signals_.requested() ? 1.0 : 0.0, own_seconds_, leads() && evaluation_due() ? 1.0 : 0.0,
                     leads() && saving_->due(last_.skipped) ? 1.0 : 0.0};
  std::vector<Message> all(static_cast<size_t>(ranks_->size()));
  ranks_->all_gather(all.data(), &mine, sizeof mine);
  std::vector<double> seconds;
  bool stop = false;
  for (const Message& m : all) {
    stop |= m.stop > 0;
    seconds.push_back(m.seconds);
  }
  if (leads() && own_seconds_ > 0)
    for (const std::string& message : stragglers_.add(seconds)) spdlog::warn("{}", message);
  return {.stop = stop, .evaluate = all[0].evaluate > 0 && !stop, .save = all[0].save > 0 && !stop};
}

bool Run::evaluation_due() const {
  const int64_t step = trainer_->next_step(), every = start_.config.eval.every_steps;
  if (start_.evaluator->empty() || log_->last_evaluation() >= step) return false;
  return last_step_done() || (every > 0 && step > 0 && step % every == 0);
}

/// The watchdog, and faults that tests ask for, learn what this rank is about to do.
void Run::enter(const char* phase) {
  if (watchdog_) watchdog_->at(phase, trainer_->next_step());
  faults::at(phase, trainer_->next_step());
}

void Run::step() {
  enter("step");
  if (faults::mismatched(trainer_->next_step())) ranks_->barrier();
  const double begun = steady_seconds();
  const int64_t trace_step = start_.config.log.trace_step;
  const bool traced = trace_step > 0 && trainer_->next_step() + 1 == trace_step;
  Profile profile;
  if (traced) {
    profile.keep_timeline();
    trainer_->context().profile = &profile;
  }
  const int64_t waited = trainer_->communication().waited_ns();
  last_ = trainer_->step();
  if (last_.counted_tokens > 0) loss_ = last_.loss;
  trainer_->context().profile = nullptr;
  if (traced && leads()) log_->trace(profile);
  const double seconds = steady_seconds() - begun;
  own_seconds_ = seconds - 1e-9 * static_cast<double>(trainer_->communication().waited_ns() - waited);
  train_seconds_ += seconds;
  if (start_.config.log.bits > 0) log_bits();
  if (!leads()) return;
  watch_.add(last_, *trainer_, *console_);
  log_->step(last_, seconds, train_seconds_, watch_.divergence().since());
}

void Run::log_bits() {
  nlohmann::ordered_json line = bits_line(trainer_->next_step(), last_.loss, last_.grad_norm);
  if (trainer_->next_step() % start_.config.log.bits == 0)
    line["state"] = fmt::format("{:016x}", state_hash(trainer_->context(), trainer_->content(), *ranks_));
  if (leads()) log_->bits(line);
}

bool Run::evaluate() {
  return evaluate_between_steps(
      *start_.evaluator, *trainer_, signals_, [this] { enter("evaluate"); },
      [this](const EvalResult& result) { log_->evaluation(result); });
}

void Run::save(bool keep_all) {
  enter("save");
  nlohmann::json state = {{"seconds", train_seconds_}};
  if (loss_ && std::isfinite(*loss_)) state["loss"] = *loss_;
  watch_.save_to(state);
  // A skipped step may have made weights that are not worth an older checkpoint.
  saving_->save(state, keep_all || last_.skipped);
}

// ---- the end

/// All steps are done, or a signal came.
ExitCode Run::finish(double seconds) {
  const int64_t step = trainer_->next_step();
  if (!saving_->up_to_date()) save();
  saving_->finish();
  const bool completed = any_rank(leads() && complete());
  const ExitCode code = completed ? ExitCode::ok : ExitCode::preempted;
  if (!leads()) return code;
  write_status(completed ? "done" : "preempted");
  const char* signal = *signals_.name() ? signals_.name() : "a signal to another rank";
  const Divergence& divergence = watch_.divergence();
  if (completed)
    console_->line(fmt::format(
        "{} {}{}  {}",
        divergence.since() ? fmt::format("done, but the loss diverged ({}):", divergence.describe())
                           : "done    ",
        steps_done(seconds), loss_ ? fmt::format("  loss {:.3f}", *loss_) : "", start_.folder->path()));
  else if (step > 0)
    console_->line(
        fmt::format("stopped by {} at step {}, saved; run the same command to go on", signal, step));
  else
    console_->line(fmt::format(
        "stopped by {} before the first step: there was nothing to save; run the same command to start again",
        signal));
  return code;
}

/// How many steps are done, and how long those of this start took.
std::string Run::steps_done(double seconds) const {
  const int64_t step = trainer_->next_step(), here = step - (start_.resumes() ? start_.resumed.step : 0);
  if (here == 0) return fmt::format("{} steps", step);
  const std::string which = here == step ? "" : fmt::format(", the last {}", here);
  return fmt::format("{} steps{} in {}", step, which, format_duration(seconds));
}

/// All steps done and evaluated; rank 0 knows.
bool Run::complete() const {
  return last_step_done() && (start_.evaluator->empty() || log_->last_evaluation() >= trainer_->next_step());
}

/// Saves what can be saved, and adds to the error where to go on from.
void Run::fail_run(const std::exception& exception) {
  const Error error = caught_error();
  const bool shared = ranks_->size() == 1 || dynamic_cast<const SharedError*>(&exception) != nullptr;
  const std::string text =
      error.what() + (error.code() == ExitCode::corruption ? saving_->newest_sound_checkpoint()
                                                           : keep_trained_steps(error.code(), shared));
  if (leads())
    write_status("failed", {{"error", text}, {"exit_code", static_cast<int>(error.code())}});
  else if (!shared)
    failure_status_->write(text, error.code(), reached(trainer_->next_step()));
  throw Error(error.code(), text);
}

/// After an error: saves the steps that were trained since the last checkpoint, where the state is sound and
/// the ranks can still act together (shared). Returns what is saved, for the message.
std::string Run::keep_trained_steps(ExitCode code, bool shared) {
  // What makes a save pointless: it has just failed; a rank is lost; the bits are not to be trusted. And
  // where step after step was skipped, the weights themselves may be what is wrong.
  const bool pointless = code == ExitCode::save_failed || code == ExitCode::hang ||
                         code == ExitCode::corruption || (code == ExitCode::numeric && last_.skipped);
  try {
    if (shared && !pointless && trainer_->sound() && !saving_->up_to_date()) {
      saving_->follow_folder();
      save(/*keep_all=*/code == ExitCode::numeric);
    }
    if (shared) saving_->finish_after_error();
    return saving_->what_is_saved();
  } catch (const std::exception& second) {
    return fmt::format("; saving what was trained failed, too: {}{}", second.what(),
                       saving_->what_is_saved());
  }
}

/// For the status of a run that this rank ends alone. Any thread may call.
FailureStatus::Reached Run::reached(int64_t step) const {
  const Saving* saving = watched_saving_;
  const int64_t before = start_.resumes() ? start_.resumed.step : -1;
  return {.step = step,
          .tokens = step * tokens_per_step(start_.config),
          .saved_step = saving ? saving->durable_step() : before};
}

void Run::write_status(const char* state, const nlohmann::ordered_json& more) const {
  nlohmann::ordered_json all = more;
  const Divergence& divergence = watch_.divergence();
  if (const auto since = divergence.since())
    all["diverged"] = {{"since_step", *since}, {"text", divergence.describe()}};
  log_->status(state, loss_, saving_->durable_step(), all);
}

}  // namespace

ExitCode run_training(const RunOptions& options) { return Run(options).train(); }

}  // namespace sluice
