#include "nn/head_balance.h"

#include "comm/reduce.h"
#include "core/device.h"

namespace sluice {

HeadLoad make_head_load(const ModelConfig& config, Arena& memory, Arena& host_memory, Communicator* ranks) {
  const HeadBalanceConfig& balance = config.attention.head_balance;
  HeadLoad load;
  if (balance.coefficient == 0) return load;
  const int64_t L = config.num_hidden_layers, H = config.num_attention_heads, size = head_row_size(H);
  load.totals = memory.alloc("heads.totals", DType::f64, {L, size});
  load.batch = memory.alloc("heads.batch", DType::f64, {L, size});
  load.u = memory.alloc("heads.u", DType::f64, {L, H});
  if (balance.shared_heads > 0 && balance.shared_from == SharedHeads::calibration)
    load.shared = memory.alloc("heads.shared", DType::f64, {L, H});
  const bool asks =
      balance.scope == HeadBalanceScope::data_parallel || balance.scope == HeadBalanceScope::global_batch;
  if (ranks && ranks->size() > 1 && asks) load.ranks = ranks;
  if (load.ranks || balance.scope == HeadBalanceScope::previous_step)
    load.seen = memory.alloc("heads.seen", DType::f64, {L, size});
  if (load.seen && memory.device() != Device::cpu)
    load.host_seen = host_memory.alloc("heads.seen", DType::f64, {L, size});
  return load;
}

void balance_heads(Context& ctx, const HeadBalanceConfig& config, const HeadLoad& load) {
  if (!load.totals) return;
  const Tensor& mine = config.scope == HeadBalanceScope::global_batch ? load.totals : load.batch;
  const bool previous = config.scope == HeadBalanceScope::previous_step;
  if (load.ranks && !ctx.dry_run) {
    const Tensor host = ctx.device == Device::cpu ? load.seen : load.host_seen;
    copy(ctx, host, mine);
    synchronize(ctx);
    all_reduce(*load.ranks, host.as<double>(), host.numel());
    if (host.data != load.seen.data) copy(ctx, load.seen, host);
  }
  head_balance(ctx, load.u, load.batch, load.totals, load.ranks || previous ? load.seen : mine, load.shared,
               {.coefficient = config.coefficient,
                .share = load.share,
                .shared_heads = config.shared_heads,
                .ddof = config.ddof});
}

}  // namespace sluice
