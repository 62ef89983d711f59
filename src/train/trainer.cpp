#include "train/trainer.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "comm/collective_errors.h"
#include "core/device.h"
#include "core/faults.h"
#include "ops/reduce.h"
#include "optim/schedule.h"

namespace sluice {

StepMetrics Trainer::step() {
  StepMetrics m;
  m.lr = learning_rate(config_.optimizer, step_, max_steps_);
  begin_step(m.lr);
  for (int64_t i = 0; i < plan_.computed_micro_batches(); ++i) compute_micro_batch(i);
  sum_over_ranks();
  compare_replicas();
  update_weights();
  fetch_results();
  if (plan_.dry_run()) return m;

  read_results(m);
  if (m.counted_tokens == 0)
    skip_empty_step(m);
  else
    decide_step(m);
  ++step_;
  sound_ = true;
  return m;
}

/// Whether attention of kind sparse sees all keys from now on, in steps and evaluations.
void Trainer::attend_densely(bool dense) {
  if (dense != model_.dense_warm_up()) graphs_.ops_changed();
  model_.set_dense_warm_up(dense);
}

void Trainer::begin_step(double lr) {
  if (!plan_.dry_run() && optimizer_.wants_bits()) optimizer_.take_bits(ctx_, shards_.values);
  attend_densely(config_.model.attention.sparse.dense_in_step(step_));
  samples_.load(ctx_, step_);
  upload_step_control(lr);
  grad_sync_.begin_step(ctx_, step_);
  losses_.begin_step(ctx_);
}

/// All numbers that the device needs of this step, in one small copy.
void Trainer::upload_step_control(double lr) {
  await_prefetch(ctx_);
  if (plan_.dry_run()) return;
  const int64_t tokens = samples_.counted_tokens(step_);
  UpdateControl& control = *reinterpret_cast<UpdateControl*>(host_control_.as<double>());
  control = {.lr = lr,
             .step = static_cast<double>(optimizer_.steps_applied() + 1),
             .gradient_scale = 1.0 / static_cast<double>(std::max<int64_t>(tokens, 1)),
             .token_weight = 1.0 / static_cast<double>(std::max<int64_t>(samples_.real_tokens(step_), 1)),
             .max_grad_norm = config_.train.max_grad_norm,
             .loss_limit = tokens > 0 ? policy_.loss_limit() : -1,  // without tokens nothing is applied
             .grad_norm_limit = policy_.grad_norm_limit()};
  copy(ctx_, optimizer_.control(), host_control_);
}

/// Adds this rank's i-th micro-batch to gradients and losses.
void Trainer::compute_micro_batch(int64_t i) {
  copy(ctx_, micro_batch_.samples, samples_.micro_batch(step_, i));
  grad_sync_.begin_micro_batch(ctx_, i);
  if (plan_.needs_eager(i) || losses_.asks_ranks())
    forward_backward();
  else
    graphs_.replay_or_run(ctx_, StepGraphs::Part::micro_batch, [this] { forward_backward(); });
  grad_sync_.end_micro_batch(ctx_);
  losses_.end_micro_batch(ctx_, i);
  loss_sum_.end_micro_batch(ctx_, i, control(&UpdateControl::loss));
}

void Trainer::forward_backward() {
  ForwardBuffers& b = micro_batch_;
  StepLoad load = losses_.load();
  load.indexers.gradient_scale = control(&UpdateControl::gradient_scale);
  load.routers.token_weight = control(&UpdateControl::token_weight);
  model_.forward(ctx_, b.batch, b.saved, load);
  model_.loss_forward_backward(ctx_, summed_losses_, dhidden_, b.batch, b.saved,
                               control(&UpdateControl::gradient_scale), load);
  sum(ctx_, control(&UpdateControl::loss), summed_losses_, Into::add);
  model_.backward(ctx_, dhidden_, b.batch, b.saved, load);
}

/// The loss and the gradient of the global batch.
void Trainer::sum_over_ranks() {
  if (!plan_.dry_run()) faults::at("all_reduce", step_);
  sound_ = plan_.dry_run();
  loss_sum_.finish(ctx_, control(&UpdateControl::loss));
  grad_sync_.finish(ctx_);
}

/// Here every rank has gathered all weights that it keeps whole (ZeRO 1 and 2), and uses them for the last
/// time before the update.
void Trainer::compare_replicas() {
  flip_bit();
  if (plan_.dry_run() || replicas_.due(step_))
    replicas_.compare(ctx_, ranks(), step_, common_state(), changed_bits());
}

void Trainer::update_weights() {
  if (plan_.norm_needs_all_ranks())
    update();
  else
    graphs_.replay_or_run(ctx_, StepGraphs::Part::update, [this] { update(); });
}

void Trainer::update() {
  if (plan_.updates_on_device_alone()) {
    optimizer_.update(ctx_);
    return store_.pack_trained(ctx_);
  }
  grad_sync_.sum_squares(ctx_, control(&UpdateControl::squares));
  optimizer_.judge_and_update(ctx_, shards_.values, shards_.grads);
  // A GPU alone knows whether it has applied the update: the same weights are gathered again where it has
  // not.
  if (plan_.dry_run() || plan_.on_gpu() || control(&UpdateControl::apply).as<double>()[0] != 0)
    weight_sync_.changed(ctx_);
}

/// Brings the step's results to the host; the next step's samples are loaded while the device computes.
void Trainer::fetch_results() {
  copy(ctx_, host_control_, optimizer_.control());
  losses_.fetch(ctx_);
  if (plan_.loads_ahead() && step_ + 1 < max_steps_) samples_.load_ahead(ctx_, step_ + 1);
  synchronize(ctx_);
}

void Trainer::read_results(StepMetrics& m) {
  graphs_.step_done();
  m.counted_tokens = samples_.counted_tokens(step_);
  losses_.collect(plan_.summed(communication_.mesh()), m.counted_tokens);
  const UpdateControl& control = *reinterpret_cast<const UpdateControl*>(host_control_.as<double>());
  m.loss = control.loss;
  m.grad_norm = control.grad_norm;
  m.skipped = control.apply == 0;
}

void Trainer::skip_empty_step(StepMetrics& m) {
  m.loss = m.grad_norm = std::numeric_limits<double>::quiet_NaN();
  m.skipped = true;
  problem_ = fmt::format(
      "step {}: none of its tokens is predicted (all are the first of their document, data.document_mask)",
      step_ + 1);
}

/// What follows from the step's loss and gradient norm. The device has applied the update or not by the same
/// limits.
void Trainer::decide_step(StepMetrics& m) {
  const StepPolicy before = policy_;
  const StepPolicy::Decision decision = policy_.decide(step_, m.loss, m.grad_norm);
  m.spike = decision.spike;
  SLUICE_CHECK(m.skipped == (decision.action != StepPolicy::Action::apply),
               "step {}: the device and the policy disagree on loss {}, norm {}", step_ + 1, m.loss,
               m.grad_norm);
  if (!m.skipped) {
    optimizer_.count_applied();
    losses_.applied(ctx_);
    return;
  }
  problem_ = decision.finite ? fmt::format("step {}: loss {:.4g}, gradient norm {:.4g}: a spike", step_ + 1,
                                           m.loss, m.grad_norm)
                             : fmt::format("step {}: {} is not finite; first in {}", step_ + 1,
                                           std::isfinite(m.loss) ? "gradient norm" : "loss",
                                           first_nonfinite(std::isfinite(m.loss)));
  if (decision.action != StepPolicy::Action::stop) return;
  policy_ = before;
  sound_ = true;
  throw SharedError(
      ExitCode::numeric,
      problem_ + (decision.budget_exhausted ? "; more than 10 of the last 1000 steps were skipped" : ""));
}

}  // namespace sluice
