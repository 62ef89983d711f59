// Runs the threads of a group. A thread gets a stack when it starts; when it returns, the next thread starts
// on the same stack, so that a kernel that never waits completes without a context switch.
#include <chrono>
#include <new>
#include <thread>

#include "machine.h"

namespace emu {

__thread ThreadContext* g_cur;

namespace {

constexpr bool kStackPerThread = EMU_TSAN;  // two threads on one stack would look like a race on it

void begin_thread(Thread& t) {
  const LaunchParams& p = t.group->launch->params;
  const Block& b = *t.block;
  t.tid = {t.index % p.block.x, t.index / p.block.x % p.block.y, t.index / (p.block.x * p.block.y)};
  t.bid = b.id;
  t.bdim = p.block, t.gdim = p.grid;
  t.lane = t.index % kWarpSize, t.warp = t.index / kWarpSize;
  t.crank = b.rank, t.csize = t.group->block_count;
  t.smem = b.window;
  t.state = ThreadState::ready;
  t.wgmma_fenced = false;
  t.registers = 0;
  t.copy_groups = t.store_groups = t.wgmma_groups = 0;
  t.copies.clear(), t.stores.clear(), t.wgmmas.clear(), t.accumulators.clear();
}

void end_thread(Thread& t) {
  check_async_at_exit(t);
  Group& g = *t.group;
  t.state = ThreadState::done;
  --g.live;
  g.idle_polls = 0;
  lane_exited(t);
  if (--t.block->live == 0) check_shared_gaps(*t.block);
}

/// The next thread to run; null if none can. Asynchronous loads complete at random times, or when everything
/// else waits for them.
Thread* choose_next(Group& g) {
  if (g.seeded && !g.transfers.empty() && g.random.one_in(8))
    complete_transfer(g, g.random.below(g.transfers.size()));
  while (g.ready.empty()) {
    if (g.transfers.empty()) return nullptr;
    complete_transfer(g, g.seeded ? g.random.below(g.transfers.size()) : 0);
  }
  return &g.threads[g.ready.take()];
}

void fiber_main();

Fiber* take_fiber(Group& g) {
  if (g.free_fibers.empty()) {
    Fiber* fiber = new_fiber();
    g.all_fibers.push_back(fiber);
    g.free_fibers.push_back(fiber);
  }
  Fiber* fiber = g.free_fibers.pop_back();
  prepare_fiber(*fiber, fiber_main);
  return fiber;
}

/// Switches to thread t, or to the OS thread's own code if t is null.
void continue_with(Group& g, Fiber& from, Thread* t, bool leaving) {
  ++g.stats.switches;
  g_cur = t;
  if (!t) return switch_fiber(from, g.main, leaving);
  if (t->state == ThreadState::fresh && !kStackPerThread) t->fiber = take_fiber(g);
  switch_fiber(from, *t->fiber, leaving);
}

void fiber_main() {
  arrived_on_new_fiber();
  Fiber* fiber = self().fiber;
  Group& g = *self().group;
  for (;;) {
    Thread& t = self();
    begin_thread(t);
    san::acquire(&g.launch->begin_sync);
    san::acquire(&g.begin_sync);
    g.launch->call->run();
    san::release(&g.launch->end_sync);
    end_thread(t);
    Thread* next = choose_next(g);
    t.fiber = nullptr;
    if (!kStackPerThread) {
      if (next && next->state == ThreadState::fresh) {
        next->fiber = fiber;
        g_cur = next;
        continue;
      }
      g.free_fibers.push_back(fiber);  // it is not reused before the switch
    }
    continue_with(g, *fiber, next, true);
  }
}

/// Sets the positions of the group's blocks in the grid; their threads are not started yet.
void lay_out_blocks(Group& g, uint64_t index) {
  const Launch& l = *g.launch;
  const LaunchParams& p = l.params;
  const unsigned threads = p.block.x * p.block.y * p.block.z;
  const dim3 shape = l.group_shape;
  g.block_count = shape.x * shape.y * shape.z;
  g.warps_per_block = (threads + kWarpSize - 1) / kWarpSize;
  const unsigned warp_count = g.block_count * g.warps_per_block;
  if (warp_count > g.warp_capacity) {
    g.threads = std::make_unique<Thread[]>(warp_count * kWarpSize);
    g.warps = std::make_unique<Warp[]>(warp_count);
    g.warp_capacity = warp_count;
  }
  while (g.blocks.size() < g.block_count) g.blocks.push_back(std::make_unique<Block>());

  const uint64_t groups_x = p.grid.x / shape.x, groups_y = p.grid.y / shape.y;
  const uint3 first = {static_cast<unsigned>(index % groups_x * shape.x),
                       static_cast<unsigned>(index / groups_x % groups_y * shape.y),
                       static_cast<unsigned>(index / (groups_x * groups_y) * shape.z)};
  for (unsigned r = 0; r < g.block_count; ++r) {
    Block& b = *g.blocks[r];
    b.group = &g;
    b.threads = &g.threads[r * g.warps_per_block * kWarpSize];
    b.warps = &g.warps[r * g.warps_per_block];
    b.thread_count = b.live = threads, b.warp_count = g.warps_per_block, b.rank = r;
    b.id = {first.x + r % shape.x, first.y + r / shape.x % shape.y, first.z + r / (shape.x * shape.y)};
    b.mbarrier_waiters.clear();
    for (Barrier& barrier : b.barriers) barrier = Barrier{};
    for (unsigned w = 0; w < b.warp_count; ++w) {
      const unsigned lanes = std::min(kWarpSize, threads - w * kWarpSize);
      b.warps[w].exists = lanes == kWarpSize ? kAllLanes : (1u << lanes) - 1u;
      b.warps[w].exited = 0;
      for (Rendezvous& m : b.warps[w].meetings) m.arrived = 0;
    }
    for (unsigned t = 0; t < threads; ++t) {
      Thread& thread = b.threads[t];
      thread.group = &g, thread.block = &b, thread.index = t;
      thread.state = ThreadState::fresh;
      thread.fiber = nullptr;
    }
    open_shared_memory(b, p.dyn_smem);
  }
  g.live = g.block_count * threads;
}

void give_every_thread_a_stack(Group& g) {
  const unsigned slots = g.block_count * g.warps_per_block * kWarpSize;
  // Barriers of n threads cost libtsan n vector clocks of as many entries as there are fibers.
  const unsigned turns = slots > 512 ? 1 : 2;
  g.turn = (g.turn + 1) % turns;
  while (g.thread_fibers.size() < turns * slots) g.thread_fibers.push_back(new_fiber());
  for (unsigned r = 0; r < g.block_count; ++r)
    for (unsigned t = 0; t < g.blocks[r]->thread_count; ++t) {
      Thread& thread = g.blocks[r]->threads[t];
      thread.fiber = g.thread_fibers[g.turn * slots + static_cast<unsigned>(&thread - g.threads.get())];
      prepare_fiber(*thread.fiber, fiber_main);
    }
}

void start_all(Group& g) {
  const unsigned warps = g.block_count * g.warps_per_block;
  std::vector<unsigned> order(warps);
  for (unsigned i = 0; i < warps; ++i) order[i] = i;
  if (g.seeded)
    for (unsigned i = warps; i > 1; --i) std::swap(order[i - 1], order[g.random.below(i)]);
  for (unsigned w : order) g.ready.add(w, g.warps[w].exists);
}

}  // namespace

void run_group(Group& g, uint64_t index) {
  const Launch& l = *g.launch;
  g.seeded = l.seed != 0;
  g.random.state = l.seed * 0x632be59bd9b4e019ull + index;
  g.failed = false;
  g.idle_polls = 0;
  g.transfers.clear(), g.statics.clear(), g.cluster_waiting.clear();
  g.cluster_arrived = 0;
  lay_out_blocks(g, index);
  const Policy seeded[] = {Policy::priorities, Policy::random, Policy::newest_first};
  g.ready.reset(g.block_count * g.warps_per_block, g.seeded ? seeded[l.seed % 3] : Policy::in_order,
                &g.random);
  start_all(g);
  if (kStackPerThread) give_every_thread_a_stack(g);

  san::release(&g.begin_sync);  // orders after the mapping of the group's memory, but not between blocks
  continue_with(g, g.main, choose_next(g), false);

  g.stats.blocks += g.block_count;
  g.stats.threads += l.params.block.x * l.params.block.y * l.params.block.z * g.block_count;
  if (!g.failed && g.live > 0) {
    g.failed = true;
    report_deadlock(g);
  }
  if (!g.failed) return;
  // The stacks of the threads that did not return are abandoned.
  if (kStackPerThread) {
    for (Fiber* fiber : g.thread_fibers) reset_fiber(*fiber, &g.launch->end_sync);
  } else {
    g.free_fibers.clear();
    for (Fiber* fiber : g.all_fibers) g.free_fibers.push_back(fiber);
  }
}

void abandon_group(Group& g) {
  g.failed = true;
  g.launch->stopped = true;
  continue_with(g, *self().fiber, nullptr, true);
  std::abort();
}

void block_self(const char* waiting_for, Site site) {
  Thread& t = self();
  Group& g = *t.group;
  t.state = ThreadState::blocked;
  t.waiting_for = waiting_for, t.waiting_at = site;
  g.idle_polls = 0;
  Thread* next = choose_next(g);
  if (next != &t) continue_with(g, *t.fiber, next, false);
  t.state = ThreadState::ready;
}

void wake_lanes(Block& b, unsigned warp, uint32_t lanes) {
  b.group->ready.add(b.rank * b.group->warps_per_block + warp, lanes);
}

void wake(Thread& t) { wake_lanes(*t.block, t.warp, 1u << t.lane); }

void yield() {
  constexpr uint64_t kPollsBetweenLooks = 1 << 12;
  constexpr double kPatienceSeconds = 60;
  static thread_local std::chrono::steady_clock::time_point since;
  Thread& t = self();
  Group& g = *t.group;
  if (g.launch->stopped) abandon_group(g);
  if (g.idle_polls++ == 0) since = std::chrono::steady_clock::now();
  if (g.idle_polls % kPollsBetweenLooks == 0 &&
      std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count() > kPatienceSeconds)
    fail("polls for %.0f s and nothing else of its block can run", kPatienceSeconds);

  const unsigned warp = t.block->rank * g.warps_per_block + t.warp;
  const bool alone = g.ready.empty() && g.transfers.empty();
  if (alone) {
    std::this_thread::yield();  // what it waits for is the work of another OS thread
    return;
  }
  g.ready.add(warp, 1u << t.lane);
  g.ready.defer(warp);
  Thread* next = choose_next(g);
  if (next != &t) continue_with(g, *t.fiber, next, false);
}

}  // namespace emu
