#include "run/run.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "checkpoint/manifest.h"
#include "checkpoint/rotation.h"
#include "checkpoint/state_hash.h"
#include "checkpoint/state_reader.h"
#include "comm/collective_errors.h"
#include "comm/reduce.h"
#include "config/fields.h"
#include "config/rank_rules.h"
#include "core/build_info.h"
#include "core/caught.h"
#include "core/cpu_features.h"
#include "core/faults.h"
#include "core/host.h"
#include "core/io.h"
#include "core/parallel_for.h"
#include "data/token_check.h"
#include "eval/evaluate.h"
#include "eval/portable.h"
#include "hf/config.h"
#include "plan/plan.h"
#include "run/banner.h"
#include "run/console.h"
#include "run/data_plan.h"
#include "run/divergence.h"
#include "run/init_source.h"
#include "run/limits_check.h"
#include "run/program_facts.h"
#include "run/rank_threads.h"
#include "run/resume_check.h"
#include "run/router_monitor.h"
#include "run/run_folder.h"
#include "run/run_log.h"
#include "run/start_facts.h"
#include "run/stragglers.h"
#include "run/watchdog.h"
#include "train/trainer.h"

namespace sluice {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Run {
 public:
  explicit Run(const RunOptions& options);
  ExitCode train();

 private:
  void prepare(StartFacts& facts, KeyPlaces& places);
  void say_done() const;
  void watch();
  void at(const char* phase);
  void open_files();
  ExitCode go();
  void start_files();
  nlohmann::ordered_json first_weights() const;
  void write_status(const char* state,
                    const nlohmann::ordered_json& more = nlohmann::ordered_json::object()) const {
    nlohmann::ordered_json all = more;
    if (const auto since = divergence_.since())
      all["diverged"] = {{"since_step", *since}, {"text", divergence_.describe()}};
    log_->status(state, checkpoints_ ? checkpoints_->saved_step() : -1, all);
  }
  ExitCode finish(double seconds);
  bool between_steps();
  void step();
  void watch_routers();
  void watch_loss();
  void log_bits();
  bool evaluate();
  void save(bool keep_all = false);
  void require_folder();
  std::string sound_checkpoint() const;
  void report_saved();
  std::string keep_trained_steps(ExitCode code, bool shared);
  std::string what_is_saved() const;
  bool checkpoint_due() const;
  /// Rank 0 reports, and evaluates where that does not take all; the others compute and save.
  bool leads() const { return ranks_->rank() == 0; }
  bool agree(bool mine) const;
  struct Due {
    bool stop, evaluate, save;
  };
  Due agree_on_due();
  bool last_step_done() const { return trainer_->next_step() >= trainer_->max_steps(); }
  /// All steps done and evaluated; rank 0 knows.
  bool complete() const {
    return last_step_done() && (evaluator_->empty() || log_->last_evaluation() >= trainer_->next_step());
  }

  RunOptions options_;
  std::unique_ptr<Communicator> alone_;
  Communicator* ranks_;
  std::unique_ptr<StopSignals> own_signals_;
  const StopSignals& signals_;
  Config config_;
  Plan plan_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<Blend> data_;
  std::unique_ptr<Evaluator> evaluator_;
  std::string data_fingerprint_;
  std::unique_ptr<RunFolder> folder_;
  CheckpointInfo resumed_;  // path empty: a fresh start
  InitSource init_;         // of a fresh start
  std::string config_yaml_;

  std::unique_ptr<Console> console_;
  std::unique_ptr<ConsoleWarnings> warnings_;
  std::unique_ptr<Trainer> trainer_;
  std::unique_ptr<CheckpointStore> checkpoints_;
  std::unique_ptr<RunLog> log_;  // rank 0's

  std::unique_ptr<Watchdog> watchdog_;  // with several ranks
  Stragglers stragglers_;
  bool told_rounds_ = false;  // that experts took extra rounds
  double own_seconds_ = 0;    // of the last step, without waiting for other ranks
  StepMetrics last_;
  Divergence divergence_{0, 0, 0};          // rank 0's
  std::unique_ptr<RouterMonitor> monitor_;  // with experts
  double seconds_ = 0;                      // of training, over all resumptions
  int64_t saved_step_ = -1, reported_step_ = -1;
  double saved_at_ = now(), heartbeat_at_ = 0;
};

// ---- before the first step

Run::Run(const RunOptions& options)
    : options_(options),
      alone_(options.ranks ? nullptr : make_local_communicator()),
      ranks_(options.ranks ? options.ranks : alone_.get()),
      own_signals_(options.signals ? nullptr : std::make_unique<StopSignals>()),
      signals_(options.signals ? *options.signals : *own_signals_),
      stragglers_(ranks_->size()) {
  KeyPlaces places;
  agree_on_start(*ranks_, [&](StartFacts& facts) { prepare(facts, places); });
  use_threads(config_.train.threads, *ranks_);
  agree_on_threads(*ranks_, config_);
  plan_ = make_plan(config_, ranks_->size());
  const std::string checkpoints = config_.run_dir + "/ckpt";
  if (agree(leads() && list_checkpoints(checkpoints).empty()))  // a run that goes on has weights of its own
    init_ = find_init_source(config_, places, *tokenizer_, ranks_);

  check_limits(plan_, *ranks_);
  if (leads()) folder_ = std::make_unique<RunFolder>(config_.run_dir);
  faults::at("init", 0);
  ranks_->barrier();  // nobody looks before the folder is ours
  if (leads() && io::is_directory(checkpoints))
    remove_litter(checkpoints);  // also of a training that is finished
  agree_on_checkpoint(*ranks_, checkpoints, config_.parallel.timeout_seconds);
  if (options.fresh && !list_checkpoints(checkpoints).empty())
    fail(ExitCode::usage,
         "--fresh: {} holds a training (newest checkpoint {}); remove the folder or choose another run_dir",
         config_.run_dir, list_checkpoints(checkpoints).front());
  resumed_ = newest_valid_checkpoint(checkpoints, ranks_);
  if (!resumed_.path.empty())
    check_resume(resumed_, config_, options.allow_change, *data_, *tokenizer_, leads());
}

/// What can be found out, and found wrong, before ranks do anything together.
void Run::prepare(StartFacts& facts, KeyPlaces& places) {
  state_program(facts);
  config_ = load_config(options_.config_path, options_.overrides, &places,
                        {.ranks = ranks_->size(), .training = true});
  state_configuration(facts, config_);
  facts.set("--fresh", options_.fresh ? "given" : "not given");
  facts.set("--allow-change", fmt::format("{}", fmt::join(options_.allow_change, " ")));
  state_device(facts, config_);
  tokenizer_ = training_tokenizer(config_);
  facts.set("the tokenizer", tokenizer_->fingerprint(), ExitCode::data);
  resolve_model(config_, *tokenizer_);
  require_rank_rules(config_, ranks_->size(), places);
  state_configuration(facts, config_);
  require_training_data(config_);
  data_ = std::make_unique<Blend>(config_.data.train, config_.data.seq_len, config_.model.vocab_size,
                                  config_.data.document_mask, config_.train.seed);
  evaluator_ =
      std::make_unique<Evaluator>(config_.data.validation, config_, *tokenizer_, config_.eval.max_tokens);
  if (leads()) check_data(*data_, evaluator_->blends(), *tokenizer_, config_);
  if (ranks_->size() > 1) state_data(facts, config_, *data_, *evaluator_);
  data_fingerprint_ = data_->fingerprint();
  config_yaml_ = to_yaml(config_);
}

/// Where the weights of step 0 were from, which a resumed run keeps from its first start; null for
/// train.seed.
nlohmann::ordered_json Run::first_weights() const {
  if (!init_.path.empty()) return init_.json();
  const std::string path = folder_->file("run.json");
  if (resumed_.path.empty() || !io::exists(path)) return nullptr;
  const auto first = nlohmann::ordered_json::parse(io::read_file(path), nullptr, false);
  return first.is_object() ? first.value("init_from", nlohmann::ordered_json()) : nullptr;
}

void Run::start_files() {
  folder_->write("config.yaml", fmt::format("# hash {}\n{}", config_hash(config_), config_yaml_));
  std::string input = fmt::format("# {}\n{}", options_.config_path, io::read_file(options_.config_path));
  for (const std::string& text : options_.overrides)
    input += fmt::format("# on the command line: {}\n", text);
  folder_->write("config.input.yaml", input);
  if (!tokenizer_->model().empty()) folder_->write(kTokenizerFile, tokenizer_->model());
  const std::string past =
      io::exists(folder_->file("cmdline.txt")) ? io::read_file(folder_->file("cmdline.txt")) : "";
  folder_->write("cmdline.txt", past + options_.command_line + "\n");

  const nlohmann::ordered_json run = {{"schema", 1},
                                      {"name", config_.name},
                                      {"version", build_info().version},
                                      {"build", program_json()},
                                      {"parameters", plan_.total},
                                      {"parameters_active", plan_.active},
                                      {"parameters_non_embedding", plan_.non_embedding},
                                      {"config_hash", config_hash(config_)},
                                      {"max_steps", trainer_->max_steps()},
                                      {"tokens_per_step", tokens_per_step(config_)},
                                      {"precision", enum_name(config_.train.precision)},
                                      {"ranks", ranks_->size()},
                                      {"threads", num_threads()},
                                      {"instruction_set", isa_name(cpu_isa())},
                                      {"device", device_text(trainer_->context().device)},
                                      {"data_fingerprint", data_fingerprint_},
                                      {"tokenizer_fingerprint", tokenizer_->fingerprint()},
                                      {"started", utc_now()},
                                      {"init_from", first_weights()},
                                      {"resumed_from_step", trainer_->next_step()}};
  folder_->write("run.json", run.dump(2) + "\n");
}

// ---- the loop

/// A training that was killed behind its last evaluation has a status of before.
void Run::say_done() const {
  const std::string path = folder_->file("status.json");
  auto done = nlohmann::ordered_json::parse(io::exists(path) ? io::read_file(path) : "", nullptr, false);
  if (!done.is_object()) done = nlohmann::ordered_json::object();
  if (done.value("state", "") == "done") return;
  done.erase("loss");
  done.update({{"state", "done"},
               {"step", resumed_.step},
               {"max_steps", training_steps(config_)},
               {"tokens", resumed_.step * tokens_per_step(config_)},
               {"seconds_left", 0.0},
               {"saved_step", resumed_.step}});
  folder_->write_status(done);
}

ExitCode Run::train() {
  if (leads()) {
    console_ = std::make_unique<Console>(config_.log.console, Terminal::detect(config_.log.console));
    warnings_ = std::make_unique<ConsoleWarnings>(*console_);
  } else {
    spdlog::set_level(spdlog::level::err);  // warnings come from rank 0
  }

  const bool evaluated =
      leads() && (evaluator_->empty() ||
                  JsonLines(folder_->file("eval.jsonl"), resumed_.step).last_step() >= resumed_.step);
  if (agree(!resumed_.path.empty() && resumed_.step >= training_steps(config_) && evaluated)) {
    if (leads()) {
      folder_->keep();
      say_done();
      console_->line(fmt::format(
          "{} is finished: step {} of {}, {}. More: train.max_steps=N --allow-change train.max_steps, "
          "or another run_dir.",
          folder_->path(), resumed_.step, training_steps(config_), resumed_.path));
    }
    return ExitCode::ok;
  }
  trainer_ = std::make_unique<Trainer>(config_, *data_, ranks_);
  divergence_ =
      Divergence(config_.train.divergence_factor, chance_loss(config_.model), config_.optimizer.warmup_steps);
  ranks_ = &trainer_->ranks();  // in one line with what a step leaves under way
  if (config_.model.moe.num_experts > 0) monitor_ = std::make_unique<RouterMonitor>(config_.model);
  if (resumed_.path.empty()) {
    trainer_->initialize(init_.path);
  } else {
    trainer_->restore(resumed_);
    const StateReader state(resumed_.state, resumed_.path + "/state.json");
    if (state.has("seconds")) seconds_ = state.number("seconds", 0);
    if (monitor_) monitor_->restore(state);
    if (state.has("divergence")) divergence_.restore(state.object("divergence"));
    saved_step_ = reported_step_ = trainer_->next_step();
  }
  if (ranks_->size() > 1 && config_.parallel.timeout_seconds > 0) {
    if (leads()) watch();
    ranks_->barrier();  // rank 0 has emptied the file
    if (!leads()) watch();
  }
  if (leads()) open_files();
  const CheckpointContent content = trainer_->content();
  checkpoints_ = std::make_unique<CheckpointStore>(config_.run_dir + "/ckpt", config_.checkpoint, content,
                                                   &trainer_->context(), ranks_);
  if (leads()) checkpoints_->set_guard([this] { folder_->require_ours(); });
  for (const std::string& problem :
       {trainer_->queue_problem(), watchdog_ ? watchdog_->problem() : std::string()})
    if (const std::string text = first_problem(*ranks_, problem); !text.empty() && leads())
      spdlog::warn("{}", text);
  if (leads()) {
    for (const std::string& line : banner(config_, plan_, *trainer_, *data_, *evaluator_))
      console_->line(line);
    if (!init_.path.empty()) console_->line("weights  from " + init_.text());
    if (!resumed_.path.empty())
      console_->line(fmt::format("resume   from {} (step {})", resumed_.path, trainer_->next_step()));
    for (const std::string& text :
         repetition_warnings(*data_, trainer_->max_steps() * config_.train.global_batch_size))
      spdlog::warn("{}", text);
    write_status("running");
  }
  return go();
}

void Run::watch() {
  watchdog_ = std::make_unique<Watchdog>(*options_.ranks, config_.run_dir + "/heartbeat",
                                         config_.parallel.timeout_seconds);
}

void Run::at(const char* phase) {
  if (watchdog_) watchdog_->at(phase, trainer_->next_step());
  faults::at(phase, trainer_->next_step());
}

void Run::open_files() {
  console_->log_to(folder_->file("console.log"));
  start_files();
  log_ = std::make_unique<RunLog>(config_, *trainer_, *folder_, *console_);
}

ExitCode Run::go() {
  if (leads()) folder_->keep();
  try {
    const double start = now();
    while (!between_steps()) step();
    return finish(now() - start);
  } catch (const std::exception& exception) {
    const Error error = caught_error();
    const bool shared = ranks_->size() == 1 || dynamic_cast<const SharedError*>(&exception) != nullptr;
    const std::string text =
        error.what() + (error.code() == ExitCode::corruption ? sound_checkpoint()
                                                             : keep_trained_steps(error.code(), shared));
    if (leads()) write_status("failed", {{"error", text}, {"exit_code", static_cast<int>(error.code())}});
    throw Error(error.code(), text);
  }
}

/// All steps are done, or a signal came.
ExitCode Run::finish(double seconds) {
  const int64_t step = trainer_->next_step();
  if (saved_step_ != step && step > 0) save();
  if (!checkpoints_->wait())
    throw SharedError(ExitCode::save_failed, fmt::format("the final checkpoint could not be written: {}",
                                                         checkpoints_->last_error()));
  report_saved();
  const bool completed = agree(leads() && complete());
  if (!leads()) return completed ? ExitCode::ok : ExitCode::preempted;
  write_status(completed ? "done" : "preempted");
  if (!completed) {
    const char* signal = *signals_.name() ? signals_.name() : "a signal to another rank";
    console_->line(
        step > 0
            ? fmt::format("stopped by {} at step {}, saved; run the same command to go on", signal, step)
            : fmt::format(
                  "stopped by {} before the first step: there was nothing to save; run the same command to "
                  "start again",
                  signal));
    return ExitCode::preempted;
  }
  console_->line(fmt::format("{} {} steps in {}  loss {:.3f}  {}",
                             divergence_.since()
                                 ? fmt::format("done, but the loss diverged ({}):", divergence_.describe())
                                 : "done    ",
                             step, format_duration(seconds), last_.loss, folder_->path()));
  return ExitCode::ok;
}

/// After an error: saves the steps that were trained since the last checkpoint, where the state is sound and
/// the ranks can still act together. Returns what is saved, for the message.
std::string Run::keep_trained_steps(ExitCode code, bool shared) {
  // What makes a save pointless: it has just failed; a rank is lost; the bits are not to be trusted. And
  // where step after step was skipped, the weights themselves may be what is wrong.
  const bool pointless = code == ExitCode::save_failed || code == ExitCode::hang ||
                         code == ExitCode::corruption || (code == ExitCode::numeric && last_.skipped);
  try {
    const int64_t step = trainer_->next_step();
    if (shared && !pointless && trainer_->sound() && step > 0 && saved_step_ != step) {
      if (agree(leads() && folder_->follow())) {
        std::string folder = leads() ? folder_->path() + "/ckpt" : "";
        broadcast_text(*ranks_, folder, 0);
        checkpoints_->wait();
        checkpoints_->move(folder);
      }
      save(/*keep_all=*/code == ExitCode::numeric);
    }
    if (shared) {
      checkpoints_->wait();
      report_saved();
    }
    return what_is_saved();
  } catch (const std::exception& second) {
    return fmt::format("; saving what was trained failed, too: {}{}", second.what(), what_is_saved());
  }
}

std::string Run::what_is_saved() const {
  const int64_t step = trainer_->next_step(),
                saved = std::max(checkpoints_->saved_step(), resumed_.path.empty() ? -1 : resumed_.step);
  if (step == 0) return "";
  if (saved < 0) return fmt::format("; of the {} steps that were trained nothing is saved", step);
  return fmt::format("; trained up to step {}, saved up to step {} in {}", step, saved,
                     checkpoints_->saved_step() == saved ? checkpoints_->path_of(saved) : resumed_.path);
}

/// Where to go on from when ranks hold different bits: what was saved while they were known to hold the same.
std::string Run::sound_checkpoint() const {
  for (const std::string& path : list_checkpoints(config_.run_dir + "/ckpt"))
    if (step_of_folder_name(path.substr(path.rfind('/') + 1)) <= trainer_->replicas().equal_step())
      return fmt::format(
          "\nthe newest checkpoint from before is {}; the same command goes on from it, best without that "
          "host",
          path);
  return "\nthere is no checkpoint from before";
}

/// Whether any rank says so.
bool Run::agree(bool mine) const {
  int64_t count = mine ? 1 : 0;
  all_reduce(*ranks_, &count, 1);
  return count > 0;
}

/// The one small message of all ranks between two steps: whether any was asked to stop, how long each has
/// computed, and what rank 0, which has the clock and the files, finds due.
Run::Due Run::agree_on_due() {
  const int64_t step = trainer_->next_step();
  const bool evaluation = leads() && !evaluator_->empty() && log_->last_evaluation() < step &&
                          (last_step_done() || (config_.eval.every_steps > 0 && step > 0 &&
                                                step % config_.eval.every_steps == 0));
  const bool checkpoint = leads() && (last_step_done() ? step > 0 && saved_step_ != step : checkpoint_due());
  struct Message {
    double stop, seconds, evaluate, save;
  };
  const Message mine{signals_.requested() ? 1.0 : 0.0, own_seconds_, evaluation ? 1.0 : 0.0,
                     checkpoint ? 1.0 : 0.0};
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

/// Between steps: checkpoint, evaluation, signals. True when the loop is over.
bool Run::between_steps() {
  const Due due = agree_on_due();
  if (due.save) save();  // first: an evaluation that fails, or is cut short, costs no step then
  if (due.stop || (due.evaluate && !evaluate()) || last_step_done()) return true;
  report_saved();
  if (leads() && now() - heartbeat_at_ > 15) {
    heartbeat_at_ = now();
    write_status("running");
  }
  return false;
}

void Run::step() {
  at("step");
  if (faults::mismatched(trainer_->next_step())) ranks_->barrier();
  const double start = now();
  const bool traced = config_.log.trace_step > 0 && trainer_->next_step() + 1 == config_.log.trace_step;
  Profile profile;
  if (traced) {
    profile.keep_timeline();
    trainer_->context().profile = &profile;
  }
  const int64_t waited = trainer_->waited_ns();
  last_ = trainer_->step();
  trainer_->context().profile = nullptr;
  if (traced && leads()) log_->trace(profile);
  const double seconds = now() - start;
  own_seconds_ = seconds - 1e-9 * static_cast<double>(trainer_->waited_ns() - waited);
  seconds_ += seconds;
  if (config_.log.bits > 0) log_bits();
  if (!leads()) return;
  if (last_.skipped) spdlog::warn("{}; skipped", trainer_->problem());
  watch_routers();
  watch_loss();
  log_->step(last_, seconds, seconds_, divergence_.since());
}

void Run::watch_routers() {
  const RouterBalanceState& routers = trainer_->step_loss<RouterBalanceState>();
  if (routers.extra_rounds() > 0 && !told_rounds_)
    spdlog::warn(
        "step {}: rows took {} extra rounds to their experts (said once); fewer with a larger "
        "parallel.expert_capacity",
        trainer_->next_step(), routers.extra_rounds());
  told_rounds_ = routers.extra_rounds() > 0;
  const auto summary = routers.summary();
  if (!monitor_ || !summary) return;
  for (const std::string& warning : monitor_->add(trainer_->next_step(), *summary))
    spdlog::warn("{}", warning);
}

void Run::watch_loss() {
  const bool before = divergence_.since().has_value();
  const std::string message = divergence_.add(trainer_->next_step(), last_.loss);
  if (message.empty()) return;
  if (before)
    console_->line(message);
  else
    spdlog::warn("{}", message);
}

void Run::log_bits() {
  nlohmann::ordered_json line = bits_line(trainer_->next_step(), last_.loss, last_.grad_norm);
  if (trainer_->next_step() % config_.log.bits == 0)
    line["state"] = fmt::format("{:016x}", state_hash(trainer_->context(), trainer_->content(), *ranks_));
  if (leads()) log_->bits(line);
}

/// Collective. False where a signal cut it short: the next start makes it up, with the same weights. An error
/// is one of all ranks.
bool Run::evaluate() {
  const bool together = trainer_->forward_needs_all(), alone = !together || ranks_->size() == 1;
  trainer_->settle_weights();
  std::optional<EvalResult> result;
  std::string problem;
  struct Outcome {
    int64_t interrupted, code;
  } mine{0, 0};
  if (leads() || together) {
    at("evaluate");
    try {
      result = evaluator_->run(trainer_->context(), trainer_->model(), trainer_->micro_batch(),
                               trainer_->analysed(),
                               [&] { return alone ? signals_.requested() : agree(signals_.requested()); });
      mine.interrupted = !result;
      if (leads() && result) log_->evaluation(*result);
    } catch (const std::exception&) {
      const Error error = caught_error();
      // Where all compute it together, bad data is found by all; anything else leaves the others in the
      // middle of it.
      if (!alone && error.code() != ExitCode::data) throw;
      mine.code = static_cast<int64_t>(error.code());
      problem = error.what();
    }
  }
  std::vector<Outcome> all(static_cast<size_t>(ranks_->size()));
  ranks_->all_gather(all.data(), &mine, sizeof mine);
  for (const Outcome& outcome : all)
    if (outcome.code != 0)
      throw SharedError(
          static_cast<ExitCode>(outcome.code),
          fmt::format("evaluation at step {}: {}", trainer_->next_step(), first_problem(*ranks_, problem)));
  return std::none_of(all.begin(), all.end(),
                      [](const Outcome& outcome) { return outcome.interrupted != 0; });
}

// ---- checkpoints

bool Run::checkpoint_due() const {
  const int64_t step = trainer_->next_step();
  // Weights that just made a step not finite are not worth an older checkpoint.
  if (step == 0 || step == saved_step_ || last_.skipped) return false;
  const CheckpointConfig& c = config_.checkpoint;
  return (c.every_steps > 0 && step % c.every_steps == 0) ||
         (c.every_minutes > 0 && now() - saved_at_ >= 60 * c.every_minutes);
}

/// Collective. The checkpoint goes by the folder's name, the lock holds on to the folder: they must be the
/// same.
void Run::require_folder() {
  std::string problem;
  try {
    if (leads() && folder_->make_again())
      spdlog::warn("{} was removed while it was trained in, and has been made again; what it held is lost",
                   folder_->path());
    if (leads()) folder_->require_ours();
  } catch (const Error& error) {
    problem = error.what();
  }
  broadcast_text(*ranks_, problem, 0);
  if (!problem.empty()) throw SharedError(ExitCode::cannot_create, problem);
}

void Run::save(bool keep_all) {
  at("save");
  require_folder();
  trainer_->verify_replicas();  // what differs between ranks is not worth an older checkpoint
  CheckpointContent content = trainer_->content();
  content.state["data_fingerprint"] = data_fingerprint_;
  if (!data_->hashed_whole()) content.state["data_modified"] = data_->modified();
  content.state["tokenizer_fingerprint"] = tokenizer_->fingerprint();
  content.state["seconds"] = seconds_;
  content.state["divergence"] = divergence_.state();
  if (monitor_) monitor_->save(content.state);
  content.state["allowed_changes"] = options_.allow_change;
  content.config_yaml = config_yaml_;
  content.hf_config = hf_config(config_, tokenizer_->end_of_document());
  if (leads()) content.tokenizer_model = tokenizer_->model();
  checkpoints_->save(content, keep_all);
  saved_step_ = trainer_->next_step();
  saved_at_ = now();
}

/// A save is reported when it is durable, which may be some steps later.
void Run::report_saved() {
  const int64_t durable = checkpoints_->saved_step();
  if (durable <= reported_step_ || !leads()) return;
  reported_step_ = durable;
  console_->line(fmt::format("  saved step {}", durable));
}

}  // namespace

void resolve_model(Config& config, const Tokenizer& tokenizer) {
  if (config.model.vocab_size == 0) config.model.vocab_size = tokenizer.vocab_size();
  if (config.model.vocab_size < tokenizer.vocab_size())
    fail(ExitCode::usage, "model.vocab_size is {}, but the tokenizer has {} tokens (0 takes the tokenizer's)",
         config.model.vocab_size, tokenizer.vocab_size());
  resolve_parameter_match(config);
}

ExitCode run_training(const RunOptions& options) { return Run(options).train(); }

}  // namespace sluice
