#include "nn/indexer_loss.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "checkpoint/state_reader.h"
#include "core/device.h"
#include "core/host_view.h"
#include "ops/elementwise.h"

namespace sluice {
namespace {

/// Of one element, on any device; waits.
double read(Context& ctx, const Tensor& variance) {
  const HostView view(ctx, variance);
  const Tensor& t = view.tensor();
  if (t.dtype == DType::f64) return *t.as<double>();
  return static_cast<double>(t.dtype == DType::f32 ? *t.as<float>() : static_cast<float>(*t.as<bf16>()));
}
void write(Context& ctx, const Tensor& variance, double x) {
  HostView view(ctx, variance, HostView::Content::uninitialized);
  const Tensor& t = view.tensor();
  if (t.dtype == DType::f64) *t.as<double>() = x;
  if (t.dtype == DType::f32) *t.as<float>() = static_cast<float>(x);
  if (t.dtype == DType::bf16) *t.as<bf16>() = bf16(static_cast<float>(x));
  view.write_back();
}

}  // namespace

IndexerLoad make_indexer_load(const ModelConfig& config, Arena& memory) {
  IndexerLoad load;
  if (config.attention.kind != AttentionKind::sparse) return load;
  load.sums = memory.alloc("indexer.sums", DType::f64, {config.num_hidden_layers, kIndexSums});
  return load;
}

void IndexerLossState::allocate(const StepMemory& memory) {
  rank_ = memory.ranks.rank(), micro_batches_ = memory.micro_batches;
  load_ = make_indexer_load(config_, memory.device);
  if (!active()) return;
  const int64_t n = load_.sums.numel();
  rows_ = (memory.device.device() == Device::cpu ? memory.device : memory.host)
              .alloc("indexer.sums of micro-batches", DType::f64, {memory.ranks.size() * micro_batches_, n});
  published_ = memory.index_variances;
  totals_.assign(static_cast<size_t>(n), 0.0);
  mean_variance_.assign(published_.size(), 0.0);
}

void IndexerLossState::begin_step(Context& ctx) {
  if (!active()) return;
  fill(ctx, load_.sums, 0.0);
  // Weights that came from another run bring its mean; a state of this run is more exact.
  if (ctx.dry_run) return;
  for (size_t l = 0; l < published_.size(); ++l)
    if (mean_variance_[l] == 0) mean_variance_[l] = read(ctx, published_[l]);
}

void IndexerLossState::end_micro_batch(Context& ctx, int64_t micro_batch) {
  if (!active()) return;
  const int64_t n = load_.sums.numel();
  copy(ctx, rows_.rows(rank_ * micro_batches_ + micro_batch, 1).view({n}), load_.sums.view({n}));
  fill(ctx, load_.sums, 0.0);
}

void IndexerLossState::collect(Communicator& ranks, int64_t /*counted_tokens*/) {
  if (!active()) return;
  double* const rows = rows_.as<double>();
  const int64_t n = load_.sums.numel();
  if (ranks.size() > 1)
    ranks.all_gather(rows, rows + rank_ * micro_batches_ * n,
                     micro_batches_ * n * static_cast<int64_t>(sizeof(double)));
  std::fill(totals_.begin(), totals_.end(), 0.0);
  for (int64_t m = 0; m < rows_.dim(0); ++m)
    for (int64_t i = 0; i < n; ++i) totals_[static_cast<size_t>(i)] += rows[m * n + i];
}

void IndexerLossState::applied(Context& ctx) {
  const double momentum = config_.attention.sparse.k.momentum;
  for (size_t l = 0; l < published_.size(); ++l) {
    const double* const row = totals_.data() + l * kIndexSums;
    if (row[kIndexQueries] == 0) continue;
    const double mean = row[kIndexVariance] / row[kIndexQueries];
    double& running = mean_variance_[l];
    running = running > 0 ? momentum * running + (1 - momentum) * mean : mean;
  }
  publish(ctx);
}

/// Writes the running means to where selection reads them.
void IndexerLossState::publish(Context& ctx) const {
  for (size_t l = 0; l < published_.size(); ++l) write(ctx, published_[l], mean_variance_[l]);
}

std::vector<StepScalar> IndexerLossState::scalars() const {
  if (!active()) return {};
  const auto layers = static_cast<int64_t>(totals_.size()) / kIndexSums;
  std::vector<StepScalar> of_layers;
  double kl = 0, k = 0;
  for (int64_t l = 0; l < layers; ++l) {
    const double* const row = totals_.data() + l * kIndexSums;
    const auto mean = [&](IndexSum sum, IndexSum count) {
      return row[count] > 0 ? row[sum] / row[count] : 0;
    };
    const double layer_kl = mean(kIndexLoss, kIndexCounted), layer_k = mean(kIndexSelected, kIndexQueries);
    const double spread = std::sqrt(std::max(mean(kIndexSquares, kIndexQueries) - layer_k * layer_k, 0.0));
    kl += layer_kl / static_cast<double>(layers), k += layer_k / static_cast<double>(layers);
    of_layers.push_back({.name = "indexer/kl", .value = layer_kl, .layer = l});
    of_layers.push_back({.name = "indexer/mean_k", .value = layer_k, .layer = l});
    of_layers.push_back({.name = "indexer/deviation_k", .value = spread, .layer = l});
    if (!mean_variance_.empty())
      of_layers.push_back(
          {.name = "indexer/mean_variance", .value = mean_variance_[static_cast<size_t>(l)], .layer = l});
  }
  std::vector<StepScalar> all = {{.name = "indexer/kl", .value = kl, .console = "indexer"},
                                 {.name = "indexer/mean_k", .value = k}};
  all.insert(all.end(), of_layers.begin(), of_layers.end());
  return all;
}

void IndexerLossState::save(nlohmann::json& state) const {
  if (!mean_variance_.empty()) state["indexer"] = {{"mean_variance", mean_variance_}};
}

void IndexerLossState::restore(const StateReader& state) {
  if (!state.has("indexer")) return;
  const auto means = state.object("indexer").numbers("mean_variance", StateReader::kAnyCount, 0);
  if (means.size() == mean_variance_.size()) mean_variance_ = means;
}

}  // namespace sluice
