#pragma once
// What rank 0 of a training writes while it goes on: console lines, metrics.jsonl, eval.jsonl, bits.log,
// TensorBoard events, trace.json and status.json. None of it may end the training: what cannot be written is
// a warning.
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/derived.h"
#include "core/profile.h"
#include "eval/evaluate.h"
#include "run/console.h"
#include "run/json_lines.h"
#include "run/metrics.h"
#include "run/run_folder.h"
#include "run/step_times.h"
#include "run/tensorboard.h"
#include "train/trainer.h"

namespace sluice {

class RunLog {
 public:
  /// Opens the files, and cuts what lies past the trainer's step: lines of steps that will be trained again.
  /// Errors of this opening are thrown, since nothing has been trained yet. All arguments outlive the log.
  RunLog(const Config& config, const Trainer& trainer, const RunFolder& folder, Console& console);

  /// The step of the last evaluation; -1 where there is none.
  int64_t last_evaluation() const { return evals_.last_step(); }

  /// A step was done in `seconds`; `all_seconds`: of training so far, over all resumptions; diverged_since:
  /// Divergence::since().
  void step(const StepMetrics& m, double seconds, double all_seconds, std::optional<int64_t> diverged_since);
  void evaluation(const EvalResult& result);
  void bits(const nlohmann::ordered_json& line) { bits_->append(line); }
  void trace(const Profile& profile) const;
  /// status.json; `more` is added to it. loss: of the last step that had one. What is not known is left out.
  void status(const char* state, std::optional<double> loss, int64_t saved_step,
              const nlohmann::ordered_json& more = nlohmann::ordered_json::object()) const;

 private:
  void record(const StepMetrics& m, double all_seconds, const std::vector<StepScalar>& losses,
              std::optional<int64_t> diverged_since);
  Progress progress(const StepMetrics& m, const std::vector<StepScalar>& losses) const;
  void scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values);
  int64_t tokens() const { return trainer_.next_step() * tokens_per_step(config_); }

  const Config& config_;
  const Trainer& trainer_;
  const RunFolder& folder_;
  Console& console_;
  JsonLines metrics_, evals_;
  std::optional<JsonLines> bits_;
  std::unique_ptr<EventWriter> events_;
  StepTimes times_;
  double seconds_since_record_ = 0, tokens_per_second_ = 0;
  int64_t steps_since_record_ = 0;
};

}  // namespace sluice
