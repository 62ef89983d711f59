// Shared memory of a block: a window of 256 KiB, in which addresses are offsets. From low to high: 1 KiB
// unused, dynamic memory with exactly the promised alignment, a gap, and static variables, at odd multiples
// of their alignment, with a gap after each. Everything is initialised to 0xff (NaN, -1). Gaps are poisoned
// for ASan and checked when the block ends.
#include <sys/mman.h>

#include <algorithm>
#include <bit>

#include "machine.h"

namespace emu {
namespace {

constexpr size_t kStaticGap = 64;
constexpr size_t kWindowAlignment = 1024;

size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

size_t statics_begin(size_t dynamic_bytes) {
  return round_up(kFirstSharedAddress + kWindowAlignment + dynamic_bytes + kSharedGap, 128);
}

void map_window(Block& b) {
  if (EMU_TSAN &&
      b.mapping) {  // a new mapping, so that accesses of the previous block are not reported as races
    munmap(b.mapping, kWindow + kWindowAlignment);
    b.mapping = nullptr;
  }
  if (b.mapping) return;
  void* memory =
      mmap(nullptr, kWindow + kWindowAlignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  b.mapping = static_cast<char*>(memory);
  b.window = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(memory), kWindowAlignment));
}

const char* first_changed(const char* p, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i)
    if (static_cast<unsigned char>(p[i]) != kPoison) return p + i;
  return nullptr;
}

void check_gap(Block& b, size_t begin, size_t bytes, const char* after) {
  san::allow(b.window + begin, bytes);
  const char* changed = first_changed(b.window + begin, bytes);
  san::forbid(b.window + begin, bytes);
  if (changed)
    fail("shared memory out of bounds: byte %td past the end of %s was written", changed - (b.window + begin),
         after);
}

}  // namespace

void open_shared_memory(Block& b, size_t dynamic_bytes) {
  map_window(b);
  b.dynamic_begin = 0;
  b.static_open = 0;
  b.group->statics_end = statics_begin(dynamic_bytes);
  if (dynamic_bytes) {
    san::allow(b.window, b.group->statics_end);
    san::set(b.window + kFirstSharedAddress, kPoison, b.group->statics_end - kFirstSharedAddress);
  }
  san::forbid(b.window, kWindow);
}

void* dyn_smem(size_t alignment) {
  Thread& t = self();
  Block& b = *t.block;
  const size_t bytes = t.group->launch->params.dyn_smem;
  if (!std::has_single_bit(alignment) || alignment > kWindowAlignment)
    fail("DYN_SMEM: an alignment of %zu is no power of two up to 1024", alignment);
  const size_t begin = alignment == kWindowAlignment ? 2 * kWindowAlignment : kWindowAlignment + alignment;
  if (b.dynamic_begin == 0) {
    b.dynamic_begin = begin;
    san::allow(b.window + begin, bytes);
  } else if (b.dynamic_begin != begin) {
    fail(
        "DYN_SMEM: one kernel asks for it with two alignments; all of them are one memory, align them alike");
  }
  return b.window + begin;
}

void* static_smem(const void* tag, size_t size, size_t alignment) {
  Thread& t = self();
  Block& b = *t.block;
  Group& g = *t.group;
  unsigned i = 0;  // variables have the same address in all blocks of a cluster
  while (i < g.statics.size() && g.statics[i].tag != tag) ++i;
  if (i == g.statics.size()) {
    const size_t offset = round_up(g.statics_end, 2 * alignment) + alignment;
    g.statics.push_back({tag, offset, size});
    g.statics_end = offset + size + kStaticGap;
    size_t total = 0;
    for (const StaticVariable& v : g.statics) total += v.size;
    if (i >= 64) fail("more than 64 static shared variables");
    if (total > kStaticLimit) fail("%zu bytes of static shared memory; 48 KiB is the limit", total);
    const LaunchParams& params = g.launch->params;
    if (total + params.dyn_smem > kSharedLimit || g.statics_end > kWindow)
      fail("%zu bytes of static and %zu of dynamic shared memory; 227 KiB is the limit", total,
           params.dyn_smem);
    // Dynamic memory begins behind static memory at the alignment of DYN_SMEM.
    const size_t both = params.dyn_smem ? round_up(total, kWindowAlignment) + params.dyn_smem : total;
    if (!params.asks_for_smem && both > kUnaskedLimit)
      fail(
          "%zu bytes of static and %zu of dynamic shared memory; 48 KiB is the limit of a kernel that does "
          "not ask for more",
          total, params.dyn_smem);
  }
  const StaticVariable& v = g.statics[i];
  char* address = b.window + v.offset;
  if (!(b.static_open >> i & 1u)) {
    b.static_open |= uint64_t{1} << i;
    san::allow(address, v.size + kStaticGap);
    san::set(address, kPoison, v.size + kStaticGap);
    san::forbid(address + v.size, kStaticGap);
  }
  return address;
}

void check_shared_gaps(Block& b) {
  Group& g = *b.group;
  const size_t bytes = g.launch->params.dyn_smem;
  if (b.dynamic_begin) check_gap(b, b.dynamic_begin + bytes, kSharedGap, "dynamic shared memory");
  for (unsigned i = 0; i < g.statics.size(); ++i)
    if (b.static_open >> i & 1u)
      check_gap(b, g.statics[i].offset + g.statics[i].size, kStaticGap, "a static shared variable");
}

uint32_t to_shared(const void* p) {
  const ptrdiff_t offset = static_cast<const char*>(p) - self().smem;
  if (offset < 0 || offset >= static_cast<ptrdiff_t>(kWindow))
    fail("smem_addr() of a pointer that is not into the block's shared memory");
  return static_cast<uint32_t>(offset);
}

void* from_shared(uint32_t address) { return self().smem + address; }

Block& block_in_cluster(unsigned rank, Site site) {
  const Group& g = *self().group;
  if (rank >= g.block_count) fail_at(site, "block %u of a cluster of %u", rank, g.block_count);
  Block& block = *g.blocks[rank];
  if (block.live == 0) fail_at(site, "shared memory of block %u of the cluster, which has ended", rank);
  if (std::all_of(block.threads, block.threads + block.thread_count,
                  [](const Thread& t) { return t.state == ThreadState::fresh; }))
    fail_at(site, "shared memory of block %u of the cluster, which has not begun", rank);
  return block;
}

constexpr unsigned kClusterShift = 24;

uint32_t to_cluster(const void* p, unsigned rank) { return (rank + 1) << kClusterShift | to_shared(p); }

void* from_cluster(uint32_t address, Site site) {
  if (address >> kClusterShift == 0) fail_at(site, "%u is no address in the cluster", address);
  const uint32_t offset = address & ((1u << kClusterShift) - 1);
  return block_in_cluster((address >> kClusterShift) - 1, site).window + offset;
}

char* shared_range(uint32_t address, size_t bytes, const char* what, Site site) {
  Thread& t = self();
  Block& b = *t.block;
  Group& g = *t.group;
  const size_t end = address + bytes, dynamic_bytes = g.launch->params.dyn_smem;
  bool inside = b.dynamic_begin && address >= b.dynamic_begin && end <= b.dynamic_begin + dynamic_bytes;
  for (unsigned i = 0; !inside && i < g.statics.size(); ++i)
    inside = address >= g.statics[i].offset && end <= g.statics[i].offset + g.statics[i].size;
  if (!inside)
    fail_at(site, "%s: shared memory out of bounds: %zu bytes at %u, dynamic memory is [%zu, %zu)", what,
            bytes, address, b.dynamic_begin, b.dynamic_begin + dynamic_bytes);
  return t.smem + address;
}

}  // namespace emu
