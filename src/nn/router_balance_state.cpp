#include "nn/router_balance_state.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/state_reader.h"
#include "comm/reduce.h"
#include "core/device.h"
#include "ops/elementwise.h"

namespace sluice {

void RouterBalanceState::allocate(const StepMemory& memory) {
  const bool on_gpu = memory.device.device() != Device::cpu;
  load_.totals = make_router_totals(config_, memory.device);
  host_totals_ = on_gpu ? make_router_totals(config_, memory.host) : load_.totals;
  if (!load_.totals) return;
  if (shares_experts_) load_.extra_rounds = &extra_rounds_;
  const int64_t layers = config_.num_hidden_layers, experts = config_.moe.num_experts;
  switch (config_.moe.load_balance.scope) {
    case BalanceScope::global_batch:
      if (memory.ranks.size() == 1 || config_.moe.load_balance.coefficient == 0) break;
      load_.ranks = &memory.ranks;
      load_.counts = memory.device.alloc("router.counts", DType::f64, {layers, experts});
      if (on_gpu) load_.host_counts = memory.host.alloc("router.counts", DType::f64, {experts});
      break;
    case BalanceScope::previous_step:
      load_.previous = memory.device.alloc("router.previous", DType::f64, {layers, experts});
      host_previous_ =
          on_gpu ? memory.host.alloc("router.previous", DType::f64, {layers, experts}) : load_.previous;
      // Before the first step there is none.
      if (!memory.device.measuring()) std::fill_n(host_previous_.as<double>(), host_previous_.numel(), 0.0);
      break;
    case BalanceScope::micro_batch:
      if (memory.sequences && memory.sequences->size() > 1) load_.sequences = memory.sequences;
      break;
  }
}

void RouterBalanceState::begin_step(Context& ctx) {
  if (!load_.totals) return;
  fill(ctx, load_.totals, 0.0);
  if (host_previous_ && ctx.device != Device::cpu) copy(ctx, load_.previous, host_previous_);
}

void RouterBalanceState::fetch(Context& ctx) {
  if (load_.totals) copy(ctx, host_totals_, load_.totals);
}

void RouterBalanceState::collect(Communicator& ranks, int64_t /*counted_tokens*/) {
  if (load_.totals && ranks.size() > 1) all_reduce(ranks, host_totals_.as<double>(), host_totals_.numel());
}

void RouterBalanceState::applied(Context& /*ctx*/) {
  if (!host_previous_) return;
  const int64_t experts = config_.moe.num_experts;
  for (int64_t l = 0; l < config_.num_hidden_layers; ++l)
    std::copy_n(host_totals_.as<double>() + l * host_totals_.dim(1), experts,
                host_previous_.as<double>() + l * experts);
}

std::vector<StepScalar> RouterBalanceState::scalars() const {
  const auto s = summary();
  if (!s) return {};
  std::vector<StepScalar> all = {
      {.name = "router/balance_loss", .value = s->balance_loss},
      {.name = "router/z_loss", .value = s->z_loss},
      {.name = "router/max_over_mean", .value = s->max_over_mean, .console = "load", .digits = 2},
      {.name = "router/idle",
       .value = static_cast<double>(s->idle),
       .whole = true,
       .tag = "router/idle_experts"}};
  for (const LayerLoad& l : s->layers) {
    const auto add = [&](const char* name, double value, bool whole = false) {
      all.push_back({.name = name, .value = value, .whole = whole, .layer = l.layer});
    };
    add("router/max_over_mean", l.max_over_mean);
    add("router/entropy", l.entropy);
    add("router/variation", l.variation);
    add("router/idle", static_cast<double>(l.idle), /*whole=*/true);
    add("router/balance_loss", l.balance_loss);
    add("router/z_loss", l.z_loss);
  }
  return all;
}

void RouterBalanceState::save(nlohmann::json& state) const {
  if (!host_previous_) return;
  const double* const counts = host_previous_.as<double>();
  state["router"]["previous"] = std::vector<double>(counts, counts + host_previous_.numel());
}

void RouterBalanceState::restore(const StateReader& state) {
  // Until version 0.1 this was "routers", and "router" was a list of what watches over them.
  const bool old = state.has("routers");
  if (!old && (!state.has("router") || state.is_list("router"))) return;
  const StateReader router = state.object(old ? "routers" : "router");
  if (!old && !router.has("previous")) return;
  const auto counts =
      router.numbers("previous", host_previous_ ? host_previous_.numel() : StateReader::kAnyCount, 0);
  if (host_previous_) std::copy(counts.begin(), counts.end(), host_previous_.as<double>());
}

}  // namespace sluice
