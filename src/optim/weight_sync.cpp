#include "optim/weight_sync.h"

#include <algorithm>

namespace sluice {
namespace {
// Units that are gathered ahead of the one that is waited for, with stages 1 and 2: the link is never idle,
// and an expert-parallel all-to-all within a block waits behind no more than these.
constexpr int kUnitsAhead = 2;
}  // namespace

WeightSync::WeightSync(int64_t zero_stage, ParamStore& store, const Mesh& mesh, const Mesh& moves,
                       CommQueue* queue)
    : zero_stage_(zero_stage), store_(store), mesh_(mesh), moves_(moves), queue_(queue) {
  SLUICE_CHECK(queue || mesh.tokens().size() == 1, "WeightSync: several ranks need a queue");
}

void WeightSync::allocate(Arena& arena) {
  pieces_ = store_.pieces(mesh_.tokens().rank(), mesh_.expert_data().rank());
  shards_ =
      sharded() ? arena.alloc("weight shards", store_.dtype(), {ParamStore::size_of(pieces_)}) : Tensor();
  free_.clear();
  free_.resize(static_cast<size_t>(store_.num_units()));
  pending_.assign(static_cast<size_t>(store_.num_units()), kThere);
}

Tensor WeightSync::values(size_t i) const {
  const ParamStore::Piece& p = pieces_[i];
  return sharded() ? shards_.rows(p.at, p.count)
                   : store_.bucket_values(p.of).rows(p.begin - p.of.begin, p.count);
}

/// Gathers every bucket of the unit, once free_ is reached.
CommQueue::Ticket WeightSync::gather(int unit) {
  Mark& free = free_[static_cast<size_t>(unit)];
  const Tensor place = store_.unit_values(unit);
  CommQueue::Ticket ticket = 0;
  int64_t at = 0;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const ParamStore::Piece& p = pieces_[i];
    if (p.of.unit != unit) continue;
    const Tensor mine = values(i), all = place.rows(at, p.of.end - p.of.begin);
    at += p.of.end - p.of.begin;
    const auto work = [this, &free, &ranks = ranks_of(p.of), to = all.data, from = mine.data,
                       bytes = mine.bytes()] {
      if (queue_) free.await(queue_->context());
      ranks.all_gather(to, from, bytes);
    };
    if (queue_)
      ticket = queue_->post(work);
    else
      work();
  }
  return ticket;
}

void WeightSync::changed(Context& ctx) {
  if (ctx.dry_run) return;
  if (sharded()) {
    for (Slot& s : slots_) s.unit = -1;
    return;
  }
  if (zero_stage_ == 0 || !queue_) return store_.pack_trained(ctx);
  for (Mark& free : free_) free.set(ctx);
  std::fill(pending_.begin(), pending_.end(), kStale);
}

void WeightSync::settle(Context& ctx) {
  if (sharded()) return;
  for (int unit = 0; unit < store_.num_units(); ++unit) bring(ctx, unit);
}

/// For a unit that is kept whole.
void WeightSync::ask(int unit) {
  CommQueue::Ticket& ticket = pending_[static_cast<size_t>(unit)];
  if (ticket == kStale) ticket = gather(unit);
}

/// Waits for a unit that is kept whole, while the next ones are gathered.
void WeightSync::bring(Context& ctx, int unit) {
  CommQueue::Ticket& ticket = pending_[static_cast<size_t>(unit)];
  if (ticket == kThere) return;
  for (int next = unit; next <= std::min(unit + kUnitsAhead, store_.num_units() - 1); ++next) ask(next);
  queue_->wait(ticket);
  ticket = kThere;
  store_.pack(ctx, unit);
}

void WeightSync::request(Context& ctx, int unit) {
  Slot& s = slot(unit);
  if (s.unit == unit) return;
  free_[static_cast<size_t>(unit)].set(ctx);
  s = {unit, gather(unit), false};
}

void WeightSync::begin(Context& ctx, int unit, Pass pass) {
  if (ctx.dry_run) return;
  if (!sharded()) return bring(ctx, unit);
  request(ctx, unit);
  // Gather one unit ahead while this one computes.
  const int next = pass == Pass::forward ? unit + 1 : unit - 1;
  Slot& s = slot(unit);
  if (queue_) queue_->wait(s.ticket);
  if (next > 0 && next < store_.num_units()) request(ctx, next);
  if (s.packed) return;
  store_.place_values(unit);
  store_.pack(ctx, unit);
  s.packed = true;
}

}  // namespace sluice
