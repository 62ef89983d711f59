// Barriers of a block (bar.sync, bar.arrive, bar.red) and of a cluster; fences; polling.
#include "machine.h"

namespace emu {
namespace {

void release_waiting(Block& b, Barrier& barrier) {
  for (uint32_t warps = barrier.waiting_warps; warps; warps &= warps - 1) {
    const unsigned w = static_cast<unsigned>(__builtin_ctz(warps));
    wake_lanes(b, w, barrier.waiting[w]);
    barrier.waiting[w] = 0;
  }
  barrier.waiting_warps = 0;
}

/// Counts the arrival of this thread. True if it was the last one of the phase.
bool arrive(int id, int threads, int predicate, Site site) {
  Thread& t = self();
  Barrier& barrier = t.block->barriers[id];
  if (barrier.arrived == 0) {
    barrier.expected = static_cast<unsigned>(threads);
    barrier.site = site;
    barrier.first_thread = t.index;
  } else if (barrier.expected != static_cast<unsigned>(threads)) {
    fail_at(site, "barrier %d: thread count mismatch: %d, but %u at %s:%d", id, threads, barrier.expected,
            barrier.site.file, barrier.site.line);
  } else if (id == 0 && !same_site(barrier.site, site)) {
    fail_at(site, "divergent __syncthreads: thread %u waits at %s:%d, this one", barrier.first_thread,
            barrier.site.file, barrier.site.line);
  }
  san::release(&barrier.sync[barrier.phase & 1]);
  barrier.count += predicate != 0;
  barrier.any |= predicate != 0;
  barrier.all &= predicate != 0;
  if (++barrier.arrived < barrier.expected) return false;
  barrier.arrived = 0;
  ++barrier.phase;
  barrier.result[0] = barrier.count, barrier.result[1] = barrier.all, barrier.result[2] = barrier.any;
  barrier.count = barrier.any = 0, barrier.all = 1;
  release_waiting(*t.block, barrier);
  return true;
}

void arrive_and_wait(int id, int threads, int predicate, const char* name, Site site) {
  Thread& t = self();
  Barrier& barrier = t.block->barriers[id];
  ++t.group->stats.barriers;
  const unsigned phase = barrier.phase;
  if (!arrive(id, threads, predicate, site)) {
    barrier.waiting[t.warp] |= 1u << t.lane;
    barrier.waiting_warps |= 1u << t.warp;
    block_self(name, site);
  }
  san::acquire(&barrier.sync[phase & 1]);
}

void check_named_barrier(int id, int threads, Site site) {
  const unsigned rounded = self().block->warp_count * kWarpSize;
  if (id < 0 || id >= kNamedBarriers) fail_at(site, "barrier %d: ids are 0 to 15", id);
  if (threads <= 0 || threads % static_cast<int>(kWarpSize) || static_cast<unsigned>(threads) > rounded)
    fail_at(site, "barrier %d: a count of %d is no multiple of 32 up to the block's %u", id, threads,
            rounded);
}

}  // namespace

void bar_sync(int id, int threads, Site site) {
  if (id == 0 && threads == 0) {
    arrive_and_wait(0, static_cast<int>(self().block->thread_count), 0, "__syncthreads", site);
    return;
  }
  check_named_barrier(id, threads, site);
  arrive_and_wait(id, threads, 0, "a named barrier", site);
}

void bar_arrive(int id, int threads, Site site) {
  check_named_barrier(id, threads, site);
  arrive(id, threads, 0, site);
}

int bar_red(int predicate, int op, Site site) {
  // The result stays until every thread has arrived at the next barrier, which this one has not.
  arrive_and_wait(0, static_cast<int>(self().block->thread_count), predicate, "__syncthreads", site);
  return self().block->barriers[0].result[op];
}

void cluster_sync(Site site) {
  Thread& t = self();
  Group& g = *t.group;
  const unsigned threads = g.block_count * t.block->thread_count;
  const char* key = &g.cluster_sync[g.cluster_phase & 1];
  san::release(key);
  if (++g.cluster_arrived == threads) {
    g.cluster_arrived = 0;
    ++g.cluster_phase;
    for (Thread* waiting : g.cluster_waiting) wake(*waiting);
    g.cluster_waiting.clear();
  } else {
    g.cluster_waiting.push_back(&t);
    block_self("a cluster barrier", site);
  }
  san::acquire(key);
}

// TSan: any fence happens after all earlier fences. CUDA promises less, but blocks pass data on by relaxed
// atomics and a fence, and it is unknown which atomic belongs to which fence.
void thread_fence() {
  static char key;
  san::release(&key);
  san::acquire(&key);
}

}  // namespace emu
