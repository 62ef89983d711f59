// The tensor memory accelerator: boxes of 2 to 5 dimensions between global and shared memory, with swizzles
// on bits 4-6 of the shared address and zeros beyond the tensor's edges. Rules: CUDA driver API,
// cuTensorMapEncodeTiled; PTX ISA, cp.async.bulk.tensor.
#include <algorithm>

#include "machine.h"

namespace emu {
namespace {

constexpr size_t kChunk = 16;  // bytes that a swizzle keeps together

size_t row_bytes(const TMap& m) { return size_t{m.box[0]} * static_cast<size_t>(m.esize); }

size_t box_bytes(const TMap& m) {
  size_t bytes = static_cast<size_t>(m.esize);
  for (int i = 0; i < m.rank; ++i) bytes *= m.box[i];
  return bytes;
}

/// Swizzles depend on the address in shared memory, not on the position in the tile.
size_t swizzled(size_t address, int span) {
  const size_t bits = span == 128 ? 0x70 : span == 64 ? 0x30 : span == 32 ? 0x10 : 0;
  return address ^ (address >> 3 & bits);
}

void check_map(const TMap& m, int rank, Site site) {
  constexpr uint64_t kMaxStride = uint64_t{1} << 40, kMaxDimension = uint64_t{1} << 32;
  if (m.magic != kTensorMapMagic) fail_at(site, "TMA: not a tensor map");
  if (m.rank != rank) fail_at(site, "TMA: a tensor map of rank %d used as %d", m.rank, rank);
  if (m.esize != 1 && m.esize != 2 && m.esize != 4 && m.esize != 8)
    fail_at(site, "TMA: element size %d", m.esize);
  if (m.swizzle != 0 && m.swizzle != 32 && m.swizzle != 64 && m.swizzle != 128)
    fail_at(site, "TMA: swizzle span %d", m.swizzle);
  if (reinterpret_cast<uintptr_t>(m.base) % 16) fail_at(site, "TMA: global address not 16-byte aligned");
  for (int i = 0; i < rank; ++i) {
    if (m.box[i] == 0 || m.box[i] > 256)
      fail_at(site, "TMA: box dimension %d is %u, not 1 to 256", i, m.box[i]);
    if (m.dim[i] == 0 || m.dim[i] > kMaxDimension)
      fail_at(site, "TMA: tensor dimension %d is empty or too large", i);
  }
  for (int i = 1; i < rank; ++i)
    if (m.stride[i] % 16 || m.stride[i] >= kMaxStride)
      fail_at(site, "TMA: stride %d of %llu bytes is no multiple of 16 below 2^40", i,
              static_cast<unsigned long long>(m.stride[i]));
  if (row_bytes(m) % 16) fail_at(site, "TMA: inner box of %zu bytes is no multiple of 16", row_bytes(m));
  if (m.swizzle && row_bytes(m) > static_cast<size_t>(m.swizzle))
    fail_at(site, "TMA: inner box of %zu bytes exceeds the swizzle span %d", row_bytes(m), m.swizzle);
}

void check_tile(const TMap& m, const void* smem, Site site) {
  const unsigned alignment = m.swizzle == 128 ? 1024 : m.swizzle == 64 ? 512 : m.swizzle == 32 ? 256 : 128;
  const uint32_t address = to_shared(smem);
  if (address % alignment)
    fail_at(site, "TMA: shared address %u is not %u-byte aligned, as its swizzle needs", address, alignment);
  shared_range(address, box_bytes(m), "TMA", site);
}

/// f(address in shared memory, row in global memory or null where it is outside, first column) for every row
/// of the box.
template <class F>
void for_each_row(const Transfer& o, F&& f) {
  const TMap& m = o.map;
  uint64_t rows = 1;
  for (int i = 1; i < m.rank; ++i) rows *= m.box[i];
  const size_t begin = static_cast<size_t>(static_cast<char*>(o.smem) - o.block->window);
  for (uint64_t r = 0; r < rows; ++r) {
    uint64_t rest = r;
    char* global = m.base;
    for (int i = 1; i < m.rank; ++i) {
      const int64_t index = static_cast<int64_t>(o.coordinates[i]) + static_cast<int64_t>(rest % m.box[i]);
      rest /= m.box[i];
      if (index < 0 || index >= static_cast<int64_t>(m.dim[i]))
        global = nullptr;
      else if (global)
        global += static_cast<uint64_t>(index) * m.stride[i];
    }
    f(begin + r * row_bytes(m), global);
  }
}

/// The columns of the box that exist: [first, end), from the box's own 0.
struct Columns {
  int64_t first, end;
};
Columns columns_inside(const Transfer& o) {
  const int64_t x = o.coordinates[0], width = o.map.box[0];
  const int64_t first = std::clamp<int64_t>(-x, 0, width);
  return {first, std::clamp<int64_t>(static_cast<int64_t>(o.map.dim[0]) - x, first, width)};
}

/// Atomic, and annotated as such for ThreadSanitizer.
void add_float(float* to, float value) {
#if EMU_TSAN
  constexpr int kRelaxed = 0;
  auto* bits = reinterpret_cast<volatile int*>(to);
  int seen = __tsan_atomic32_load(bits, kRelaxed);
  for (;;) {
    const int wanted = static_cast<int>(to_bits(from_bits<float>(static_cast<uint32_t>(seen)) + value));
    if (__tsan_atomic32_compare_exchange_strong(bits, &seen, wanted, kRelaxed, kRelaxed)) return;
  }
#else
  auto* bits = reinterpret_cast<uint32_t*>(to);
  uint32_t seen = __atomic_load_n(bits, __ATOMIC_RELAXED);
  for (;;) {
    const auto wanted = static_cast<uint32_t>(to_bits(from_bits<float>(seen) + value));
    if (__atomic_compare_exchange_n(bits, &seen, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return;
  }
#endif
}

void move_box(const Transfer& o) {
  const TMap& m = o.map;
  const size_t element = static_cast<size_t>(m.esize), bytes = row_bytes(m);
  const Columns inside = columns_inside(o);
  const size_t first = static_cast<size_t>(inside.first) * element,
               end = static_cast<size_t>(inside.end) * element;
  for_each_row(o, [&](size_t row, char* global) {
    for (size_t x = 0; x < bytes; x += kChunk) {
      char* chunk = o.block->window + swizzled(row + x, m.swizzle);
      const size_t from = global ? std::clamp(first, x, x + kChunk) - x : kChunk;
      const size_t to = global ? std::clamp(end, x, x + kChunk) - x : kChunk;
      char* outside = global ? global + o.coordinates[0] * static_cast<int64_t>(element) + x : nullptr;
      if (o.kind == Transfer::load) {
        if (to - from < kChunk || !global) san::set(chunk, 0, kChunk);
        if (from < to) san::copy(chunk + from, outside + from, to - from);
      } else if (o.kind == Transfer::add) {
        for (size_t b = from; b < to; b += sizeof(float))
          add_float(reinterpret_cast<float*>(outside + b), *reinterpret_cast<const float*>(chunk + b));
      } else if (from < to) {
        san::copy(outside + from, chunk + from, to - from);
      }
    }
  });
}

/// Reports accesses to global memory to the sanitizers.
void note_global(const Transfer& o, Site site) {
  if (!EMU_TSAN && !EMU_ASAN) return;
  const Columns inside = columns_inside(o);
  const size_t element = static_cast<size_t>(o.map.esize),
               bytes = static_cast<size_t>(inside.end - inside.first) * element;
  if (bytes == 0) return;
  for_each_row(o, [&](size_t, char* global) {
    if (!global) return;
    const char* p = global + (o.coordinates[0] + inside.first) * static_cast<int64_t>(element);
    check_global_range(p, bytes, "TMA: global address", site);
    if (o.kind == Transfer::load) san::reads(p, bytes);
    if (o.kind == Transfer::store) san::writes(p, bytes);
  });
}

Transfer transfer(const TMap& map, const void* smem, const int* coordinates, Thread& t) {
  Transfer o{};
  o.map = map;
  for (int i = 0; i < map.rank; ++i) o.coordinates[i] = coordinates[i];
  o.smem = const_cast<void*>(smem);
  o.bytes = static_cast<unsigned>(box_bytes(map));
  o.block = t.block;
  return o;
}

}  // namespace

AsyncAgent::AsyncAgent(Thread& t) : thread_(t) {
#if EMU_TSAN
  Group& g = *t.group;
  if (!g.agent) g.agent = new_fiber();
  __tsan_switch_to_fiber(g.agent->tsan_fiber, 1);
  san::acquire(&g.launch->begin_sync);
  san::acquire(&g.begin_sync);
  san::acquire(&t.block->proxy_sync);
#endif
}

AsyncAgent::~AsyncAgent() {
#if EMU_TSAN
  san::release(&thread_.block->agent_sync);
  __tsan_switch_to_fiber(thread_.fiber->tsan_fiber, 1);
#endif
}

void fence_proxy_async() { san::release(&self().block->proxy_sync); }

namespace {

/// Into this block or, where of_cluster, into every block of the cluster whose bit is set.
void queue_load(void* dst, const TMap* map, uint64_t* barrier, const int* coordinates, int rank,
                bool of_cluster, unsigned blocks, Site site) {
  Thread& t = self();
  check_map(*map, rank, site);
  check_tile(*map, dst, site);
  ++t.group->stats.tma;
  Transfer o = transfer(*map, dst, coordinates, t);
  o.kind = Transfer::load;
  note_global(o, site);
  const ptrdiff_t to = static_cast<char*>(dst) - t.smem, ready = reinterpret_cast<char*>(barrier) - t.smem;
  for (unsigned r = 0; blocks >> r; ++r) {
    if (!(blocks >> r & 1u)) continue;
    o.block = of_cluster ? &block_in_cluster(r, site) : t.block;
    o.smem = o.block->window + to;
    o.barrier = reinterpret_cast<uint64_t*>(o.block->window + ready);
    mbarrier_check(o.barrier, site);
    // The write is attributed to the issuing thread; threads that wait for the barrier, and the engines, are
    // ordered after it.
    san::writes(o.smem, o.bytes);
    san::release(mbarrier_sync_key(o.barrier));
    san::release(&o.block->proxy_sync);
    san::set(o.smem, kPoison, o.bytes);
    t.group->transfers.push_back(o);
  }
}

}  // namespace

void tma_load(void* dst, const TMap* map, uint64_t* barrier, const int* coordinates, int rank, Site site) {
  queue_load(dst, map, barrier, coordinates, rank, false, 1, site);
}

void tma_load_multicast(void* dst, const TMap* map, uint64_t* barrier, const int* coordinates, int rank,
                        unsigned blocks, Site site) {
  if (blocks == 0 || blocks > 0xffff) fail_at(site, "TMA: multicast to the blocks of mask %#x", blocks);
  queue_load(dst, map, barrier, coordinates, rank, true, blocks, site);
}

void complete_transfer(Group& g, unsigned index) {
  Transfer o;
  san::copy(&o, &g.transfers[index], sizeof o);
  const unsigned last = g.transfers.size() - 1;
  for (unsigned i = index; i < last; ++i) san::copy(&g.transfers[i], &g.transfers[i + 1], sizeof o);
  g.transfers.truncate(last);
  move_box(o);
  mbarrier_complete_tx(g, o.barrier, o.bytes);
}

namespace {

/// Queues a store: shared memory is read by the engines, to which only data published by a proxy fence is
/// visible.
void queue_store(Thread& t, Transfer& o, Site site) {
  ++t.group->stats.tma;
  o.site = site;
  o.commit_group = t.store_groups;
  san::reads(o.smem, o.bytes);
  {
    const AsyncAgent agent(t);
    san::reads(o.smem, o.bytes);
  }
  t.stores.push_back(o);
}

void queue_bytes(Transfer::Kind kind, void* dst, const void* src, unsigned bytes, Site site) {
  Thread& t = self();
  if (reinterpret_cast<uintptr_t>(dst) % 16 || reinterpret_cast<uintptr_t>(src) % 16 || bytes % 16)
    fail_at(site, "cp.async.bulk: addresses and sizes are multiples of 16: global %p, shared %u, %u bytes",
            dst, to_shared(src), bytes);
  shared_range(to_shared(src), bytes, "cp.async.bulk", site);
  check_global_range(dst, bytes, "cp.async.bulk: global address", site);
  Transfer o{};
  o.kind = kind;
  o.smem = const_cast<void*>(src), o.global = dst, o.bytes = bytes;
  o.block = t.block;
  queue_store(t, o, site);
}

void finish_store(Transfer& o) {
  if (o.moved) return;
  o.moved = true;
  san::reads(o.smem, o.bytes);
  if (o.kind == Transfer::store || o.kind == Transfer::add) {
    note_global(o, o.site);
    move_box(o);
  } else if (o.kind == Transfer::store_bytes) {
    san::writes(o.global, o.bytes);
    san::copy(o.global, o.smem, o.bytes);
  } else {
    for (unsigned i = 0; i < o.bytes / sizeof(float); ++i)
      add_float(static_cast<float*>(o.global) + i, static_cast<const float*>(o.smem)[i]);
  }
}

void queue_box(Transfer::Kind kind, const TMap* map, const void* src, const int* coordinates, int rank,
               Site site) {
  Thread& t = self();
  check_map(*map, rank, site);
  check_tile(*map, src, site);
  Transfer o = transfer(*map, src, coordinates, t);
  o.kind = kind;
  queue_store(t, o, site);
}

}  // namespace

void tma_store(const TMap* map, const void* src, const int* coordinates, int rank, Site site) {
  queue_box(Transfer::store, map, src, coordinates, rank, site);
}

void tma_add(const TMap* map, const void* src, const int* coordinates, int rank, Site site) {
  if (map->esize != sizeof(float)) fail_at(site, "TMA: adds f32, not elements of %d bytes", map->esize);
  queue_box(Transfer::add, map, src, coordinates, rank, site);
}

void bulk_store(void* dst, const void* src, unsigned bytes, Site site) {
  queue_bytes(Transfer::store_bytes, dst, src, bytes, site);
}

void bulk_reduce_add(float* dst, const void* src, unsigned bytes, Site site) {
  queue_bytes(Transfer::add_floats, dst, src, bytes, site);
}

void bulk_commit() {
  Thread& t = self();
  ++t.store_groups;
  if (!t.group->seeded || !t.group->random.one_in(2)) return;
  for (Transfer& o : t.stores) finish_store(o);
}

void bulk_wait(int pending) {
  Thread& t = self();
  unsigned done = 0;  // groups are in order
  while (done < t.stores.size() && static_cast<int>(t.store_groups - t.stores[done].commit_group) > pending)
    finish_store(t.stores[done++]);
  t.stores.erase_front(done);
  san::acquire(&t.block->agent_sync);
}

}  // namespace emu
