// Asynchronous copies and their barriers. An operation is performed as late as its wait allows, with its
// destination poisoned until then, or, in a seeded schedule, at some earlier time. Code that reads or
// overwrites too early sees one or the other.
#include "machine.h"

namespace emu {

void check_global_range(const void* p, size_t bytes, const char* what, Site site) {
  if (const void* bad = san::first_forbidden(p, bytes)) fail_at(site, "%s: %p is out of bounds", what, bad);
}

// ---- cp.async

namespace {

void do_copy(const CopyOp& op) {
  san::copy(op.dst, op.src, static_cast<size_t>(op.src_bytes));
  san::set(static_cast<char*>(op.dst) + op.src_bytes, 0, static_cast<size_t>(op.bytes - op.src_bytes));
}

/// Commit groups are numbered from 0; with `committed` of them, is this one older than the `pending` newest?
bool must_be_done(uint32_t group, uint32_t committed, int pending) {
  return static_cast<int>(committed - group) > pending;
}

}  // namespace

void cp_async(void* dst, const void* src, int bytes, int src_bytes, Site site) {
  Thread& t = self();
  Group& g = *t.group;
  ++g.stats.cp_async;
  if ((bytes != 4 && bytes != 8 && bytes != 16) || src_bytes < 0 || src_bytes > bytes)
    fail_at(site, "cp.async: %d bytes of which %d are read", bytes, src_bytes);
  const uintptr_t alignment = static_cast<uintptr_t>(bytes) - 1;
  if (reinterpret_cast<uintptr_t>(dst) & alignment ||
      (src_bytes && reinterpret_cast<uintptr_t>(src) & alignment))
    fail_at(site, "cp.async: misaligned address: shared %u, global %p, for %d bytes", to_shared(dst), src,
            bytes);
  shared_range(to_shared(dst), static_cast<size_t>(bytes), "cp.async", site);
  check_global_range(src, static_cast<size_t>(src_bytes), "cp.async: global address", site);
  san::reads(src, static_cast<size_t>(src_bytes));
  san::writes(dst, static_cast<size_t>(bytes));
  const CopyOp op{dst, src, bytes, src_bytes, t.copy_groups};
  if (g.seeded && g.random.one_in(2))
    do_copy(op);
  else
    san::set(dst, kPoison, static_cast<size_t>(bytes));
  t.copies.push_back(op);
}

void cp_async_commit() { ++self().copy_groups; }

void cp_async_wait(int pending) {
  Thread& t = self();
  unsigned kept = 0;
  for (CopyOp& op : t.copies) {
    if (!must_be_done(op.commit_group, t.copy_groups, pending)) {
      t.copies[kept++] = op;
      continue;
    }
    do_copy(op);
    san::writes(op.dst, static_cast<size_t>(op.bytes));
  }
  t.copies.truncate(kept);
}

// ---- mbarrier: 8 bytes of shared memory

namespace {

struct Mbarrier {
  static constexpr uint32_t kMark = 0x15a;
  static constexpr unsigned kMaxCount = 1023;
  uint32_t phase : 1, pending : 11, expected : 11, mark : 9;
  int32_t transfer_bytes;
};
static_assert(sizeof(Mbarrier) == 8);

Mbarrier& view(uint64_t* barrier) { return *reinterpret_cast<Mbarrier*>(barrier); }

/// If nothing is outstanding any more, the next phase begins and waiting threads wake up.
void finish_phase(Group& g, uint64_t* barrier) {
  Mbarrier& b = view(barrier);
  if (b.pending || b.transfer_bytes) return;
  b.phase ^= 1;
  b.pending = b.expected;
  for (unsigned r = 0; r < g.block_count; ++r) {
    Array<MbarrierWaiter>& waiters = g.blocks[r]->mbarrier_waiters;
    unsigned kept = 0;
    for (MbarrierWaiter& w : waiters) {
      if (w.barrier == barrier)
        wake(*w.thread);
      else
        waiters[kept++] = w;
    }
    waiters.truncate(kept);
  }
}

const void* sync_key(uint64_t* barrier, unsigned phase) { return reinterpret_cast<char*>(barrier) + phase; }

}  // namespace

void mbarrier_check(uint64_t* barrier, Site site) {
  if (view(barrier).mark != Mbarrier::kMark)
    fail_at(site, "mbarrier used before its initialisation, or overwritten");
}

const void* mbarrier_sync_key(uint64_t* barrier) { return sync_key(barrier, view(barrier).phase); }

void mbarrier_complete_tx(Group& group, uint64_t* barrier, unsigned bytes) {
  view(barrier).transfer_bytes -= static_cast<int>(bytes);
  finish_phase(group, barrier);
}

void mbar_init(uint64_t* barrier, unsigned count, Site site) {
  if (reinterpret_cast<uintptr_t>(barrier) & 7) fail_at(site, "mbarrier.init: not 8-byte aligned");
  if (count == 0 || count > Mbarrier::kMaxCount) fail_at(site, "mbarrier.init: a count of %u", count);
  shared_range(to_shared(barrier), sizeof *barrier, "mbarrier.init", site);
  Mbarrier& b = view(barrier);
  b.phase = 0;
  b.pending = b.expected = count;
  b.mark = Mbarrier::kMark;
  b.transfer_bytes = 0;
}

void mbar_arrive(uint64_t* barrier, unsigned count, Site site) {
  mbarrier_check(barrier, site);
  Mbarrier& b = view(barrier);
  if (b.pending < count)
    fail_at(site, "mbarrier: more arrivals in a phase than the %u it was initialised with",
            unsigned{b.expected});
  san::release(mbarrier_sync_key(barrier));
  b.pending -= count;
  finish_phase(*self().group, barrier);
}

void mbar_expect_tx(uint64_t* barrier, unsigned bytes, Site site) {
  constexpr unsigned kMaxTransfer = (1u << 20) - 1;
  mbarrier_check(barrier, site);
  if (bytes > kMaxTransfer) fail_at(site, "mbarrier: expects %u bytes, 2^20-1 is the limit", bytes);
  view(barrier).transfer_bytes += static_cast<int>(bytes);
}

void store_async(uint32_t to, int value, uint32_t barrier, Site site) {
  constexpr unsigned kOffset = 24;
  if (to % sizeof value) fail_at(site, "st.async: misaligned address %u", to);
  if (to >> kOffset != barrier >> kOffset) fail_at(site, "st.async: the barrier is not in the same block");
  auto* b = static_cast<uint64_t*>(from_cluster(barrier, site));
  mbarrier_check(b, site);
  void* place = from_cluster(to, site);
  san::writes(place, sizeof value);
  san::release(mbarrier_sync_key(b));
  san::copy(place, &value, sizeof value);
  mbarrier_complete_tx(*self().group, b, sizeof value);
}

void mbar_wait(uint64_t* barrier, unsigned parity, Site site) {
  mbarrier_check(barrier, site);
  Thread& t = self();
  parity &= 1;
  while (view(barrier).phase == parity) {
    t.block->mbarrier_waiters.push_back({barrier, &t});
    block_self("mbarrier wait", site);
  }
  san::acquire(sync_key(barrier, parity));
}

bool mbar_test(uint64_t* barrier, unsigned parity, Site site) {
  mbarrier_check(barrier, site);
  const bool done = view(barrier).phase != (parity & 1);
  if (done)
    san::acquire(sync_key(barrier, parity & 1));
  else
    yield();
  return done;
}

// ---- the end of a thread

void check_async_at_exit(Thread& t) {
  if (!t.copies.empty()) fail("exits with %u cp.async that it has not waited for", t.copies.size());
  if (!t.stores.empty())
    fail("exits with %u bulk stores that may still read its shared memory", t.stores.size());
  if (!t.wgmmas.empty()) fail("exits with %u wgmma that it has not waited for", t.wgmmas.size());
}

}  // namespace emu
