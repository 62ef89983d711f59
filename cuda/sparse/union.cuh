#pragma once
// The keys of neighbouring queries as one list, which attention's tiles of tensor cores go through: the union
// of up to 32 queries' selected keys, ascending, each with a bit per query that selected it. The list is made
// in shared memory, range after range of the keys: every warp sets the bits of some queries' keys, then the
// keys with bits are gathered up. Its order does not depend on the schedule.
#include "attention/visible_keys.cuh"
#include "common/ptx.cuh"
#include "ops/sparse_attention.h"

namespace sluice::cuda {

/// A Selection, as kernels take it.
struct Selected {
  const int *first, *count, *first_key;  // (G, Tq, room), (G, Tq), (Tq): counted among the keys
  OwnKeys own;
  int64_t queries, keys, room;
  int block;
  DEVICE_INLINE int last(int64_t t) const { return own.of(t); }
};

inline Selected selected_of(const VisibleKeys& visible, const Selection& keys) {
  Selected s = {};
  s.first = device_data<int>(keys.first), s.count = device_data<int>(keys.count);
  s.first_key = visible.first, s.own = visible.own;
  s.queries = visible.own.queries, s.keys = visible.own.keys, s.room = keys.first.dim(2);
  s.block = static_cast<int>(keys.block);
  return s;
}

template <int kThreads, int kKeysOfTile = 64, int kKeysOfRange = 1024>
class KeyUnion {
 public:
  static constexpr int kRange = kKeysOfRange, kTile = kKeysOfTile, kWarps = kThreads / 32;
  struct Shared {
    unsigned masks[kRange];
    int keys[kRange + kTile];
    unsigned members[kRange + kTile];  // bit i: query t0 + i has selected the key
    int at[32];                        // how far each query's list has been read
    int sums[kWarps];
    int64_t t0;
    int tokens, next,
        end;  // keys from `next` on are not listed yet. Not in registers, which have better uses.
  };

  /// Queries [t0, t0 + tokens) of an index set.
  DEVICE_INLINE KeyUnion(Shared& shared, const Selected& selected, int set, int64_t t0, int tokens)
      : s_(shared), p_(selected), set_(set) {
    if (threadIdx.x < 32) s_.at[threadIdx.x] = 0;
    if (threadIdx.x == 0)
      s_.t0 = t0, s_.tokens = tokens, s_.next = selected.first_key[t0],
      s_.end = selected.last(t0 + tokens - 1) + 1;
  }

  /// Lists further keys, behind those of the last call that were not in a whole tile, until there is a tile
  /// or no key is left. Returns the number of tiles, of which only the last one of all may be partial: see
  /// valid(). A barrier precedes the return.
  DEVICE_INLINE int list() {
    const int rest = count_ - tiles_ * kTile;
    if (tiles_ > 0 && rest > 0) {  // fewer than a tile
      const int thread = static_cast<int>(threadIdx.x);
      constexpr int kEach = (kTile + kThreads - 1) / kThreads;
      int moved[kEach];
      unsigned moved_members[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int e = thread + i * kThreads;
        moved[i] = e < rest ? s_.keys[tiles_ * kTile + e] : 0;
        moved_members[i] = e < rest ? s_.members[tiles_ * kTile + e] : 0u;
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (const int e = thread + i * kThreads; e < rest)
          s_.keys[e] = moved[i], s_.members[e] = moved_members[i];
    }
    count_ = rest > 0 ? rest : 0;
    __syncthreads();  // the last list has been read, and its rest moved
    while (count_ < kTile && s_.next < s_.end) append();
    tiles_ = s_.next < s_.end ? count_ / kTile : (count_ + kTile - 1) / kTile;
    return tiles_;
  }
  /// Keys of the j-th tile of the list, and how many there are.
  DEVICE_INLINE const int* keys(int j) const { return s_.keys + j * kTile; }
  DEVICE_INLINE int valid(int j) const { return min(kTile, count_ - j * kTile); }
  DEVICE_INLINE unsigned members(int j, int i) const { return i < valid(j) ? s_.members[j * kTile + i] : 0u; }

 private:
  DEVICE_INLINE void append() {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int next = s_.next, range_end = next + kRange;
    const int64_t row0 = set_ * p_.queries + s_.t0;
    for (int i = thread; i < kRange; i += kThreads) s_.masks[i] = 0;
    __syncthreads();
    for (int i = warp; i < s_.tokens; i += kWarps) {
      const int* const list = p_.first + (row0 + i) * p_.room;
      const int n = p_.count[row0 + i], stop = min(range_end, p_.last(s_.t0 + i) + 1);
      int at = s_.at[i];
      for (;;) {
        const int e = at + lane, key = e < n ? list[e] : 0;
        const bool inside = e < n && key < range_end;
        if (inside)
          for (int k = max(key, next); k < min(key + p_.block, stop); ++k)
            atomicOr(&s_.masks[k - next], 1u << i);
        // A block that goes on behind the range is read again.
        const unsigned done = __ballot_sync(kFullWarp, inside && key + p_.block <= range_end);
        at += __popc(done);
        if (done != kFullWarp) break;
      }
      __syncwarp();  // all lanes have read where the list goes on
      if (lane == 0) s_.at[i] = at;
    }
    __syncthreads();
    constexpr int kChunk = kRange / kWarps;
    const int base = warp * kChunk;
    int mine = 0;
    for (int i = 0; i < kChunk; i += 32)
      mine += __popc(__ballot_sync(kFullWarp, s_.masks[base + i + lane] != 0));
    if (lane == 0) s_.sums[warp] = mine;
    __syncthreads();
    int place = count_;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) place += s_.sums[w];
      count_ += s_.sums[w];
    }
    for (int i = 0; i < kChunk; i += 32) {
      const unsigned mask = s_.masks[base + i + lane], votes = __ballot_sync(kFullWarp, mask != 0);
      if (mask) {
        const int to = place + __popc(votes & ((1u << lane) - 1));
        s_.keys[to] = next + base + i + lane, s_.members[to] = mask;
      }
      place += __popc(votes);
    }
    if (thread == 0) s_.next = range_end;
    __syncthreads();
  }

  Shared& s_;
  const Selected& p_;
  int set_;
  int count_ = 0, tiles_ = 0;
};

}  // namespace sluice::cuda
