#include "train/sample_loader.h"

#include <algorithm>
#include <string>

#include "comm/collective_errors.h"
#include "config/derived.h"
#include "core/device.h"
#include "core/faults.h"
#include "core/targets.h"
#include "nn/forward_buffers.h"
#include "nn/sequence_ranks.h"

namespace sluice {
SampleLoader::SampleLoader(const Config& config, const Blend* data, const StepPlan& plan, const Mesh& mesh)
    : config_(config),
      data_(data),
      plan_(plan),
      mesh_(mesh),
      split_{.ranks = mesh.context().size(), .rank = mesh.context().rank(), .seq_len = config.data.seq_len},
      reports_(static_cast<size_t>(mesh.world().size())),
      token_ranks_(mesh.layout().group(MeshAxis::tokens, mesh.world().rank())) {}

void SampleLoader::allocate(Arena& device_memory, Arena& host_memory) {
  const int64_t tokens = tokens_per_micro_batch(config_);
  for (size_t i = 0; i < (plan_.loads_ahead() ? 2U : 1U); ++i) {
    const auto samples = [&](Arena& memory) {
      return memory.alloc("samples", DType::i32, {plan_.micro_batches(), 4, tokens});
    };
    slots_[i].device = samples(device_memory);
    slots_[i].host = plan_.on_gpu() ? samples(host_memory) : slots_[i].device;
  }
  if (plan_.context_parallel())
    whole_ = (plan_.on_gpu() ? host_memory : device_memory)
                 .alloc("whole sample", DType::i32, {4, config_.data.seq_len});
}

void SampleLoader::load(Context& ctx, int64_t step) {
  Slot& s = slot(step);
  if (plan_.dry_run() || s.step == step) return;
  faults::at("data", step);
  s.step = -1;
  Report mine;
  std::string problem;
  try {
    mine.counts = read(s.host, step);
  } catch (const Error& error) {
    problem = error.what();
    mine.failed = 1;
  }
  mesh_.world().all_gather(reports_.data(), &mine, sizeof mine);
  if (std::any_of(reports_.begin(), reports_.end(), [](const Report& r) { return r.failed != 0; }))
    throw SharedError(ExitCode::data, first_problem(mesh_.world(), problem));
  s.counts = {};
  for (const int rank : token_ranks_) {
    const Counts& counts = reports_[static_cast<size_t>(rank)].counts;
    s.counts.predicted += counts.predicted, s.counts.real += counts.real;
  }
  prefetch(ctx, s.device, s.host);
  s.step = step;
}

void SampleLoader::load_ahead(Context& ctx, int64_t step) {
  try {
    load(ctx, step);
  } catch (const SharedError&) {  // found again by the step itself, which has changed nothing then
  }
}

void SampleLoader::forget() {
  for (Slot& s : slots_) s.step = -1;
}

/// Fills this rank's samples of a step and counts their tokens.
SampleLoader::Counts SampleLoader::read(const Tensor& host, int64_t step) const {
  Counts counts;
  for (int64_t i = 0; i < plan_.micro_batches(); ++i) {
    // One micro-batch at a time: first_key is an index into it.
    const Batch rows = batch_of(host.rows(i, 1).view({4, host.dim(2)}));
    int32_t* targets = rows.targets.as<int32_t>();
    const int64_t first = first_sample(config_, step, plan_.global_micro_batch(i));
    if (whole_)
      read_part(rows, first);
    else
      data_->fill(first, config_.train.micro_batch_size, rows.tokens.as<int32_t>(), targets,
                  rows.positions.as<int32_t>(), rows.first_key.as<int32_t>());
    for (int64_t t = 0; t < rows.targets.numel(); ++t)
      counts.predicted += targets[t] >= 0, counts.real += targets[t] != kPadding;
  }
  return counts;
}

/// Of every sample this rank's chunks. A sample is read whole, so that targets, positions and documents at
/// the chunks' ends are those of the sample.
void SampleLoader::read_part(const Batch& rows, int64_t first) const {
  const Batch whole = batch_of(whole_);
  for (int64_t i = 0; i < config_.train.micro_batch_size; ++i) {
    data_->fill(first + i, 1, whole.tokens.as<int32_t>(), whole.targets.as<int32_t>(),
                whole.positions.as<int32_t>(), whole.first_key.as<int32_t>());
    take_part(split_, rows, i, whole);
  }
}

}  // namespace sluice
