// Warp collectives: the lanes of a mask wait for each other, and the last to arrive computes for all. Lanes
// that have returned from the kernel count as arrived. A rendezvous is identified by its mask, so parts of a
// warp may diverge.
#include <algorithm>
#include <cstdlib>

#include "machine.h"

namespace emu {
namespace {

bool is_complete(const Warp& w, const Rendezvous& m) { return m.arrived == (m.mask & ~w.exited); }

void complete(Block& b, unsigned warp, Rendezvous& m, uint32_t except) {
  const uint32_t lanes = m.arrived;
  m.arrived = 0;
  ++m.uses;
  m.collective->complete(b.threads + warp * kWarpSize, lanes, m.argument);
  if (lanes & ~except) wake_lanes(b, warp, lanes & ~except);
}

/// The rendezvous with this mask, or a free one.
Rendezvous& find_meeting(Thread& t, Warp& w, uint32_t mask, const Collective& collective, int argument,
                         Site site) {
  Rendezvous* free = nullptr;
  for (Rendezvous& m : w.meetings) {
    if (m.arrived == 0) {
      if (!free) free = &m;
      continue;
    }
    if (m.mask != mask) continue;
    if (m.collective != &collective || !same_site(m.site, site))
      fail_at(site, "warp collective mismatch: lanes %08x wait in %s at %s:%d, lane %u calls %s", m.arrived,
              m.collective->name, m.site.file, m.site.line, t.lane, collective.name);
    return m;
  }
  if (!free) fail_at(site, "%s: more than 8 divergent collectives in one warp", collective.name);
  free->mask = mask, free->collective = &collective, free->argument = argument, free->site = site;
  return *free;
}

template <class F>
void for_each_lane(uint32_t lanes, F&& f) {
  for (; lanes; lanes &= lanes - 1) f(static_cast<unsigned>(__builtin_ctz(lanes)));
}

void do_nothing(Thread*, uint32_t, int) {}

void exchange(Thread* threads, uint32_t lanes, int) {
  constexpr uint64_t kNobody =
      0x7fc0deadffffffffull;  // from a lane that does not participate: undefined on a GPU
  Warp& w = warp_of(threads[0]);
  for_each_lane(lanes, [&](unsigned l) {
    const int source = w.source[l];
    w.output[l] = lanes >> source & 1u ? w.input[source] : kNobody;
  });
}

void ballot(Thread* threads, uint32_t lanes, int) {
  Warp& w = warp_of(threads[0]);
  uint64_t result = 0;
  for_each_lane(lanes, [&](unsigned l) { result |= w.input[l] << l; });
  for_each_lane(lanes, [&](unsigned l) { w.output[l] = result, w.source[l] = result == lanes; });
}

void match(Thread* threads, uint32_t lanes, int) {
  Warp& w = warp_of(threads[0]);
  for_each_lane(lanes, [&](unsigned l) {
    w.output[l] = 0;
    for_each_lane(lanes,
                  [&](unsigned k) { w.output[l] |= static_cast<uint64_t>(w.input[k] == w.input[l]) << k; });
  });
}

uint32_t combine(uint32_t x, uint32_t y, int op) {
  switch (static_cast<ReduceOp>(op)) {
    case kReduceAdd:
      return x + y;
    case kReduceMin:
      return std::min(x, y);
    case kReduceMax:
      return std::max(x, y);
    case kReduceAnd:
      return x & y;
    case kReduceOr:
      return x | y;
    case kReduceXor:
      return x ^ y;
    case kReduceSignedMin:
      return static_cast<uint32_t>(std::min(static_cast<int>(x), static_cast<int>(y)));
    case kReduceSignedMax:
      return static_cast<uint32_t>(std::max(static_cast<int>(x), static_cast<int>(y)));
  }
  std::abort();
}

void fold(Thread* threads, uint32_t lanes, int op) {
  Warp& w = warp_of(threads[0]);
  const unsigned first = static_cast<unsigned>(__builtin_ctz(lanes));
  uint32_t result = static_cast<uint32_t>(w.input[first]);
  for_each_lane(lanes & ~(1u << first),
                [&](unsigned l) { result = combine(result, static_cast<uint32_t>(w.input[l]), op); });
  for_each_lane(lanes, [&](unsigned l) { w.output[l] = result; });
}

const Collective kSyncwarp = {"__syncwarp", do_nothing};
const Collective kShuffle[] = {{"__shfl_sync", exchange},
                               {"__shfl_up_sync", exchange},
                               {"__shfl_down_sync", exchange},
                               {"__shfl_xor_sync", exchange}};
const Collective kVote = {"a warp vote", ballot};
const Collective kMatch = {"__match_any_sync", match};
const Collective kReduce = {"__reduce_sync", fold};

}  // namespace

void meet(uint32_t mask, const Collective& collective, int argument, Site site) {
  Thread& t = self();
  Warp& w = warp_of(t);
  ++t.group->stats.collectives;
  mask &= w.exists;
  if (!(mask >> t.lane & 1u))
    fail_at(site, "%s: lane %u is not in its mask %08x", collective.name, t.lane, mask);
  Rendezvous& m = find_meeting(t, w, mask, collective, argument, site);
  m.arrived |= 1u << t.lane;
  // Only __syncwarp orders memory; shuffles and matrix products do not.
  [[maybe_unused]] const char* key = &m.sync[m.uses & 1];
  const bool orders_memory = &collective == &kSyncwarp;
  if (orders_memory) san::release(key);
  if (is_complete(w, m))
    complete(*t.block, t.warp, m, 1u << t.lane);
  else
    block_self(collective.name, site);
  if (orders_memory) san::acquire(key);
}

void lane_exited(Thread& t) {
  Warp& w = warp_of(t);
  w.exited |= 1u << t.lane;
  for (Rendezvous& m : w.meetings)
    if (m.arrived && is_complete(w, m)) complete(*t.block, t.warp, m, 0);
}

void warp_sync(uint32_t mask, Site site) { meet(mask, kSyncwarp, 0, site); }

uint64_t shfl(uint32_t mask, uint64_t value, int mode, int argument, int width, Site site) {
  if (width <= 0 || width > 32 || (width & (width - 1)))
    fail_at(site, "shuffle: width %d is no power of two", width);
  Thread& t = self();
  Warp& w = warp_of(t);
  const int lane = static_cast<int>(t.lane), first = lane & ~(width - 1), last = first + width - 1;
  int source = lane;
  switch (static_cast<ShuffleMode>(mode)) {
    case kShuffleIndex:
      source = first | (argument & (width - 1));
      break;
    case kShuffleUp:
      source = lane - argument < first ? lane : lane - argument;
      break;
    case kShuffleDown:
      source = lane + argument > last ? lane : lane + argument;
      break;
    case kShuffleXor:
      source = (lane ^ argument) > last ? lane : lane ^ argument;
      break;
  }
  w.input[t.lane] = value;
  w.source[t.lane] = source & 31;
  meet(mask, kShuffle[mode], 0, site);
  return w.output[t.lane];
}

uint32_t vote(uint32_t mask, int predicate, int mode, Site site) {
  Thread& t = self();
  Warp& w = warp_of(t);
  w.input[t.lane] = predicate != 0;
  meet(mask, kVote, 0, site);
  const uint32_t set = static_cast<uint32_t>(w.output[t.lane]);
  return mode == 0 ? set : mode == 1 ? set != 0 : static_cast<uint32_t>(w.source[t.lane]);
}

uint64_t match_any(uint32_t mask, uint64_t value, Site site) {
  Thread& t = self();
  Warp& w = warp_of(t);
  w.input[t.lane] = value;
  meet(mask, kMatch, 0, site);
  return w.output[t.lane];
}

uint32_t reduce(uint32_t mask, uint32_t value, int op, Site site) {
  Thread& t = self();
  Warp& w = warp_of(t);
  w.input[t.lane] = value;
  meet(mask, kReduce, op, site);
  return static_cast<uint32_t>(w.output[t.lane]);
}

}  // namespace emu
