#include "run/saving.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>

#include <algorithm>

#include "checkpoint/rotation.h"
#include "comm/collective_errors.h"
#include "comm/reduce.h"
#include "config/model_function.h"
#include "core/steady_clock.h"
#include "hf/config.h"

namespace sluice {

Saving::Saving(const TrainingStart& start, Trainer& trainer, Console* console)
    : start_(start),
      trainer_(trainer),
      console_(console),
      store_(start.config.run_dir + "/ckpt", start.config.checkpoint, trainer.content(), &trainer.context(),
             &trainer.ranks()),
      saved_at_(steady_seconds()) {
  if (start.resumes()) saved_step_ = reported_step_ = trainer.next_step();
  if (leads()) store_.set_guard([this] { start_.folder->require_ours(); });
}

bool Saving::due(bool last_skipped) const {
  const int64_t step = trainer_.next_step();
  if (step == 0 || step == saved_step_) return false;
  if (step >= trainer_.max_steps()) return true;
  if (last_skipped) return false;  // weights that made a step not finite are not worth an older checkpoint
  const CheckpointConfig& c = start_.config.checkpoint;
  return (c.every_steps > 0 && step % c.every_steps == 0) ||
         (c.every_minutes > 0 && steady_seconds() - saved_at_ >= 60 * c.every_minutes);
}

/// The checkpoint goes by the folder's name, the lock holds on to the folder: they must be the same.
void Saving::require_folder() {
  std::string problem;
  try {
    if (leads() && start_.folder->make_again())
      spdlog::warn("{} was removed while it was trained in, and has been made again; what it held is lost",
                   start_.folder->path());
    if (leads()) start_.folder->require_ours();
  } catch (const Error& error) {
    problem = error.what();
  }
  broadcast_text(trainer_.ranks(), problem, 0);
  if (!problem.empty()) throw SharedError(ExitCode::cannot_create, problem);
}

void Saving::save(const nlohmann::json& run_state, bool keep_all) {
  require_folder();
  trainer_.verify_replicas();  // what differs between ranks is not worth an older checkpoint
  CheckpointContent content = trainer_.content();
  content.state.update(run_state, /*merge_objects=*/true);  // "router" is of both
  content.state["data_fingerprint"] = start_.data->fingerprint();
  if (!start_.data->hashed_whole()) content.state["data_modified"] = start_.data->modified();
  content.state["tokenizer_fingerprint"] = start_.tokenizer->fingerprint();
  content.state["changes"] = start_.changes;
  content.config_yaml = start_.config_yaml;
  Config as_trained = start_.config;
  as_trained.model = model_after(as_trained.model, trainer_.next_step());
  content.hf_config = hf_config(as_trained, start_.tokenizer->end_of_document());
  if (leads()) content.tokenizer_model = start_.tokenizer->model();
  // Before the save, which cannot be published without this rank's part. Rank 0 learns of it from the store.
  const bool replaces = !leads() && in_folder(content.step);
  store_.save(content, keep_all);
  saved_step_ = trainer_.next_step();
  new_step_ = replaces ? -1 : saved_step_;
  saved_at_ = steady_seconds();
}

void Saving::finish() {
  if (!store_.wait())
    throw SharedError(ExitCode::save_failed,
                      fmt::format("the final checkpoint could not be written: {}", store_.last_error()));
  report();
}

void Saving::finish_after_error() {
  store_.wait();
  report();
}

void Saving::follow_folder() {
  Communicator& ranks = trainer_.ranks();
  if (!any_rank(ranks, leads() && start_.folder->follow())) return;
  std::string folder = leads() ? start_.folder->path() + "/ckpt" : "";
  broadcast_text(ranks, folder, 0);
  store_.wait();
  store_.move(folder);
}

void Saving::report() {
  const int64_t durable = store_.saved_step();
  if (durable <= reported_step_ || !leads()) return;
  reported_step_ = durable;
  console_->line(fmt::format("  saved step {}", durable));
}

bool Saving::in_folder(int64_t step) const {
  try {
    // Listed, not looked up by name: network file systems remember for a while that a name was not there.
    const std::vector<std::string> all = list_checkpoints(start_.config.run_dir + "/ckpt");
    return std::ranges::any_of(
        all, [&](const std::string& path) { return path.ends_with("/" + step_folder_name(step)); });
  } catch (const std::exception&) {
    return false;
  }
}

int64_t Saving::durable_step() const {
  const int64_t known = std::max(store_.saved_step(), start_.resumes() ? start_.resumed.step : -1);
  const int64_t newer = new_step_;
  return !leads() && newer > known && in_folder(newer) ? newer : known;
}

std::string Saving::what_is_saved() const {
  const int64_t step = trainer_.next_step(), saved = durable_step();
  if (step == 0) return "";
  // An error that one rank alone has is reported while its last asynchronous save may still be under way.
  const std::string pending = saved_step_ > saved && store_.last_error().empty()
                                  ? fmt::format("; the save of step {} was under way", saved_step_)
                                  : "";
  if (saved < 0) return fmt::format("; of the {} steps that were trained nothing is saved{}", step, pending);
  const bool resumed = start_.resumes() && saved == start_.resumed.step;
  return fmt::format("; trained up to step {}, saved up to step {} in {}{}", step, saved,
                     resumed ? start_.resumed.path : store_.path_of(saved), pending);
}

std::string Saving::newest_sound_checkpoint() const {
  for (const std::string& path : list_checkpoints(start_.config.run_dir + "/ckpt"))
    if (step_of_folder_name(path.substr(path.rfind('/') + 1)) <= trainer_.replicas().equal_step())
      return fmt::format(
          "\nthe newest checkpoint from before is {}; the same command goes on from it, best without that "
          "host",
          path);
  return "\nthere is no checkpoint from before";
}

}  // namespace sluice
