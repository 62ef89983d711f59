#pragma once
// The parts of a launch inside the emulator. A group is what one OS thread runs to completion before the next
// (a block, a cluster, or a whole cooperative grid). Only Launch is shared between OS threads.
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "array.h"
#include "fiber.h"
#include "seam.h"

namespace emu {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kNamedBarriers = 16;
constexpr size_t kWindow = 256 << 10;       // shared addresses of a block
constexpr size_t kSharedLimit = 227 << 10;  // limit per block, static and dynamic
constexpr size_t kStaticLimit = 48 << 10;
constexpr size_t kUnaskedLimit = 48 << 10;    // of both, unless the kernel asks for more
constexpr size_t kFirstSharedAddress = 1024;  // address 0 is invalid
constexpr size_t kSharedGap = 1024;           // between dynamic and static memory: 0xff, checked
constexpr unsigned char kPoison = 0xff;       // NaN in every float format, -1 in integers

struct Random {
  uint64_t state = 1;
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
  }
  unsigned below(unsigned n) { return static_cast<unsigned>((next() >> 32) * n >> 32); }
  bool one_in(unsigned n) { return below(n) == 0; }
};

struct Block;
struct Group;

struct CopyOp {  // cp.async
  void* dst;
  const void* src;
  int bytes, src_bytes;
  uint32_t commit_group;
};
struct Transfer {  // TMA
  enum Kind { load, store, add, store_bytes, add_floats } kind;
  TMap map;
  int coordinates[5];
  void* smem;
  void* global;       // of the last two kinds, which have no map
  unsigned bytes;     // in shared memory
  uint64_t* barrier;  // of a load
  Block* block;
  uint32_t commit_group;  // of a store
  bool moved;             // a store done early
  Site site;
};
struct Accumulator {  // registers hold poison while the values are in flight
  float* registers;
  float* values;
  int count;
};
struct WgmmaOp {
  Accumulator accumulator;
  bool a_in_registers;
  uint32_t a[4];
  uint64_t a_descriptor, b_descriptor;
  int scale_d, a_mn_major, b_mn_major;
  bool executed;  // before the wait
  uint32_t commit_group;
  Site site;
};

enum class ThreadState : uint8_t { fresh, ready, blocked, done };

struct Thread : ThreadContext {
  Fiber* fiber = nullptr;  // null before it starts (but for TSan) and after it ends
  Block* block = nullptr;
  Group* group = nullptr;
  unsigned index = 0;  // linear, within the block
  ThreadState state = ThreadState::fresh;
  bool wgmma_fenced = false;
  unsigned registers = 0;  // setmaxnreg; 0: never called
  const char* waiting_for = nullptr;
  Site waiting_at{};
  uint32_t copy_groups = 0, store_groups = 0, wgmma_groups = 0;  // committed so far
  Array<CopyOp> copies;
  Array<Transfer> stores;
  Array<WgmmaOp> wgmmas;
  Array<Accumulator> accumulators;
  Array<float*> value_buffers;  // free ones, 128 floats each
};

/// Lanes of a warp that take part in one collective.
struct Collective {
  const char* name;
  /// Called once by the last lane to arrive, for all of `lanes`; warp_threads are the 32 threads of the warp.
  void (*complete)(Thread* warp_threads, uint32_t lanes, int argument);
};
struct Rendezvous {
  uint32_t mask, arrived;
  const Collective* collective;
  int argument;
  Site site;
  unsigned uses;
  char sync[2];  // TSan keys, used alternately: a fast lane's next release must not be acquired by a slow
                 // lane's previous operation
};
struct Warp {
  uint32_t exists, exited;
  Rendezvous meetings[8];
  char wgmma_sync;
  // Per lane. A lane's inputs are valid from its arrival until the rendezvous completes, its outputs until it
  // arrives again.
  uint64_t input[kWarpSize], output[kWarpSize];
  int source[kWarpSize];
  alignas(16) uint16_t row[kWarpSize][8];  // ldmatrix, stmatrix
  uint32_t row_address[kWarpSize];
  uint32_t fragment[kWarpSize][4];
  alignas(32) float a[16][16], b[16][8], c[16][8], d[16][8];  // mma.sync
};

struct Barrier {
  unsigned arrived = 0, expected = 0, phase = 0, first_thread = 0;
  Site site{};
  uint32_t waiting_warps = 0;
  uint32_t waiting[32] = {};        // lanes, by warp
  int count = 0, any = 0, all = 1;  // of the predicates so far
  int result[3] = {};               // of the last phase: count, all, any
  char sync[2] = {};
};

struct MbarrierWaiter {
  uint64_t* barrier;
  Thread* thread;
};

struct Block {
  Group* group = nullptr;
  Thread* threads = nullptr;  // padded to whole warps
  Warp* warps = nullptr;
  unsigned thread_count = 0, warp_count = 0, rank = 0;  // rank in the group
  unsigned live = 0;                                    // threads that have not returned
  uint3 id{};
  char* window = nullptr;    // 1024-byte aligned
  char* mapping = nullptr;   // what was mapped for it
  size_t dynamic_begin = 0;  // 0: no DYN_SMEM yet
  uint64_t static_open = 0;  // bit i: variable i was poisoned for this block
  Barrier barriers[kNamedBarriers];
  Array<MbarrierWaiter> mbarrier_waiters;
  char proxy_sync = 0,
       agent_sync = 0;  // TSan: generic writes made visible to, and reads done by, asynchronous engines
};

struct Launch {
  LaunchParams params;
  const KernelCall* call = nullptr;
  uint64_t seed = 0;
  dim3 group_shape;  // blocks
  uint64_t group_count = 0;
  std::atomic<uint64_t> next_group{0};
  std::atomic<bool> stopped{false};
  std::mutex mutex;
  std::string error;  // the first, under the mutex
  char begin_sync = 0, end_sync = 0;
};

enum class Policy { in_order, random, newest_first, priorities };

/// Which threads can run: a mask of lanes for every warp that has any, and the order of those warps.
class ReadySet {
 public:
  void reset(unsigned warps, Policy policy, Random* random);
  bool empty() const { return count_ == 0; }
  void add(unsigned warp, uint32_t lanes) {
    if (!lanes_[warp]) push_newest(warp);
    lanes_[warp] |= lanes;
  }
  /// Removes and returns one: warp * 32 + lane.
  unsigned take() {
    if (policy_ != Policy::in_order) return take_seeded();
    const unsigned warp = at(0);
    const uint32_t ready = lanes_[warp],
                   above = ready & ~((2u << last_lane_[warp]) - 1u);  // round-robin in ascending order
    const unsigned lane = static_cast<unsigned>(__builtin_ctz(above ? above : ready));
    last_lane_[warp] = static_cast<uint8_t>(lane);
    lanes_[warp] = ready & ~(1u << lane);
    if (!lanes_[warp]) head_ = (head_ + 1) & ring_mask_, --count_;
    return warp * kWarpSize + lane;
  }
  /// The warp polls, so others run first.
  void defer(unsigned warp);

 private:
  unsigned take_seeded();
  void push_newest(unsigned warp) { order_[(head_ + count_++) & ring_mask_] = warp; }
  unsigned& at(unsigned i) { return order_[(head_ + i) & ring_mask_]; }
  void bring_to_front(unsigned i) { std::swap(at(0), at(i)); }

  Policy policy_ = Policy::in_order;
  Random* random_ = nullptr;
  std::vector<uint32_t> lanes_, priority_;
  std::vector<uint8_t> last_lane_;
  std::vector<unsigned> order_;  // a ring; oldest at head_
  unsigned head_ = 0, count_ = 0, ring_mask_ = 0;
};

struct StaticVariable {
  const void* tag;
  size_t offset, size;
};

struct Group {
  Launch* launch = nullptr;
  bool seeded = false, failed = false;
  Random random;
  ReadySet ready;
  unsigned live = 0;
  uint64_t idle_polls = 0;
  Fiber main;  // of the OS thread
  std::vector<std::unique_ptr<Block>> blocks;
  unsigned block_count = 0, warps_per_block = 0;
  std::unique_ptr<Thread[]> threads;
  std::unique_ptr<Warp[]> warps;
  unsigned warp_capacity = 0;
  Array<Fiber*> free_fibers;
  std::vector<Fiber*> all_fibers;
  std::vector<Fiber*>
      thread_fibers;  // TSan only: two per thread, used alternately, so that they do not order blocks
  unsigned turn = 0;
  Array<Transfer> transfers;  // loads in flight
  Array<StaticVariable> statics;
  size_t statics_end = 0;
  unsigned cluster_arrived = 0, cluster_phase = 0;
  Array<Thread*> cluster_waiting;
  char cluster_sync[2] = {};
  char begin_sync = 0;
  Fiber* agent = nullptr;  // TSan: the fiber that reads and writes on behalf of asynchronous engines
  Stats stats{};
};

inline bool same_site(Site a, Site b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}
inline Thread& self() { return *static_cast<Thread*>(g_cur); }
inline Warp& warp_of(Thread& t) { return t.block->warps[t.warp]; }
inline Thread* warp_threads(Thread& t) { return t.block->threads + t.warp * kWarpSize; }

// ---- scheduler.cpp
/// Suspends the running thread until it is woken.
void block_self(const char* waiting_for, Site site);
void wake(Thread& t);
void wake_lanes(Block& block, unsigned warp, uint32_t lanes);
void run_group(Group& group, uint64_t index);
/// Ends the group and returns to the OS thread permanently.
[[noreturn]] void abandon_group(Group& group);

// ---- report.cpp
[[noreturn]] void fail_at(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));
void report_deadlock(Group& group);
std::string where(Site site);

// ---- warp.cpp
/// Waits for the other lanes of `mask`; the last one calls collective.complete.
void meet(uint32_t mask, const Collective& collective, int argument, Site site);
/// A thread has returned: completes rendezvous that waited only for it.
void lane_exited(Thread& t);

// ---- shared_memory.cpp
void open_shared_memory(Block& block, size_t dynamic_bytes);
/// Fails if the gaps around the block's variables were written to.
void check_shared_gaps(Block& block);
/// The host address of `bytes` at a shared address of this block; fails if it is out of bounds.
char* shared_range(uint32_t address, size_t bytes, const char* what, Site site);
/// The block of this rank in the cluster; fails if its shared memory is gone because it has ended.
Block& block_in_cluster(unsigned rank, Site site);

// ---- async.cpp, tma.cpp, wgmma.cpp
void check_global_range(const void* p, size_t bytes, const char* what, Site site);
void mbarrier_complete_tx(Group& group, uint64_t* barrier, unsigned bytes);
void mbarrier_check(uint64_t* barrier, Site site);
/// A key of the phase that arrivals and transfers now count towards.
const void* mbarrier_sync_key(uint64_t* barrier);
void complete_transfer(Group& group, unsigned index);
void check_async_at_exit(Thread& t);

/// TSan: during its lifetime, accesses count as those of the block's asynchronous engines, to which only data
/// published by fence.proxy.async is visible.
class AsyncAgent {
 public:
  explicit AsyncAgent(Thread& t);
  ~AsyncAgent();
  AsyncAgent(const AsyncAgent&) = delete;

 private:
  [[maybe_unused]] Thread& thread_;
};

}  // namespace emu
