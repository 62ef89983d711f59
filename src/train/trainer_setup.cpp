// How much memory a training takes, and the taking of it.
#include <algorithm>

#include "analysis/summary.h"
#include "checkpoint/write.h"
#include "config/derived.h"
#include "config/load.h"
#include "train/trainer.h"

namespace sluice {
namespace {

int64_t bytes_of(const WholeModel& whole) {
  int64_t bytes = 0;
  for (const auto* tensors : {&whole.weights, &whole.optimizer})
    for (const TensorShape& t : *tensors) {
      int64_t size = dtype_size(t.dtype);
      for (const int64_t dim : t.shape) size *= dim;
      bytes += size;
    }
  return bytes;
}

}  // namespace

MemoryPlan Trainer::measure(const Config& config, Communicator* ranks) {
  return Trainer(config, nullptr, ranks, MemoryPlan{}).measured();
}

/// Of a dry run.
MemoryPlan Trainer::measured() {
  std::set<GpuProduct> products;
  ctx_.products = &products;
  step();
  if ((step_ = config_.model.attention.sparse.phase_steps) > 0) step();  // of the sparse phase, too
  if (analysed_.batch.tokens) {
    model_.forward(ctx_, analysed_.batch, analysed_.saved);
    SummaryAccumulator(model_, store_, config_.analysis).add(ctx_, analysed_.batch, analysed_.saved);
  }
  MemoryPlan plan{.parameters = memory_.parameters.high_water(),
                  .gradients = memory_.gradients.high_water(),
                  .optimizer = memory_.optimizer.high_water(),
                  .activations = memory_.activations.high_water(),
                  .batch = memory_.batch.high_water(),
                  .scratch = ctx_.scratch.high_water(),
                  .pinned = memory_.pinned.high_water(),
                  .checkpoint = bytes_of(whole_model()),
                  .on_gpu = plan_.on_gpu(),
                  .products = std::move(products)};
  ctx_.products = nullptr;
  if (config_.checkpoint.async || plan.on_gpu) {
    CheckpointContent tensors;
    collect_tensors(tensors);
    plan.snapshot = snapshot_bytes(tensors);
  }
  return plan;
}

Trainer::Trainer(const Config& config, const Blend& data, Communicator* ranks)
    : Trainer(config, data, ranks, measure(config, ranks)) {}

Trainer::Trainer(const Config& config, const Blend& data, Communicator* ranks, const MemoryPlan& measured)
    : Trainer(config, &data, ranks, measured) {}

Trainer::Trainer(const Config& config, const Blend* data, Communicator* ranks, const MemoryPlan& memory)
    : Trainer(config, data, ranks, memory, resolve_device(config.train.device)) {}

Trainer::Trainer(const Config& config, const Blend* data, Communicator* ranks, const MemoryPlan& memory,
                 Device device)
    : config_(config),
      data_(data),
      communication_(config.parallel, ranks, device, /*dry_run=*/!data),
      plan_(config, communication_.mesh(), device, /*dry_run=*/!data),
      memory_plan_(memory),
      memory_(memory, device),
      ctx_(data ? std::max<int64_t>(memory.scratch, 64) : 0, device),
      store_(config.lora, config.optimizer.rules),
      expert_gpus_(communication_.of_gpus(MeshAxis::expert, ctx_)),
      sequence_gpus_(communication_.of_gpus(MeshAxis::context, ctx_)),
      model_(config.model, store_,
             plan_.expert_parallel() ? ExpertRanks{&communication_.mesh().expert(),
                                                   config.parallel.expert_capacity, expert_gpus_.get()}
                                     : ExpertRanks{},
             plan_.context_parallel()
                 ? &sequence_ranks_.emplace(communication_.mesh().context(), config.data.seq_len,
                                            communication_.queue(), sequence_gpus_.get())
                 : nullptr),
      optimizer_(config.optimizer, store_,
                 plan_.expert_parallel()),  // the plan has checked the whole model's rules
      grad_sync_(config.parallel, store_, communication_.mesh(), communication_.device_mesh(),
                 communication_.queue()),
      weight_sync_(config.parallel.zero_stage, store_, communication_.mesh(), communication_.device_mesh(),
                   communication_.queue()),
      replicas_(config.parallel.verify_every_steps, communication_.mesh(), /*alone=*/!plan_.on_gpu()),
      samples_(config_, data, plan_, communication_.mesh()),
      loss_sum_(plan_, communication_.mesh()),
      losses_(config),
      graphs_(plan_.on_gpu() && !plan_.dry_run()),
      policy_(config.train, uniform_loss(config.model)),
      max_steps_(training_steps(config)) {
  ctx_.deterministic = config.train.deterministic || plan_.exact();
  ctx_.independent_rows = plan_.exact();
  allocate_parameters();
  allocate_optimizer();
  allocate_buffers();
  attend_densely(config.model.attention.sparse.dense_after(0));
}

Trainer::~Trainer() { communication_.finish(); }

void Trainer::allocate_parameters() {
  const DType dtype = storage_dtype(config_.train.precision);
  const int64_t tokens = tokens_per_micro_batch(config_);
  store_.allocate(ctx_, dtype, tokens, memory_.parameters, &memory_.gradients, plan_.store_layout());
  grad_sync_.allocate(memory_.gradients, plan_.micro_batches());
  weight_sync_.allocate(memory_.parameters);
  if (plan_.follows_units()) store_.add_user(&weight_sync_);
  if (plan_.gradients_follow_units()) store_.add_user(&grad_sync_);
  model_.allocate_tables(ctx_, memory_.parameters, dtype, max_positions(config_));
  if (sequence_ranks_) sequence_ranks_->allocate(ctx_, memory_.parameters, tokens);
  if (!plan_.sums_whole_sequences()) return;
  if (plan_.on_gpu())
    fail(ExitCode::usage, "parallel.determinism: exact with parallel.context = {} needs train.device: cpu",
         config_.parallel.context);
  store_.sum_whole(&*sequence_ranks_);
}

void Trainer::allocate_optimizer() {
  if (replicas_.active() && !plan_.on_gpu()) optimizer_.watch_bits();
  if (!plan_.shards_optimizer()) return optimizer_.allocate(ctx_, memory_.optimizer);
  optimizer_.allocate(ctx_, memory_.optimizer, grad_sync_.pieces());
  for (size_t i = 0; i < grad_sync_.pieces().size(); ++i) {
    shards_.values.push_back(weight_sync_.values(i));
    shards_.grads.push_back(grad_sync_.grads(i));
  }
  if (!plan_.shards_weights()) return;
  int64_t mine = 0;
  for (const ParamStore::Id id : saved_here())
    if (store_.trains(id)) mine += store_.numel(id);
  shards_.to_save = memory_.parameters.alloc("weights to save", store_.dtype(), {mine});
}

void Trainer::allocate_buffers() {
  const DType dtype = store_.dtype();
  const int64_t tokens = tokens_per_micro_batch(config_), sample = tokens / config_.train.micro_batch_size,
                summed = plan_.ranks_of_sum() * tokens;
  samples_.allocate(memory_.batch, memory_.pinned);
  // On a CPU the host's side is the device's.
  host_control_ =
      plan_.on_gpu() ? memory_.pinned.alloc("control", DType::f64, {kUpdateControl}) : optimizer_.control();
  loss_sum_.allocate(memory_.host());
  losses_.allocate({.device = memory_.batch,
                    .host = memory_.pinned,
                    .ranks = plan_.summed(communication_.mesh()),
                    .sequences = plan_.sums_whole_sequences() ? nullptr : &communication_.mesh().context(),
                    .micro_batches = plan_.micro_batches(),
                    .tokens = summed,
                    .losses = accumulate_dtype(dtype),
                    .index_variances = model_.index_variances()});
  micro_batch_.allocate_batch(memory_.batch, memory_.pinned, tokens);
  micro_batch_.saved = model_.make_saved(memory_.activations, tokens, dtype, config_.train.recompute);
  micro_batch_.losses = memory_.activations.alloc("losses", accumulate_dtype(dtype), {tokens});
  summed_losses_ = summed == tokens
                       ? micro_batch_.losses
                       : memory_.activations.alloc("losses of sequences", accumulate_dtype(dtype), {summed});
  dhidden_ = memory_.activations.alloc("dhidden", dtype, {tokens, config_.model.hidden_size});
  replicas_.allocate(replicated_tensors(), memory_.batch, memory_.pinned, plan_.on_gpu());

  if (config_.data.validation.empty()) return;
  analysed_ = micro_batch_;
  if (config_.train.recompute != Recompute::block) return;
  analysed_.allocate_batch(memory_.batch, memory_.pinned, sample);
  analysed_.saved = model_.make_saved(memory_.activations, sample, dtype, Recompute::none);
  analysed_.losses = micro_batch_.losses.rows(0, sample);
}

}  // namespace sluice
