#include "run/run_log.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>

#include "core/device.h"
#include "run/trace.h"

namespace sluice {
namespace {

std::string tensorboard_tag(const StepScalar& scalar) {
  if (!scalar.tag.empty()) return scalar.tag;
  return scalar.name.find('/') == std::string::npos ? "train/" + scalar.name : scalar.name;
}

using Scalars = std::vector<std::pair<std::string, double>>;

/// Attention on the first token of every head, and of the strongest one by the class of the query's token;
/// what the first token's values and residual are; how far gates are open.
void add_heads(Scalars& values, const ModelSummary& a) {
  const auto add = [&](std::string tag, double value) {
    if (std::isfinite(value)) values.emplace_back(std::move(tag), value);
  };
  add("sinks/share", a.sinks.share);
  add("sinks/share_leading", a.sinks.leading_share);
  add("sinks/strongest_head", a.sinks.strongest);
  for (size_t c = 0; c < a.sinks.strongest_by_class.size(); ++c)
    add("sinks/strongest_head/" + a.query_classes[c], a.sinks.strongest_by_class[c]);
  add("first_token/value_norm", a.value_norm.first);
  add("first_token/residual_max", a.residual_max.first);
  add("other_tokens/value_norm", a.value_norm.rest);
  add("other_tokens/residual_max", a.residual_max.rest);
  const GateShares shares = shares_of(a.gates);
  add("gates/below_0.05", shares.below);
  add("gates/above_0.95", shares.above);
  add("gates/shut_heads", shares.shut_heads);
  for (size_t l = 0; l < a.layers.size(); ++l)
    for (size_t h = 0; h < a.layers[l].heads.later.size(); ++h)
      add(fmt::format("first_token_attention/layer_{}_head_{}", l, h), a.layers[l].heads.later[h]);
}

}  // namespace

RunLog::RunLog(const Config& config, const Trainer& trainer, const RunFolder& folder, Console& console)
    : config_(config),
      trainer_(trainer),
      folder_(folder),
      console_(console),
      metrics_(folder.file("metrics.jsonl"), trainer.next_step()),
      evals_(folder.file("eval.jsonl"), trainer.next_step()) {
  if (config.log.bits > 0) bits_.emplace(folder.file("bits.log"), trainer.next_step());
  if (config.log.tensorboard) events_ = std::make_unique<EventWriter>(folder.file("tb"), trainer.next_step());
}

void RunLog::step(const StepMetrics& m, double seconds, double all_seconds,
                  std::optional<int64_t> diverged_since) {
  if (m.counted_tokens == 0) return;  // it has no loss
  seconds_since_record_ += seconds;
  ++steps_since_record_;
  times_.add(seconds);
  const std::vector<StepScalar> losses = trainer_.scalars();
  const int64_t step = trainer_.next_step();
  if (step % std::max<int64_t>(config_.log.every_steps, 1) == 0 || step >= trainer_.max_steps() || m.skipped)
    record(m, all_seconds, losses, diverged_since);
  else
    console_.tick(progress(m, losses));
}

void RunLog::record(const StepMetrics& m, double all_seconds, const std::vector<StepScalar>& losses,
                    std::optional<int64_t> diverged_since) {
  tokens_per_second_ = static_cast<double>(steps_since_record_ * tokens_per_step(config_)) /
                       std::max(seconds_since_record_, 1e-9);
  steps_since_record_ = 0;
  seconds_since_record_ = 0;
  const StepPolicy& policy = trainer_.policy();
  TrainRecord record;
  record.step = trainer_.next_step();
  record.samples = record.step * config_.train.global_batch_size;
  record.tokens = tokens();
  record.loss = m.loss;
  record.grad_norm = m.grad_norm;
  record.lr = m.lr;
  record.tokens_per_second = tokens_per_second_;
  record.seconds = all_seconds;
  record.spikes = policy.spikes();
  record.skipped = policy.skipped();
  record.epochs = trainer_.data().epochs(record.samples);
  record.diverged_since = diverged_since;
  record.losses = losses;
  metrics_.append(to_json(record));
  std::vector<std::pair<std::string, double>> values = {
      {"train/loss", m.loss},
      {"train/grad_norm", m.grad_norm},
      {"train/lr", m.lr},
      {"train/tokens_per_second", tokens_per_second_},
      {"train/spikes", static_cast<double>(policy.spikes())},
      {"train/skipped", static_cast<double>(policy.skipped())},
      {"train/diverged", diverged_since ? 1.0 : 0.0}};
  for (const StepScalar& scalar : losses)
    if (scalar.layer < 0) values.emplace_back(tensorboard_tag(scalar), scalar.value);
  scalars(record.step, values);
  console_.progress(progress(m, losses));
}

void RunLog::evaluation(const EvalResult& result) {
  const int64_t step = trainer_.next_step();
  evals_.append(to_json(step, tokens(), result));
  std::vector<std::pair<std::string, double>> values;
  for (const SetResult& set : result.sets) {
    if (set.tokens == 0) continue;
    values.emplace_back("val/" + set.name + "/loss", set.loss);
    values.emplace_back("val/" + set.name + "/bits_per_byte", set.bits_per_byte);
    for (const ClassResult& c : set.classes)
      if (c.tokens > 0) values.emplace_back("val/" + set.name + "/loss_after/" + c.name, c.loss);
  }
  for (const RulerChoice& c : result.ruler) {
    const std::string tag = "ruler/" + c.task + "/" + std::to_string(c.length);
    values.emplace_back(tag + "/accuracy", c.accuracy);
    values.emplace_back(tag + "/loss", c.loss);
  }
  const ModelSummary& a = result.analysis;
  values.emplace_back("analysis/first_token_attention", a.first_token_attention);
  if (a.mean_gate_score) values.emplace_back("analysis/mean_gate_score", *a.mean_gate_score);
  if (a.imbalance) values.emplace_back("analysis/imbalance", *a.imbalance);
  values.emplace_back("analysis/largest_residual", a.largest_residual);
  add_heads(values, a);
  for (const TaskResult& task : result.tasks) {
    values.emplace_back("task/" + task.name + "/accuracy", task.accuracy);
    values.emplace_back("task/" + task.name + "/accuracy_bytes", task.accuracy_bytes);
  }
  scalars(step, values);
  for (const std::string& text : describe(result)) console_.line(text);
}

void RunLog::trace(const Profile& profile) const {
  try {
    folder_.write("trace.json", chrome_trace(profile, device_name(trainer_.context().device)));
  } catch (const std::exception& error) {
    spdlog::warn("{}; training goes on without a trace of step {}", error.what(), trainer_.next_step());
  }
}

void RunLog::status(const char* state, std::optional<double> loss, int64_t saved_step,
                    const nlohmann::ordered_json& more) const {
  const int64_t steps_left = trainer_.max_steps() - trainer_.next_step();
  nlohmann::ordered_json status = {{"state", state},
                                   {"step", trainer_.next_step()},
                                   {"max_steps", trainer_.max_steps()},
                                   {"tokens", tokens()}};
  if (loss) status["loss"] = *loss;
  if (times_.count() > 0 || steps_left == 0)
    status["seconds_left"] = times_.median() * static_cast<double>(steps_left);
  status["saved_step"] = saved_step;
  status.update(more);
  folder_.write_status(status);
}

void RunLog::scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values) {
  if (!events_) return;
  try {
    events_->add(step, values);
  } catch (const std::exception& error) {
    spdlog::warn("{}; no more TensorBoard events", error.what());
    events_.reset();
  }
}

Progress RunLog::progress(const StepMetrics& m, const std::vector<StepScalar>& losses) const {
  Progress p;
  p.step = trainer_.next_step();
  p.max_steps = trainer_.max_steps();
  p.loss = m.loss;
  p.grad_norm = m.grad_norm;
  p.lr = m.lr;
  p.tokens_per_second = tokens_per_second_ > 0
                            ? tokens_per_second_
                            : static_cast<double>(tokens_per_step(config_)) / std::max(times_.median(), 1e-9);
  p.seconds_left = times_.median() * static_cast<double>(p.max_steps - p.step);
  p.rough = times_.count() < 20;
  p.skipped = trainer_.policy().skipped();
  for (const StepScalar& scalar : losses)
    if (!scalar.console.empty()) p.losses.push_back({scalar.console, scalar.value, scalar.digits});
  return p;
}

}  // namespace sluice
