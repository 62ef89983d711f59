// wgmma.mma_async m64nNk16: each warp of a warpgroup computes its own 16 rows. Registers of an accumulator
// hold poison from the issue to the wait; shared memory is read at the wait, or, in a seeded schedule,
// perhaps at the commit. Layouts of operands and the matrix descriptor: PTX ISA, "Asynchronous Warpgroup
// Level Matrix Shared Memory Layout".
#include <algorithm>
#include <cmath>

#include "machine.h"

namespace emu {
namespace {

constexpr uint32_t kInFlight = 0x7fc0dead;  // a NaN
constexpr int kDepth = 16;                  // k of one instruction
constexpr int kRowsPerWarp = 16;
constexpr int kMaxColumns = 256;
constexpr unsigned kMaxAccumulators = 8;

/// One operand in shared memory, `size` (rows of A, columns of B) by 16, elements of 2 bytes.
class Operand {
 public:
  Operand(uint64_t descriptor, bool mn_major)
      : start_(static_cast<uint32_t>(descriptor & 0x3fff) << 4),
        leading_(static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4),
        stride_(static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4),
        mn_major_(mn_major) {
    constexpr uint32_t kSpans[] = {16, 128, 64, 32};  // bytes of a row that are swizzled together
    span_ = kSpans[descriptor >> 62];
  }

  /// Shared address of the 16 bytes that begin with element (mn, k): eight elements along k, or along mn if
  /// mn-major.
  uint32_t chunk(int mn, int k) const {
    const uint32_t m = static_cast<uint32_t>(mn), byte = static_cast<uint32_t>(k) * 2;
    if (mn_major_) {
      const uint32_t width = span_ / 2, depth = static_cast<uint32_t>(k);
      const uint32_t outer =
          m / width * (swizzles() ? leading_ : stride_) + depth / 8 * (swizzles() ? stride_ : leading_);
      return swizzled(start_ + outer + depth % 8 * span_ + m % width * 2);
    }
    if (!swizzles()) return start_ + m / 8 * stride_ + m % 8 * 16 + byte / 16 * leading_;
    return swizzled(start_ + m / 8 * stride_ + m % 8 * span_ + byte);
  }

  /// f(mn, k) for the chunks that hold elements [first, first + size) x 16.
  template <class F>
  void for_each_chunk(int first, int size, F&& f) const {
    if (mn_major_) {
      for (int k = 0; k < kDepth; ++k)
        for (int mn = first; mn < first + size; mn += 8) f(mn, k);
    } else {
      for (int mn = first; mn < first + size; ++mn)
        for (int k = 0; k < kDepth; k += 8) f(mn, k);
    }
  }

  bool mn_major() const { return mn_major_; }

 private:
  bool swizzles() const { return span_ > 16; }
  uint32_t swizzled(uint32_t address) const { return address ^ (address >> 3 & (span_ - 16)); }

  uint32_t start_, leading_, stride_, span_;
  bool mn_major_;
};

float low_bf16(uint32_t pair) { return from_bits<float>(static_cast<uint64_t>(pair << 16)); }
float high_bf16(uint32_t pair) { return from_bits<float>(static_cast<uint64_t>(pair & 0xffff0000u)); }

/// Elements [first, first + size) x 16 to out[mn - first or k][...]: element (mn, k) at (mn - first) *
/// mn_step + k * k_step.
void decode(const Operand& operand, int first, int size, float* out, int mn_step, int k_step,
            const WgmmaOp& op) {
  uint32_t lowest = ~0u, highest = 0;
  operand.for_each_chunk(first, size, [&](int mn, int k) {
    const uint32_t address = operand.chunk(mn, k);
    lowest = std::min(lowest, address), highest = std::max(highest, address);
  });
  const char* base = shared_range(lowest, highest - lowest + 16, "wgmma operand", op.site) - lowest;
  const int step = operand.mn_major() ? mn_step : k_step;
  operand.for_each_chunk(first, size, [&](int mn, int k) {
    uint16_t values[8];
    san::copy(values, base + operand.chunk(mn, k), sizeof values);
    float* to = out + (mn - first) * mn_step + k * k_step;
    for (int i = 0; i < 8; ++i) to[i * step] = low_bf16(values[i]);
  });
}

/// The rows of one warp; `index` is the operation's place in every lane's queue.
void execute(Thread* lanes, unsigned index) {
  const WgmmaOp& op = lanes[0].wgmmas[index];
  const int columns = 2 * op.accumulator.count,
            first_row = static_cast<int>(lanes[0].warp % 4) * kRowsPerWarp;
  alignas(64) float a[kRowsPerWarp][kDepth], product[kMaxColumns];
  alignas(64) static thread_local float b[kDepth][kMaxColumns], c[kRowsPerWarp][kMaxColumns];
  ++lanes[0].group->stats.wgmma;

  if (op.a_in_registers) {
    for (unsigned l = 0; l < kWarpSize; ++l)
      for (unsigned i = 0; i < 4; ++i) {
        float* to = &a[l / 4 + 8 * (i % 2)][l % 4 * 2 + 8 * (i / 2)];
        to[0] = low_bf16(lanes[l].wgmmas[index].a[i]), to[1] = high_bf16(lanes[l].wgmmas[index].a[i]);
      }
  } else {
    decode(Operand(op.a_descriptor, op.a_mn_major), first_row, kRowsPerWarp, &a[0][0], kDepth, 1, op);
  }
  decode(Operand(op.b_descriptor, op.b_mn_major), 0, columns, &b[0][0], 1, kMaxColumns, op);

  for (int row = 0; row < kRowsPerWarp; ++row) {
    for (int n = 0; n < columns; ++n) product[n] = 0;
    for (int k = 0; k < kDepth; ++k)
      for (int n = 0; n < columns; ++n) product[n] += a[row][k] * b[k][n];
    for (int n = 0; n < columns; ++n) c[row][n] = product[n];
  }

  // Registers 4 j to 4 j + 3 of a lane: rows g, g, g + 8, g + 8; columns 8 j + t, t + 1, t, t + 1.
  for (unsigned l = 0; l < kWarpSize; ++l) {
    const WgmmaOp& mine = lanes[l].wgmmas[index];
    const unsigned g = l / 4, t = l % 4 * 2;
    for (int i = 0; i < mine.accumulator.count; ++i) {
      const float value =
          c[g + (i & 2 ? 8 : 0)][static_cast<unsigned>(i / 4 * 8) + t + static_cast<unsigned>(i & 1)];
      float& to = mine.accumulator.values[i];
      to = mine.scale_d ? to + value : value;
    }
  }
}

void check_uniform(Thread* lanes) {
  Array<WgmmaOp>& first = lanes[0].wgmmas;
  for (unsigned l = 1; l < kWarpSize; ++l) {
    Array<WgmmaOp>& other = lanes[l].wgmmas;
    if (other.size() != first.size()) fail("wgmma: lanes of one warp have issued different numbers of them");
    for (unsigned i = 0; i < first.size(); ++i)
      if (other[i].a_descriptor != first[i].a_descriptor || other[i].b_descriptor != first[i].b_descriptor ||
          other[i].scale_d != first[i].scale_d)
        fail_at(first[i].site, "wgmma: descriptors or scale differ between lanes of a warp");
  }
}

/// Copies the values of accumulators without writes in flight to their registers.
void deliver(Thread& t) {
  unsigned kept = 0;
  for (unsigned k = 0; k < t.accumulators.size(); ++k) {
    const Accumulator a = t.accumulators[k];
    const bool busy = std::any_of(t.wgmmas.begin(), t.wgmmas.end(),
                                  [&](const WgmmaOp& op) { return op.accumulator.registers == a.registers; });
    if (busy) {
      t.accumulators[kept++] = a;
      continue;
    }
    for (int i = 0; i < a.count; ++i)
      if (static_cast<uint32_t>(to_bits(a.registers[i])) != kInFlight)
        fail("wgmma: accumulator register %d was written while in flight, found after the wait at %s:%d", i,
             t.waiting_at.file, t.waiting_at.line);
    san::copy(a.registers, a.values, sizeof(float) * static_cast<size_t>(a.count));
    t.value_buffers.push_back(a.values);
  }
  t.accumulators.truncate(kept);
}

/// Completes all but the `pending` newest groups.
void complete_groups(Thread* lanes, uint32_t present, int pending) {
  if (present != kAllLanes) fail("wgmma: lanes of the warp have exited");
  check_uniform(lanes);
  Thread& first = lanes[0];
  unsigned done = 0;
  while (done < first.wgmmas.size() &&
         static_cast<int>(first.wgmma_groups - first.wgmmas[done].commit_group) > pending) {
    if (!first.wgmmas[done].executed) execute(lanes, done);
    ++done;
  }
  if (done == 0) return;
  for (unsigned l = 0; l < kWarpSize; ++l) {
    lanes[l].wgmmas.erase_front(done);
    deliver(lanes[l]);
  }
}

const Collective kWait = {"wgmma.wait_group", complete_groups};
const Collective kEarly = {"wgmma.commit_group", [](Thread* lanes, uint32_t, int) {
                             // Values are computed before the wait; registers stay poisoned until then.
                             check_uniform(lanes);
                             Array<WgmmaOp>& ops = lanes[0].wgmmas;
                             for (unsigned i = 0; i < ops.size(); ++i)
                               if (!ops[i].executed) execute(lanes, i), ops[i].executed = true;
                           }};
const Collective kSetRegisters = {"setmaxnreg", [](Thread*, uint32_t, int) {}};

/// TSan: the reads of the instruction, by the issuing lanes and by the engine.
void note_reads([[maybe_unused]] Thread& t, [[maybe_unused]] const WgmmaOp& op) {
#if EMU_TSAN
  const Operand a(op.a_descriptor, op.a_mn_major), b(op.b_descriptor, op.b_mn_major);
  const int first_row = static_cast<int>(t.warp % 4) * kRowsPerWarp, columns = 2 * op.accumulator.count;
  const auto for_each = [&](auto&& f) {
    if (!op.a_in_registers)
      a.for_each_chunk(first_row, kRowsPerWarp, [&](int mn, int k) { f(t.smem + a.chunk(mn, k)); });
    b.for_each_chunk(0, columns, [&](int mn, int k) { f(t.smem + b.chunk(mn, k)); });
  };
  unsigned i = 0;
  for_each([&](const char* p) {
    if (i++ % kWarpSize == t.lane) san::reads(p, 16);
  });
  if (t.lane != 0) return;
  const AsyncAgent agent(t);
  for_each([&](const char* p) { san::reads(p, 16); });
#endif
}

Accumulator& accumulator_in_flight(Thread& t, float* registers, int count, Site site) {
  for (Accumulator& a : t.accumulators) {
    if (a.registers != registers) continue;
    if (a.count != count) fail_at(site, "wgmma: one accumulator with two shapes");
    return a;
  }
  if (t.accumulators.size() == kMaxAccumulators) fail_at(site, "wgmma: more than 8 accumulators in flight");
  if (t.value_buffers.empty())
    t.value_buffers.push_back(static_cast<float*>(arena_alloc(sizeof(float) * kMaxColumns / 2)));
  Accumulator a{registers, t.value_buffers.pop_back(), count};
  san::copy(a.values, registers, sizeof(float) * static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) san::copy(registers + i, &kInFlight, sizeof kInFlight);
  t.accumulators.push_back(a);
  return t.accumulators.back();
}

}  // namespace

void wgmma(float* d, int n, const uint32_t* a_registers, uint64_t a_descriptor, uint64_t b_descriptor,
           int scale_d, int a_mn_major, int b_mn_major, Site site) {
  Thread& t = self();
  if (n < 8 || n > kMaxColumns || n % 8) fail_at(site, "wgmma: N is %d, not a multiple of 8 up to 256", n);
  if (t.block->warp_count % 4) fail_at(site, "wgmma: the block has no whole number of warpgroups");
  if (!t.wgmma_fenced) fail_at(site, "wgmma without a wgmma.fence since the last wait");
  for (const uint64_t descriptor : {a_registers ? b_descriptor : a_descriptor, b_descriptor})
    if (descriptor >> 49 & 7) fail_at(site, "wgmma: a matrix base offset other than 0");
  WgmmaOp op{};
  op.accumulator = accumulator_in_flight(t, d, n / 2, site);
  op.a_in_registers = a_registers != nullptr;
  if (a_registers) san::copy(op.a, a_registers, sizeof op.a);
  op.a_descriptor = a_descriptor, op.b_descriptor = b_descriptor;
  op.scale_d = scale_d != 0;
  op.a_mn_major = a_mn_major, op.b_mn_major = b_mn_major;
  op.commit_group = t.wgmma_groups;
  op.site = site;
  note_reads(t, op);
  t.wgmmas.push_back(op);
}

void wgmma_fence(Site) { self().wgmma_fenced = true; }

void wgmma_commit(Site site) {
  Thread& t = self();
  ++t.wgmma_groups;
  if (!t.group->seeded) return;
  // All lanes of a warp must decide alike.
  Random dice{t.group->launch->seed * 0x2545f4914f6cdd1dull + t.wgmma_groups * 64 + t.warp};
  if (dice.one_in(4)) meet(kAllLanes, kEarly, 0, site);
}

void wgmma_wait(int pending, Site site) {
  Thread& t = self();
  t.waiting_at = site;
  // TSan: the tensor core's reads were attributed to the lanes, and the wait ends them for the whole warp.
  [[maybe_unused]] const char* key = &warp_of(t).wgmma_sync;
  san::release(key);
  meet(kAllLanes, kWait, pending, site);
  san::acquire(key);
  san::acquire(&t.block->agent_sync);
  t.wgmma_fenced = false;
}

void setmaxnreg(int registers, Site site) {
  constexpr unsigned kRegistersPerBlock = 65536;
  if (registers < 24 || registers > 256 || registers % 8)
    fail_at(site, "setmaxnreg: %d is no multiple of 8 from 24 to 256", registers);
  Thread& t = self();
  t.registers = static_cast<unsigned>(registers);
  meet(kAllLanes, kSetRegisters, 0, site);
  unsigned total = 0;
  for (unsigned i = 0; i < t.block->thread_count; ++i) {
    if (t.block->threads[i].state == ThreadState::fresh || t.block->threads[i].registers == 0)
      return;  // not all warps yet
    total += t.block->threads[i].registers;
  }
  // At most the registers that the block starts with, a multiple of 8 per thread: a larger increase waits
  // forever on a GPU.
  const unsigned at_entry = kRegistersPerBlock / t.block->thread_count / 8 * 8 * t.block->thread_count;
  if (total > at_entry)
    fail_at(site, "setmaxnreg: the block asks for %u registers, more than the %u it can start with", total,
            at_entry);
}

}  // namespace emu
