#include "nn/head_balance_state.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "checkpoint/state_reader.h"
#include "comm/reduce.h"
#include "core/device.h"
#include "ops/elementwise.h"

namespace sluice {
namespace {

/// Of each layer's row, the number of batches times multiply / divide: whole numbers, and exact.
void scale_batches(std::vector<double>& rows, int64_t heads, int64_t multiply, int64_t divide) {
  for (int64_t at = heads + 1; at < std::ssize(rows); at += head_row_size(heads)) {
    double& batches = rows[static_cast<size_t>(at)];
    batches = batches * static_cast<double>(multiply) / static_cast<double>(divide);
  }
}

}  // namespace

void HeadBalanceState::allocate(const StepMemory& memory) {
  rank_ = memory.ranks.rank(), micro_batches_ = memory.micro_batches;
  load_ = make_head_load(config_, memory.device, memory.host, &memory.ranks, memory.sequences);
  if (!active()) return;
  batches_per_step_ = memory.ranks.size() * micro_batches_;
  load_.token_fraction = 1.0 / static_cast<double>(batches_per_step_);
  const bool on_gpu = memory.device.device() != Device::cpu;
  const auto on_host = [&](const Tensor& t) {
    return on_gpu ? memory.host.alloc(t.name, t.dtype, {t.dim(0), t.dim(1)}) : t;
  };
  host_totals_ = on_host(load_.totals);
  if (previous()) host_previous_ = on_gpu ? load_.host_reduced : load_.reduced;
  if (exact_)
    host_rows_ = (on_gpu ? memory.host : memory.device)
                     .alloc("heads of micro-batches", DType::f64,
                            {memory.ranks.size(), micro_batches_, load_.totals.numel()});
  if (load_.shared) {
    host_shared_ = on_host(load_.shared);
    calibration_.assign(static_cast<size_t>(load_.totals.numel()), 0.0);
  }
  if (memory.device.measuring()) return;
  // Before the first step there is none; and until it is known which heads are shared, none counts.
  if (host_previous_) std::fill_n(host_previous_.as<double>(), host_previous_.numel(), 0.0);
  if (host_shared_) std::fill_n(host_shared_.as<double>(), host_shared_.numel(), 1.0);
}

void HeadBalanceState::begin_step(Context& ctx) {
  if (!active()) return;
  fill(ctx, load_.totals, 0.0);
  if (ctx.dry_run || ctx.device == Device::cpu) return;
  if (host_previous_) copy(ctx, load_.reduced, host_previous_);
  if (host_shared_) copy(ctx, load_.shared, host_shared_);
}

void HeadBalanceState::end_micro_batch(Context& ctx, int64_t micro_batch) {
  if (!host_rows_) return;
  const Tensor rows = host_rows_.view({host_rows_.dim(0) * micro_batches_, load_.batch.numel()});
  copy(ctx, rows.rows(rank_ * micro_batches_ + micro_batch, 1).view({load_.batch.numel()}), load_.batch);
}

void HeadBalanceState::fetch(Context& ctx) {
  if (active()) copy(ctx, host_totals_, load_.totals);
}

void HeadBalanceState::collect(Communicator& ranks, int64_t /*counted_tokens*/) {
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

void HeadBalanceState::applied(Context& /*ctx*/) {
  if (!active()) return;
  const double* const totals = host_totals_.as<double>();
  if (host_previous_) std::copy_n(totals, host_totals_.numel(), host_previous_.as<double>());
  if (calibration_.empty() || calibrated_samples_ >= config_.attention.head_balance.calibration_samples)
    return;
  for (size_t i = 0; i < calibration_.size(); ++i) calibration_[i] += totals[i];
  calibrated_samples_ += samples_per_step_;
  find_shared();
}

/// Once all samples of the calibration are in: 1 for the most important heads of each layer, ties to the
/// lower one. Until then 1 for all.
void HeadBalanceState::find_shared() {
  const HeadBalanceConfig& balance = config_.attention.head_balance;
  std::fill_n(host_shared_.as<double>(), host_shared_.numel(), 1.0);
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

std::optional<HeadSummary> HeadBalanceState::summary() const {
  if (!active()) return std::nullopt;
  const int64_t heads = config_.num_attention_heads, layers = config_.num_hidden_layers;
  HeadSummary s;
  for (int64_t l = 0; l < layers; ++l) {
    const double* const row = host_totals_.as<double>() + l * head_row_size(heads);
    std::vector<double> importance(row, row + heads);
    HeadSummary::Layer layer;
    for (double& x : importance) {
      x /= std::max(row[heads], 1.0);
      layer.importance += x / static_cast<double>(heads);
    }
    layer.imbalance = imbalance_of(importance, config_.attention.head_balance.ddof).value_or(0);
    s.imbalance += layer.imbalance / static_cast<double>(layers);
    s.importance += layer.importance / static_cast<double>(layers);
    s.balance_loss += row[heads + 2] / std::max(row[heads + 1], 1.0);
    s.layers.push_back(layer);
  }
  return s;
}

std::vector<StepScalar> HeadBalanceState::scalars() const {
  const auto s = summary();
  if (!s) return {};
  std::vector<StepScalar> all = {{.name = "heads/imbalance", .value = s->imbalance, .console = "heads"},
                                 {.name = "heads/importance", .value = s->importance},
                                 {.name = "heads/balance_loss", .value = s->balance_loss}};
  for (size_t l = 0; l < s->layers.size(); ++l) {
    const auto layer = static_cast<int64_t>(l);
    all.push_back({.name = "heads/imbalance", .value = s->layers[l].imbalance, .layer = layer});
    all.push_back({.name = "heads/importance", .value = s->layers[l].importance, .layer = layer});
  }
  return all;
}

void HeadBalanceState::save(nlohmann::json& state) const {
  if (!active()) return;
  const auto numbers = [](const Tensor& t) {
    return t ? std::vector<double>(t.as<double>(), t.as<double>() + t.numel()) : std::vector<double>();
  };
  std::vector<double> previous_step = numbers(host_previous_);
  scale_batches(previous_step, config_.num_attention_heads, samples_per_step_, batches_per_step_);
  state["heads"] = {{"previous", previous_step},
                    {"previous_in_samples", true},
                    {"calibration", calibration_},
                    {"calibrated_samples", calibrated_samples_},
                    {"shared", numbers(host_shared_)}};
}

void HeadBalanceState::restore(const StateReader& state) {
  if (!state.has("heads")) return;
  const StateReader heads = state.object("heads");
  auto previous_step = heads.numbers("previous", StateReader::kAnyCount);
  const auto calibration = heads.numbers("calibration", StateReader::kAnyCount),
             shared = heads.numbers("shared", StateReader::kAnyCount, 0);
  // Older checkpoints have the batches of their layout, which is taken for this one.
  const bool in_samples = heads.has("previous_in_samples") && heads.boolean("previous_in_samples");
  const int64_t samples = heads.integer("calibrated_samples", 0);
  if (!active()) return;
  // Head balance may have been changed with consent: what it does not count then, or counts otherwise, begins
  // anew.
  if (host_previous_ && std::ssize(previous_step) == host_previous_.numel()) {
    if (in_samples)
      scale_batches(previous_step, config_.num_attention_heads, batches_per_step_, samples_per_step_);
    std::copy(previous_step.begin(), previous_step.end(), host_previous_.as<double>());
  }
  if (!host_shared_ || calibration.size() != calibration_.size() ||
      std::ssize(shared) != host_shared_.numel())
    return;
  calibration_ = calibration;
  calibrated_samples_ = samples;
  find_shared();
}

}  // namespace sluice
