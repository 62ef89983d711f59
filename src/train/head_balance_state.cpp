#include "train/head_balance_state.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "comm/reduce.h"
#include "core/device.h"
#include "ops/elementwise.h"

namespace sluice {

void HeadKeeper::allocate(Arena& memory, Arena& host_memory, Communicator& ranks, int64_t micro_batches) {
  rank_ = ranks.rank(), micro_batches_ = micro_batches;
  load_ = make_head_load(config_, memory, host_memory, &ranks);
  if (!active()) return;
  load_.share = 1.0 / static_cast<double>(ranks.size() * micro_batches);
  const bool on_gpu = memory.device() != Device::cpu;
  const auto on_host = [&](const Tensor& t) {
    return on_gpu ? host_memory.alloc(t.name, t.dtype, {t.dim(0), t.dim(1)}) : t;
  };
  host_totals_ = on_host(load_.totals);
  if (previous()) host_previous_ = on_gpu ? load_.host_seen : load_.seen;
  if (exact_)
    host_rows_ =
        (on_gpu ? host_memory : memory)
            .alloc("heads of micro-batches", DType::f64, {ranks.size(), micro_batches, load_.totals.numel()});
  if (load_.shared) {
    host_shared_ = on_host(load_.shared);
    calibration_.assign(static_cast<size_t>(load_.totals.numel()), 0.0);
  }
  if (memory.measuring()) return;
  // Before the first step there is none; and until it is known which heads are shared, none counts.
  if (host_previous_) std::fill_n(host_previous_.as<double>(), host_previous_.numel(), 0.0);
  if (host_shared_) std::fill_n(host_shared_.as<double>(), host_shared_.numel(), 1.0);
}

void HeadKeeper::begin_step(Context& ctx) {
  if (!active()) return;
  fill(ctx, load_.totals, 0.0);
  if (ctx.dry_run || ctx.device == Device::cpu) return;
  if (host_previous_) copy(ctx, load_.seen, host_previous_);
  if (host_shared_) copy(ctx, load_.shared, host_shared_);
}

void HeadKeeper::end_micro_batch(Context& ctx, int64_t micro_batch) {
  if (!host_rows_) return;
  const Tensor rows = host_rows_.view({host_rows_.dim(0) * micro_batches_, load_.batch.numel()});
  copy(ctx, rows.rows(rank_ * micro_batches_ + micro_batch, 1).view({load_.batch.numel()}), load_.batch);
}

void HeadKeeper::fetch(Context& ctx) {
  if (active()) copy(ctx, host_totals_, load_.totals);
}

void HeadKeeper::collect(Communicator& ranks) {
  if (!active()) return;
  if (!host_rows_) return all_reduce(ranks, host_totals_.as<double>(), host_totals_.numel());
  const int64_t n = host_totals_.numel(), all = ranks.size() * micro_batches_;
  double *const rows = host_rows_.as<double>(), *const total = host_totals_.as<double>();
  if (ranks.size() > 1)
    ranks.all_gather(rows, rows + rank_ * micro_batches_ * n,
                     micro_batches_ * n * static_cast<int64_t>(sizeof(double)));
  std::fill_n(total, n, 0.0);
  for (int64_t m = 0; m < all; ++m)
    for (int64_t i = 0; i < n; ++i) total[i] += rows[m * n + i];
}

void HeadKeeper::applied(int64_t samples) {
  if (!active()) return;
  const double* const totals = host_totals_.as<double>();
  if (host_previous_) std::copy_n(totals, host_totals_.numel(), host_previous_.as<double>());
  if (calibration_.empty() || calibrated_samples_ >= config_.attention.head_balance.calibration_samples)
    return;
  for (size_t i = 0; i < calibration_.size(); ++i) calibration_[i] += totals[i];
  calibrated_samples_ += samples;
  find_shared();
}

/// Once all samples of the calibration are in: 1 for the most important heads of each layer, ties to the
/// lower one.
void HeadKeeper::find_shared() {
  const HeadBalanceConfig& balance = config_.attention.head_balance;
  if (calibrated_samples_ < balance.calibration_samples) return;
  const int64_t heads = config_.num_attention_heads;
  for (int64_t l = 0; l < config_.num_hidden_layers; ++l) {
    const double* const sums = calibration_.data() + l * head_row_size(heads);
    std::vector<int64_t> order(static_cast<size_t>(heads));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return sums[a] > sums[b]; });
    double* const shared = host_shared_.as<double>() + l * heads;
    std::fill_n(shared, heads, 0.0);
    for (int64_t m = 0; m < balance.shared_heads; ++m) shared[order[static_cast<size_t>(m)]] = 1;
  }
}

std::optional<HeadSummary> HeadKeeper::summary() const {
  if (!active()) return std::nullopt;
  const int64_t heads = config_.num_attention_heads, layers = config_.num_hidden_layers;
  HeadSummary s;
  for (int64_t l = 0; l < layers; ++l) {
    const double* const row = host_totals_.as<double>() + l * head_row_size(heads);
    const double tokens = std::max(row[heads], 1.0);
    HeadSummary::Layer layer;
    for (int64_t h = 0; h < heads; ++h) layer.importance += row[h] / tokens / static_cast<double>(heads);
    double squares = 0;
    for (int64_t h = 0; h < heads; ++h) squares += std::pow(row[h] / tokens - layer.importance, 2);
    const double n = static_cast<double>(std::max<int64_t>(heads - config_.attention.head_balance.ddof, 1));
    if (layer.importance >= kLeastImportance) layer.imbalance = std::sqrt(squares / n) / layer.importance;
    s.imbalance += layer.imbalance / static_cast<double>(layers);
    s.importance += layer.importance / static_cast<double>(layers);
    s.balance_loss += row[heads + 2] / std::max(row[heads + 1], 1.0);
    s.layers.push_back(layer);
  }
  return s;
}

nlohmann::json HeadKeeper::state() const {
  if (!active()) return nullptr;
  const auto numbers = [](const Tensor& t) {
    return t ? std::vector<double>(t.as<double>(), t.as<double>() + t.numel()) : std::vector<double>();
  };
  return {{"previous", numbers(host_previous_)},
          {"calibration", calibration_},
          {"calibrated_samples", calibrated_samples_},
          {"shared", numbers(host_shared_)}};
}

void HeadKeeper::restore(const StateReader& state) {
  const auto previous_step = state.numbers("previous", StateReader::kAnyCount),
             calibration = state.numbers("calibration", StateReader::kAnyCount),
             shared = state.numbers("shared", StateReader::kAnyCount, 0);
  const int64_t samples = state.integer("calibrated_samples", 0);
  if (!active()) return;
  // Head balance may have been changed with consent: what it does not count then, or counts otherwise, begins
  // anew.
  if (host_previous_ && std::ssize(previous_step) == host_previous_.numel())
    std::copy(previous_step.begin(), previous_step.end(), host_previous_.as<double>());
  if (!host_shared_ || calibration.size() != calibration_.size() ||
      std::ssize(shared) != host_shared_.numel())
    return;
  calibration_ = calibration;
  calibrated_samples_ = samples;
  std::copy(shared.begin(), shared.end(), host_shared_.as<double>());
}

}  // namespace sluice
