#include "train/trainer.h"

#include <algorithm>
#include <cmath>

#include "analysis/summary.h"
#include "config/load.h"
#include "ops/reduce.h"
#include "optim/schedule.h"

namespace sluice {

DType storage_dtype(Precision precision) {
  switch (precision) {
    case Precision::f32:
      return DType::f32;
    case Precision::bf16:
      return DType::bf16;
    case Precision::f64:
      return DType::f64;
  }
  fail(ExitCode::internal, "unknown precision");
}

MemoryPlan Trainer::measure(const Config& config) {
  Trainer dry(config, nullptr, MemoryPlan{});
  dry.step();
  if (dry.analysed_.batch.tokens) {
    dry.model_.forward(dry.ctx_, dry.analysed_.batch, dry.analysed_.saved);
    SummaryAccumulator(dry.model_).add(dry.ctx_, dry.analysed_.batch, dry.analysed_.saved);
  }
  return {dry.parameters_.high_water(),  dry.gradients_.high_water(),    dry.optimizer_state_.high_water(),
          dry.activations_.high_water(), dry.batch_memory_.high_water(), dry.ctx_.scratch.high_water()};
}

Trainer::Trainer(const Config& config, const Blend& data) : Trainer(config, &data, measure(config)) {}

Trainer::Trainer(const Config& config, const Blend* data, const MemoryPlan& memory)
    : config_(config),
      data_(data),
      memory_(memory),
      max_steps_(training_steps(config)),
      parameters_("parameters", memory.parameters),
      gradients_("gradients", memory.gradients),
      optimizer_state_("optimizer", memory.optimizer),
      activations_("activations", memory.activations),
      batch_memory_("batch", memory.batch),
      ctx_(data ? std::max<int64_t>(memory.scratch, 64) : 0),
      model_(config.model, store_),
      optimizer_(config.optimizer, store_),
      policy_(config.train) {
  const DType dtype = storage_dtype(config.train.precision);
  const int64_t seq_len = config.data.seq_len, global = config.train.global_batch_size * seq_len;
  const int64_t tokens = config.train.micro_batch_size * seq_len;
  store_.allocate(ctx_, dtype, tokens, parameters_, &gradients_);
  model_.allocate_tables(parameters_, dtype, max_positions(config));
  optimizer_.allocate(optimizer_state_);

  global_batch_ = {batch_memory_.alloc("tokens", DType::i32, {global}),
                   batch_memory_.alloc("targets", DType::i32, {global}),
                   batch_memory_.alloc("positions", DType::i32, {global}),
                   batch_memory_.alloc("first_key", DType::i32, {global})};
  select(0);
  micro_batch_.saved = model_.make_saved(activations_, tokens, dtype, config.train.recompute);
  micro_batch_.losses = activations_.alloc("losses", accumulate_dtype(dtype), {tokens});
  dhidden_ = activations_.alloc("dhidden", dtype, {tokens, config.model.hidden_size});

  if (config.data.validation.empty()) return;
  analysed_ = micro_batch_;
  if (config.train.recompute != Recompute::block) return;
  analysed_.batch = {global_batch_.tokens.rows(0, seq_len), global_batch_.targets.rows(0, seq_len),
                     global_batch_.positions.rows(0, seq_len), global_batch_.first_key.rows(0, seq_len)};
  analysed_.saved = model_.make_saved(activations_, seq_len, dtype, Recompute::none);
  analysed_.losses = micro_batch_.losses.rows(0, seq_len);
}

void Trainer::initialize() {
  if (config_.train.init_from.empty()) {
    store_.initialize(config_.train.seed);
  } else {
    std::vector<NamedTensor> weights;
    for (int id = 0; id < static_cast<int>(store_.specs().size()); ++id)
      weights.push_back({store_.specs()[static_cast<size_t>(id)].name, store_.value(id)});
    load_weights(config_.train.init_from, weights);
  }
  optimizer_.sync_master(ctx_);
  store_.pack(ctx_);
}

CheckpointContent Trainer::content() const {
  CheckpointContent content;
  content.step = step_;
  for (int id = 0; id < static_cast<int>(store_.specs().size()); ++id) {
    const std::string& name = store_.specs()[static_cast<size_t>(id)].name;
    content.weights.push_back({name, store_.value(id)});
    content.optimizer.push_back({name + ".m", optimizer_.m(id)});
    content.optimizer.push_back({name + ".v", optimizer_.v(id)});
    if (const Tensor master = optimizer_.master(id)) content.optimizer.push_back({name + ".master", master});
  }
  content.state = {{"step", step_},
                   {"samples", step_ * config_.train.global_batch_size},
                   {"tokens", step_ * tokens_per_step(config_)},
                   {"adam_steps", optimizer_.steps_applied()},
                   {"policy", policy_.state()}};
  return content;
}

void Trainer::restore(const CheckpointInfo& checkpoint) {
  const CheckpointContent targets = content();
  load_checkpoint(checkpoint.path, targets.weights, targets.optimizer);
  try {
    step_ = checkpoint.state.at("step").get<int64_t>();
    optimizer_.set_steps_applied(checkpoint.state.at("adam_steps").get<int64_t>());
    policy_.restore(checkpoint.state.at("policy"));
  } catch (const nlohmann::json::exception& error) {
    fail(ExitCode::data, "{}/state.json is not a training state: {}", checkpoint.path, error.what());
  }
  store_.pack(ctx_);
}

// ---- the step

StepMetrics Trainer::step() {
  StepMetrics m;
  m.lr = learning_rate(config_.optimizer, step_, max_steps_);
  store_.zero_grads(ctx_);

  const double gradient_scale = 1.0 / static_cast<double>(std::max<int64_t>(load(step_), 1));
  bool finite = true;
  for (int64_t i = 0; finite && i < num_micro_batches(); ++i) {
    select(i);
    m.loss += forward_backward(gradient_scale);
    finite = std::isfinite(m.loss);
  }
  m.grad_norm = finite ? gradient_norm(ctx_, store_) : m.loss;

  const StepPolicy::Judgement judgement =
      measuring() ? StepPolicy::Judgement{} : policy_.judge(step_, m.loss, m.grad_norm);
  m.spike = judgement.spike;
  m.skipped = judgement.verdict != StepPolicy::Verdict::apply;
  if (m.skipped) {
    problem_ = judgement.finite ? fmt::format("step {}: loss {:.4g}, gradient norm {:.4g}: a spike", step_,
                                              m.loss, m.grad_norm)
                                : fmt::format("step {}: {} is not finite; first in {}", step_,
                                              finite ? "gradient norm" : "loss", first_nonfinite(finite));
    if (judgement.verdict == StepPolicy::Verdict::stop)
      fail(ExitCode::numeric, "{}{}", problem_,
           judgement.budget_exhausted ? "; more than 10 of the last 1000 steps were skipped" : "");
  } else {
    const double limit = config_.train.max_grad_norm;
    optimizer_.step(ctx_, m.lr, limit > 0 && m.grad_norm > limit ? limit / m.grad_norm : 1.0);
    store_.pack(ctx_);
  }
  ++step_;
  return m;
}

/// Loads the samples of a step, a pure function of its number. Returns how many tokens count.
int64_t Trainer::load(int64_t step) {
  if (measuring()) return 1;
  int64_t counted = 0;
  for (int64_t i = 0; i < num_micro_batches(); ++i) {
    select(i);
    // One at a time: first_key is an index into the micro-batch.
    const Batch& batch = micro_batch_.batch;
    int32_t* targets = batch.targets.as<int32_t>();
    data_->fill(step * config_.train.global_batch_size + i * config_.train.micro_batch_size,
                config_.train.micro_batch_size, batch.tokens.as<int32_t>(), targets,
                batch.positions.as<int32_t>(), batch.first_key.as<int32_t>());
    counted += batch.targets.numel() - std::count(targets, targets + batch.targets.numel(), -1);
  }
  return counted;
}

void Trainer::select(int64_t i) {
  const int64_t tokens = config_.train.micro_batch_size * config_.data.seq_len;
  micro_batch_.batch = {
      global_batch_.tokens.rows(i * tokens, tokens), global_batch_.targets.rows(i * tokens, tokens),
      global_batch_.positions.rows(i * tokens, tokens), global_batch_.first_key.rows(i * tokens, tokens)};
}

/// One micro-batch: adds its gradients, returns its share of the loss.
double Trainer::forward_backward(double gradient_scale) {
  auto& [batch, saved, losses] = micro_batch_;
  model_.forward(ctx_, batch, saved);
  model_.loss_forward_backward(ctx_, losses, dhidden_, batch, saved, gradient_scale);
  double loss = 0;
  sum(ctx_, &loss, losses);
  if (std::isfinite(loss)) model_.backward(ctx_, dhidden_, batch, saved);
  return loss * gradient_scale;
}

/// Weights, then activations in the order they are computed, or gradients in theirs.
std::string Trainer::first_nonfinite(bool after_backward) {
  const auto is_finite = [this](const Tensor& t) {
    double largest = 0;
    if (t.dtype == DType::f32 || t.dtype == DType::bf16 || t.dtype == DType::f64) max_abs(ctx_, &largest, t);
    return std::isfinite(largest);
  };
  const int parameters = static_cast<int>(store_.specs().size());
  for (int id = 0; id < parameters; ++id)
    if (!is_finite(store_.value(id))) return "the weight " + store_.specs()[static_cast<size_t>(id)].name;
  if (!after_backward) {
    for (const Arena::Entry& entry : activations_.entries())
      if (!is_finite(entry.tensor)) return "the activation " + entry.name;
  } else {
    for (int id = parameters - 1; id >= 0; --id)
      if (!is_finite(store_.grad(id)))
        return "the gradient of " + store_.specs()[static_cast<size_t>(id)].name;
  }
  return "the sum";
}

}  // namespace sluice
