#include "train/router_balance_state.h"

#include <algorithm>
#include <vector>

#include "comm/reduce.h"
#include "core/device.h"
#include "ops/elementwise.h"

namespace sluice {

void RouterKeeper::allocate(const Transformer& model, Arena& memory, Arena& host_memory, Communicator& ranks,
                            int64_t micro_batches, bool experts_travel) {
  const bool on_gpu = memory.device() != Device::cpu;
  load_.totals = model.make_router_totals(memory);
  load_.share = 1.0 / static_cast<double>(ranks.size() * micro_batches);
  host_totals_ = on_gpu ? model.make_router_totals(host_memory) : load_.totals;
  if (!load_.totals) return;
  if (experts_travel) load_.extra_rounds = &extra_rounds_;
  const int64_t layers = config_.num_hidden_layers, experts = config_.moe.num_experts;
  switch (config_.moe.load_balance.scope) {
    case BalanceScope::global_batch:
      if (ranks.size() == 1 || config_.moe.load_balance.coefficient == 0) break;
      load_.ranks = &ranks;
      load_.counts = memory.alloc("router.counts", DType::f64, {layers, experts});
      if (on_gpu) load_.host_counts = host_memory.alloc("router.counts", DType::f64, {experts});
      break;
    case BalanceScope::previous_step:
      load_.previous = memory.alloc("router.previous", DType::f64, {layers, experts});
      host_previous_ =
          on_gpu ? host_memory.alloc("router.previous", DType::f64, {layers, experts}) : load_.previous;
      // Before the first step there is none.
      if (!memory.measuring()) std::fill_n(host_previous_.as<double>(), host_previous_.numel(), 0.0);
      break;
    case BalanceScope::micro_batch:
      break;
  }
}

void RouterKeeper::begin_step(Context& ctx) {
  if (!load_.totals) return;
  fill(ctx, load_.totals, 0.0);
  if (host_previous_ && ctx.device != Device::cpu) copy(ctx, load_.previous, host_previous_);
}

void RouterKeeper::fetch(Context& ctx) {
  if (load_.totals) copy(ctx, host_totals_, load_.totals);
}

void RouterKeeper::collect(Communicator& ranks) {
  if (load_.totals && ranks.size() > 1) all_reduce(ranks, host_totals_.as<double>(), host_totals_.numel());
}

void RouterKeeper::applied() {
  if (!host_previous_) return;
  const int64_t experts = config_.moe.num_experts;
  for (int64_t l = 0; l < config_.num_hidden_layers; ++l)
    std::copy_n(host_totals_.as<double>() + l * host_totals_.dim(1), experts,
                host_previous_.as<double>() + l * experts);
}

nlohmann::json RouterKeeper::state() const {
  if (!host_previous_) return nullptr;
  const double* const counts = host_previous_.as<double>();
  return {{"previous", std::vector<double>(counts, counts + host_previous_.numel())}};
}

void RouterKeeper::restore(const StateReader& state) {
  const auto counts =
      state.numbers("previous", host_previous_ ? host_previous_.numel() : StateReader::kAnyCount, 0);
  if (host_previous_) std::copy(counts.begin(), counts.end(), host_previous_.as<double>());
}

}  // namespace sluice
