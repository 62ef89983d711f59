#include "nn/head_balance.h"

#include <cmath>

#include "comm/reduce.h"
#include "core/device.h"

namespace sluice {

HeadLoad make_head_load(const ModelConfig& config, Arena& memory, Arena& host_memory, Communicator* ranks,
                        Communicator* sequences) {
  const HeadBalanceConfig& balance = config.attention.head_balance;
  HeadLoad load;
  if (balance.coefficient == 0) return load;
  const int64_t L = config.num_hidden_layers, H = config.num_attention_heads, size = head_row_size(H);
  load.totals = memory.alloc("heads.totals", DType::f64, {L, size});
  load.batch = memory.alloc("heads.batch", DType::f64, {L, size});
  load.dimportance = memory.alloc("heads.u", DType::f64, {L, H});
  if (balance.shared_heads > 0 && balance.shared_from == SharedHeads::calibration)
    load.shared = memory.alloc("heads.shared", DType::f64, {L, H});
  const bool asks =
      balance.scope == HeadBalanceScope::data_parallel || balance.scope == HeadBalanceScope::global_batch;
  if (ranks && ranks->size() > 1 && asks) load.ranks = ranks;
  if (sequences && sequences->size() > 1 && balance.scope == HeadBalanceScope::micro_batch)
    load.ranks = sequences;
  if (load.ranks || balance.scope == HeadBalanceScope::previous_step)
    load.reduced = memory.alloc("heads.seen", DType::f64, {L, size});
  if (load.reduced && memory.device() != Device::cpu)
    load.host_reduced = host_memory.alloc("heads.seen", DType::f64, {L, size});
  return load;
}

void balance_heads(Context& ctx, const HeadBalanceConfig& config, const HeadLoad& load) {
  if (!load.totals) return;
  const Tensor& mine = config.scope == HeadBalanceScope::global_batch ? load.totals : load.batch;
  const bool previous = config.scope == HeadBalanceScope::previous_step;
  if (load.ranks && !ctx.dry_run) {
    const Tensor host = ctx.device == Device::cpu ? load.reduced : load.host_reduced;
    copy(ctx, host, mine);
    synchronize(ctx);
    all_reduce(*load.ranks, host.as<double>(), host.numel());
    if (host.data != load.reduced.data) copy(ctx, load.reduced, host);
  }
  head_balance(ctx, load.dimportance, load.batch, load.totals, load.ranks || previous ? load.reduced : mine,
               load.shared,
               {.coefficient = config.coefficient,
                .token_fraction = load.token_fraction,
                .shared_heads = config.shared_heads,
                .ddof = config.ddof});
}

std::optional<double> imbalance_of(const std::vector<double>& importance, int64_t ddof) {
  const auto heads = static_cast<double>(importance.size());
  if (std::ssize(importance) <= ddof) return std::nullopt;
  double mean = 0, squares = 0;
  for (const double x : importance) mean += x / heads;
  for (const double x : importance) squares += (x - mean) * (x - mean);
  const double imbalance = std::sqrt(squares / (heads - static_cast<double>(ddof))) / mean;
  if (!(mean >= kLeastImportance) || !std::isfinite(imbalance)) return std::nullopt;
  return imbalance;
}

}  // namespace sluice
