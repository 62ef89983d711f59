#pragma once
// When a training saves, what it adds to the trainer's tensors, and what it says of what is saved.
#include <atomic>
#include <memory>
#include <string>

#include "checkpoint/store.h"
#include "run/console.h"
#include "run/training_start.h"
#include "train/trainer.h"

namespace sluice {

/// All functions but due(), report() and those that return text are collective.
class Saving {
 public:
  /// All arguments outlive it. console: rank 0's; nullptr on other ranks.
  Saving(const TrainingStart& start, Trainer& trainer, Console* console);

  /// Whether a checkpoint is due at this step boundary: by checkpoint.every_steps, every_minutes, or because
  /// all steps are done. last_skipped: the last step was.
  bool due(bool last_skipped) const;
  /// Nothing was trained since the last save.
  bool up_to_date() const { return trainer_.next_step() == 0 || saved_step_ == trainer_.next_step(); }

  /// run_state: what the run keeps beside the trainer. keep_all: no older checkpoint makes room.
  void save(const nlohmann::json& run_state, bool keep_all = false);
  /// Waits until the last save is durable and reports it. SharedError(save_failed) where it could not be
  /// written.
  void finish();
  /// The same after an error: what could not be written is in what_is_saved().
  void finish_after_error();
  /// Before a save after an error: works in the run folder under its new name where it was renamed.
  void follow_folder();
  /// A save is reported when it is durable, which may be some steps later.
  void report();

  /// The newest step that is on disk; -1: none. Looks into the folder, since ranks other than 0 learn of a
  /// save in the background only at the next one. Any thread may call.
  int64_t durable_step() const;
  /// "; trained up to step 7, saved up to step 5 in PATH", for the message of an error.
  std::string what_is_saved() const;
  /// Where to go on from when ranks hold different bits: the newest checkpoint that was saved while they were
  /// known to hold the same.
  std::string newest_sound_checkpoint() const;

 private:
  bool leads() const { return console_ != nullptr; }
  void require_folder();
  bool in_folder(int64_t step) const;

  const TrainingStart& start_;
  Trainer& trainer_;
  Console* console_;
  CheckpointStore store_;
  int64_t saved_step_ = -1, reported_step_ = -1;
  std::atomic<int64_t> new_step_{-1};  // of the last save, if no older checkpoint had that step's name
  double saved_at_;                    // seconds of a steady clock
};

}  // namespace sluice
