#include "train/trainer.h"

#include <algorithm>
#include <cmath>

#include "analysis/summary.h"
#include "checkpoint/write.h"
#include "comm/collective_errors.h"
#include "comm/reduce.h"
#include "config/load.h"
#include "config/rank_rules.h"
#include "core/device.h"
#include "core/faults.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "optim/schedule.h"

namespace sluice {

namespace {

/// How many micro-batches of a step a rank computes.
int64_t micro_batches_per_rank(const Config& config, const Communicator& ranks) {
  return config.train.global_batch_size / config.train.micro_batch_size / ranks.size();
}

MeshShape mesh_shape(const ParallelConfig& p) {
  return {.tensor = static_cast<int>(p.tensor),
          .context = static_cast<int>(p.context),
          .expert = static_cast<int>(p.expert),
          .pipeline = static_cast<int>(p.pipeline)};
}

DeviceTransport transport_of(Transport transport) {
  switch (transport) {
    case Transport::automatic:
      return DeviceTransport::automatic;
    case Transport::nccl:
      return DeviceTransport::nccl;
    case Transport::host:
      return DeviceTransport::host;
  }
  fail(ExitCode::internal, "unknown transport");
}

/// Whether gradients or weights pass between ranks, or into pieces, beside the computation.
bool needs_queue(const Config& config, const Communicator* ranks, Device device) {
  return (ranks && ranks->size() > 1) || (device == Device::cuda && config.parallel.zero_stage > 0);
}

}  // namespace

Trainer::DeviceRanks::DeviceRanks(Communicator& host, CommQueue& queue, const ParallelConfig& config) {
  queue.run([&] {
    // Evaluation and saving may keep others waiting for long: the watchdog knows of them.
    constexpr double kBackstop = 20;
    world = make_device_communicator(
        host, queue.context(),
        {.transport = transport_of(config.transport), .timeout_seconds = kBackstop * config.timeout_seconds});
    mesh = std::make_unique<Mesh>(*world, mesh_shape(config));
  });
}

MemoryPlan Trainer::measure(const Config& config, Communicator* ranks) {
  require_rank_rules(config, ranks ? ranks->size() : 1);
  const auto whole_bytes = [](const WholeModel& whole) {
    int64_t bytes = 0;
    for (const auto* tensors : {&whole.weights, &whole.optimizer})
      for (const TensorShape& t : *tensors) {
        int64_t size = dtype_size(t.dtype);
        for (const int64_t dim : t.shape) size *= dim;
        bytes += size;
      }
    return bytes;
  };
  Trainer dry(config, nullptr, ranks, MemoryPlan{});
  dry.step();
  if (dry.analysed_.batch.tokens) {
    dry.model_.forward(dry.ctx_, dry.analysed_.batch, dry.analysed_.saved);
    SummaryAccumulator(dry.model_).add(dry.ctx_, dry.analysed_.batch, dry.analysed_.saved);
  }
  MemoryPlan memory{.parameters = dry.parameters_.high_water(),
                    .gradients = dry.gradients_.high_water(),
                    .optimizer = dry.optimizer_state_.high_water(),
                    .activations = dry.activations_.high_water(),
                    .batch = dry.batch_memory_.high_water(),
                    .scratch = dry.ctx_.scratch.high_water(),
                    .pinned = dry.pinned_.high_water(),
                    .checkpoint = whole_bytes(dry.whole_model()),
                    .on_gpu = dry.on_gpu()};
  if (config.checkpoint.async || memory.on_gpu) {
    CheckpointContent tensors;
    dry.collect_tensors(tensors);
    memory.snapshot = snapshot_bytes(tensors);
  }
  return memory;
}

Trainer::Trainer(const Config& config, const Blend& data, Communicator* ranks)
    : Trainer(config, &data, ranks, measure(config, ranks)) {}

Trainer::Trainer(const Config& config, const Blend* data, Communicator* ranks, const MemoryPlan& memory)
    : Trainer(config, data, ranks, memory, resolve_device(config.train.device)) {}

Trainer::Trainer(const Config& config, const Blend* data, Communicator* ranks, const MemoryPlan& memory,
                 Device device)
    : config_(config),
      data_(data),
      queue_(needs_queue(config, ranks, device) ? std::make_unique<CommQueue>(device) : nullptr),
      ranks_(ranks && ranks->size() > 1 ? queue_->queued(*ranks) : make_local_communicator()),
      mesh_(*ranks_, mesh_shape(config.parallel)),
      device_ranks_(
          queue_ && device == Device::cuda && data
              ? std::make_unique<DeviceRanks>(several() ? *ranks : *ranks_, *queue_, config.parallel)
              : nullptr),
      micro_batches_(micro_batches_per_rank(config, *ranks_)),
      memory_(memory),
      max_steps_(training_steps(config)),
      parameters_("parameters", memory.parameters, device),
      gradients_("gradients", memory.gradients, device),
      optimizer_state_("optimizer", memory.optimizer, device),
      activations_("activations", memory.activations, device),
      batch_memory_("batch", memory.batch, device),
      pinned_(Arena::pinned("pinned", memory.pinned)),
      ctx_(data ? std::max<int64_t>(memory.scratch, 64) : 0, device),
      store_(config.lora, config.optimizer.rules),
      expert_moves_(device_ranks_ && shared_experts() ? queue_->queued(device_ranks_->mesh->expert(), &ctx_)
                                                      : nullptr),
      model_(config.model, store_,
             shared_experts()
                 ? ExpertRanks{&mesh_.expert(), config.parallel.expert_capacity, expert_moves_.get()}
                 : ExpertRanks{}),
      optimizer_(config.optimizer, store_),
      grad_sync_(config.parallel, store_, mesh_, moves(), queue_.get()),
      weight_sync_(config.parallel.zero_stage, store_, mesh_, moves(), queue_.get()),
      replicas_(config.parallel.verify_every_steps, mesh_),
      policy_(config.train, chance_loss(config.model)),
      losses_(config) {
  ctx_.deterministic = config.train.deterministic || exact();
  const DType dtype = storage_dtype(config.train.precision);
  const int64_t seq_len = config.data.seq_len, tokens = config.train.micro_batch_size * seq_len;
  store_.allocate(ctx_, dtype, tokens, parameters_, &gradients_, layout());
  grad_sync_.allocate(gradients_, micro_batches_);
  weight_sync_.allocate(parameters_);
  if ((several() || exact() || config.parallel.zero_stage > 0)) {
    store_.add_user(&weight_sync_);
    store_.add_user(&grad_sync_);
  }
  model_.allocate_tables(ctx_, parameters_, dtype, max_positions(config));
  if (config.parallel.zero_stage == 0) {
    optimizer_.allocate(ctx_, optimizer_state_);
  } else {
    optimizer_.allocate(ctx_, optimizer_state_, grad_sync_.pieces());
    for (size_t i = 0; i < grad_sync_.pieces().size(); ++i) {
      piece_values_.push_back(weight_sync_.values(i));
      piece_grads_.push_back(grad_sync_.grads(i));
    }
  }
  if (config.parallel.zero_stage >= 3) {
    int64_t mine = 0;
    for (const ParamStore::Id id : saved_here())
      if (store_.trains(id)) mine += store_.numel(id);
    whole_weights_ = parameters_.alloc("weights to save", dtype, {mine});
  }

  // On a CPU the host's side is the device's.
  const int64_t micro_batches = micro_batches_;
  for (Samples* slot = &samples_[0]; slot != &samples_[on_gpu() ? 2 : 1]; ++slot) {
    slot->device = batch_memory_.alloc("samples", DType::i32, {micro_batches, 4, tokens});
    slot->host = on_gpu() ? pinned_.alloc("samples", DType::i32, {micro_batches, 4, tokens}) : slot->device;
  }
  host_control_ = on_gpu() ? pinned_.alloc("control", DType::f64, {kUpdateControl}) : optimizer_.control();
  if (several() || exact())
    micro_losses_ = (on_gpu() ? pinned_ : batch_memory_)
                        .alloc("losses of micro-batches", DType::f64, {ranks_->size() * losses_here()});
  losses_.allocate({.device = batch_memory_,
                    .host = pinned_,
                    .ranks = mesh_.data(),
                    .micro_batches = micro_batches,
                    .tokens = tokens,
                    .losses = accumulate_dtype(dtype)});
  micro_batch_.allocate_batch(batch_memory_, pinned_, tokens);
  micro_batch_.saved = model_.make_saved(activations_, tokens, dtype, config.train.recompute);
  micro_batch_.losses = activations_.alloc("losses", accumulate_dtype(dtype), {tokens});
  dhidden_ = activations_.alloc("dhidden", dtype, {tokens, config.model.hidden_size});
  replicas_.allocate(held_by_several(), batch_memory_, pinned_, on_gpu());

  if (config.data.validation.empty()) return;
  analysed_ = micro_batch_;
  if (config.train.recompute != Recompute::block) return;
  analysed_.allocate_batch(batch_memory_, pinned_, seq_len);
  analysed_.saved = model_.make_saved(activations_, seq_len, dtype, Recompute::none);
  analysed_.losses = micro_batch_.losses.rows(0, seq_len);
}

Trainer::~Trainer() {
  if (queue_) queue_->finish();
}

// ---- the step

StepMetrics Trainer::step() {
  StepMetrics m;
  m.lr = learning_rate(config_.optimizer, step_, max_steps_);
  load(step_);
  tell_device(m.lr);
  grad_sync_.begin_step(ctx_, step_);
  losses_.begin_step(ctx_);
  for (int64_t i = 0; i < num_micro_batches(); ++i) {
    copy(ctx_, micro_batch_.samples, samples(step_).device.rows(i, 1));
    grad_sync_.begin_micro_batch(ctx_, i);
    if (goes_unrecorded(i))
      forward_backward();
    else
      once_recorded(micro_graph_, &Trainer::forward_backward);
    grad_sync_.end_micro_batch(ctx_);
    losses_.end_micro_batch(ctx_, i);
    collect_losses(i);
  }
  if (!measuring()) faults::at("all_reduce", step_);
  sound_ = measuring();
  agree_on_losses();
  grad_sync_.finish(ctx_);
  // Here every rank has gathered all weights that it keeps whole (ZeRO 1 and 2), and uses them for the last
  // time before the update.
  flip_bit();
  if (measuring() || replicas_.due(step_)) replicas_.compare(ctx_, *ranks_, step_, common_state());
  if (norm_needs_ranks())
    update();
  else
    once_recorded(update_graph_, &Trainer::update);

  copy(ctx_, host_control_, optimizer_.control());
  losses_.fetch(ctx_);
  if (on_gpu() && step_ + 1 < max_steps_) load_ahead();
  synchronize(ctx_);
  if (measuring()) return m;
  losses_.collect(*ranks_, samples(step_).counted_tokens);
  warm_ = true;

  const UpdateControl& control = *reinterpret_cast<const UpdateControl*>(host_control_.as<double>());
  m.loss = control.loss;
  m.grad_norm = control.grad_norm;
  m.counted_tokens = samples(step_).counted_tokens;
  if (m.counted_tokens == 0) {
    m.loss = m.grad_norm = std::numeric_limits<double>::quiet_NaN();
    m.skipped = true;
    problem_ = fmt::format(
        "step {}: none of its tokens is predicted (all are the first of their document, data.document_mask)",
        step_);
    ++step_;
    return m;
  }
  const StepPolicy before = policy_;
  const StepPolicy::Judgement judgement = policy_.judge(step_, m.loss, m.grad_norm);
  m.spike = judgement.spike;
  m.skipped = judgement.verdict != StepPolicy::Verdict::apply;
  SLUICE_CHECK(m.skipped == (control.apply == 0),
               "step {}: the device and the policy disagree on loss {}, norm {}", step_, m.loss, m.grad_norm);
  if (m.skipped) {
    problem_ = judgement.finite ? fmt::format("step {}: loss {:.4g}, gradient norm {:.4g}: a spike", step_,
                                              m.loss, m.grad_norm)
                                : fmt::format("step {}: {} is not finite; first in {}", step_,
                                              std::isfinite(m.loss) ? "gradient norm" : "loss",
                                              first_nonfinite(std::isfinite(m.loss)));
    if (judgement.verdict == StepPolicy::Verdict::stop) {
      policy_ = before;
      sound_ = true;
      throw SharedError(
          ExitCode::numeric,
          fmt::format(
              "{}{}", problem_,
              judgement.budget_exhausted ? "; more than 10 of the last 1000 steps were skipped" : ""));
    }
  } else {
    optimizer_.count_applied();
    losses_.applied();
  }
  ++step_;
  sound_ = true;
  return m;
}

/// The next step's, while the device computes this one. What is wrong with them is found again by the next
/// step, which has changed nothing then.
void Trainer::load_ahead() {
  try {
    load(step_ + 1);
  } catch (const SharedError&) {
  }
}

/// Loads the samples of a step, a pure function of its number, and sends them to the device. What is wrong
/// with one rank's is an error on all.
void Trainer::load(int64_t step) {
  Samples& slot = samples(step);
  if (measuring() || slot.step == step) return;
  faults::at("data", step);
  slot.step = -1;
  std::string problem;
  try {
    read_samples(slot, step);
  } catch (const Error& error) {
    problem = error.what();
  }
  int64_t sums[2] = {slot.counted_tokens, problem.empty() ? 0 : 1};
  all_reduce(*ranks_, sums, 2);
  if (sums[1] > 0) throw SharedError(ExitCode::data, first_problem(*ranks_, problem));
  slot.counted_tokens = sums[0];
  prefetch(ctx_, slot.device, slot.host);
  slot.step = step;
}

/// This rank's samples, on the host.
void Trainer::read_samples(Samples& slot, int64_t step) const {
  slot.counted_tokens = 0;
  for (int64_t i = 0; i < num_micro_batches(); ++i) {
    // One at a time: first_key is an index into the micro-batch.
    const Batch rows = batch_of(slot.host.rows(i, 1).view({4, slot.host.dim(2)}));
    int32_t* targets = rows.targets.as<int32_t>();
    data_->fill(first_sample(config_, step, ranks_->rank() * micro_batches_ + i),
                config_.train.micro_batch_size, rows.tokens.as<int32_t>(), targets,
                rows.positions.as<int32_t>(), rows.first_key.as<int32_t>());
    slot.counted_tokens += rows.targets.numel() - std::count(targets, targets + rows.targets.numel(), -1);
  }
}

/// What the device needs to know of this step, in one small copy.
void Trainer::tell_device(double lr) {
  await_prefetch(ctx_);
  if (measuring()) return;
  UpdateControl& control = *reinterpret_cast<UpdateControl*>(host_control_.as<double>());
  control = {.lr = lr,
             .step = static_cast<double>(optimizer_.steps_applied() + 1),
             .gradient_scale = 1.0 / static_cast<double>(std::max<int64_t>(samples(step_).counted_tokens, 1)),
             .max_grad_norm = config_.train.max_grad_norm,
             .loss_limit = samples(step_).counted_tokens > 0 ? policy_.loss_limit()
                                                             : -1,  // of no tokens: applies nothing
             .grad_norm_limit = policy_.grad_norm_limit()};
  copy(ctx_, optimizer_.control(), host_control_);
}

/// Whether computing a micro-batch is more than ops that are the same for each: ranks hear of each other, or
/// its gradients have their own place in the exact sum.
bool Trainer::goes_unrecorded(int64_t micro_batch) const {
  if (losses_.asks_ranks() || shared_experts() || exact()) return true;
  const int64_t stage = config_.parallel.zero_stage;
  const bool gradients_leave = stage >= 2 || (several() && micro_batch + 1 == micro_batches_);
  const bool weights_come = stage >= 3 || (stage >= 1 && micro_batch == 0);
  return gradients_leave || weights_come;
}

/// Runs the ops; on a GPU, from the second step on, as a graph recorded once. A profile needs them one by
/// one.
void Trainer::once_recorded(Graph& graph, void (Trainer::*ops)()) {
  if (!on_gpu() || measuring() || !warm_ || ctx_.profile) return (this->*ops)();
  if (!graph.recorded()) graph.record(ctx_, [&] { (this->*ops)(); });
  graph.launch(ctx_);
}

/// One micro-batch: adds its gradients and its losses.
void Trainer::forward_backward() {
  const Tensor& control = optimizer_.control();
  ForwardBuffers& b = micro_batch_;
  const StepLoad load = losses_.load();
  model_.forward(ctx_, b.batch, b.saved, load);
  model_.loss_forward_backward(ctx_, b.losses, dhidden_, b.batch, b.saved,
                               update_field(control, &UpdateControl::gradient_scale), load);
  sum(ctx_, update_field(control, &UpdateControl::loss), b.losses, Into::add);
  model_.backward(ctx_, dhidden_, b.batch, b.saved, load);
}

/// Keeps the sum of one micro-batch's losses apart, where other ranks have some too, or where their order
/// must not matter.
void Trainer::collect_losses(int64_t micro_batch) {
  if (!micro_losses_ || measuring() || losses_here() != micro_batches_) return;
  const Tensor loss = update_field(optimizer_.control(), &UpdateControl::loss);
  copy(ctx_, micro_losses_.rows(ranks_->rank() * micro_batches_ + micro_batch, 1), loss);
  fill(ctx_, loss, 0.0);
}

/// The sum over all micro-batches of the step, one after the other, on every rank.
void Trainer::agree_on_losses() {
  if (!micro_losses_ || measuring()) return;
  const Tensor total = update_field(optimizer_.control(), &UpdateControl::loss);
  double *losses = micro_losses_.as<double>(), *mine = losses + ranks_->rank() * losses_here();
  if (losses_here() != micro_batches_)
    *mine = read_scalar(ctx_, total);
  else
    synchronize(ctx_);
  ranks_->all_gather(losses, mine, losses_here() * static_cast<int64_t>(sizeof(double)));
  double sum_of_all = 0;
  for (int64_t i = 0; i < micro_losses_.dim(0); ++i) sum_of_all += losses[i];
  write_tensor(ctx_, total, &sum_of_all);
}

void Trainer::update() {
  if (on_gpu() && !norm_needs_ranks()) {
    optimizer_.update(ctx_);
    return store_.pack_trained(ctx_);
  }
  const Tensor& control = optimizer_.control();
  grad_sync_.sum_squares(ctx_, update_field(control, &UpdateControl::squares));
  optimizer_.judge_and_update(ctx_, piece_values_, piece_grads_);
  // A GPU alone knows whether it has applied the update: the same weights are gathered again where it has
  // not.
  if (measuring() || on_gpu() || update_field(control, &UpdateControl::apply).as<double>()[0] != 0)
    weight_sync_.changed(ctx_);
}

}  // namespace sluice
