#pragma once
// Row kernels: a group of kLanes threads processes a row; lane l keeps vectors l, l + kLanes, ... in
// registers, so that a row is read once. Also sums over rows, one per column, in a deterministic order: a
// block keeps sums of its columns in registers over all its rows and writes them once (store_columns);
// column_sums adds the sums of the blocks.
#include "common/map.cuh"
#include "common/ptx.cuh"

namespace sluice::cuda {

/// Elements [i, i + N) of a weight, or ones without a weight.
template <int N, class T>
DEVICE_INLINE Vec<T, N> load_weight(const T* weight, int64_t i) {
  if (weight) return load_vec<N>(weight + i);
  Vec<T, N> ones;
#pragma unroll
  for (int e = 0; e < N; ++e) ones.v[e] = from_float<T>(1.f);
  return ones;
}

/// Sums over groups of kLanes threads (a power of two) in a block of kThreads; every thread gets the sum of
/// its group. All threads of the block must call it together. Groups that span warps use one barrier, and a
/// second call writes to other memory.
template <int kThreads, int kLanes>
class GroupSum {
 public:
  DEVICE_INLINE float operator()(float v) {
#pragma unroll
    for (int offset = (kLanes < 32 ? kLanes : 32) / 2; offset > 0; offset >>= 1)
      v += __shfl_xor_sync(kFullWarp, v, offset);
    if constexpr (kLanes > 32) {
      constexpr int kWarps = kThreads / 32, kGroupWarps = kLanes / 32;
      STATIC_SMEM(float, sums, [2][kWarps]);
      const int warp = static_cast<int>(threadIdx.x) / 32;
      if (threadIdx.x % 32 == 0) sums[turn_][warp] = v;
      __syncthreads();
      v = 0;
#pragma unroll
      for (int i = 0; i < kGroupWarps; ++i) v += sums[turn_][warp / kGroupWarps * kGroupWarps + i];
      turn_ ^= 1;
    }
    return v;
  }

 private:
  int turn_ = 0;
};

/// Vectors of 16 bytes on their way to shared memory while the threads of a block compute on earlier ones:
/// kCount for each thread, which reads only what it has asked for itself, so that no barrier is needed. They
/// take no registers until they are read.
template <int kThreads, int kCount>
class Prefetch {
 public:
  static constexpr size_t kBytes = size_t{kThreads} * kCount * 16;

  /// smem: kBytes, aligned to 16.
  DEVICE_INLINE explicit Prefetch(char* smem) : mine_(smem + threadIdx.x * 16) {}
  /// Vector i is what stands at `from`, or zero.
  DEVICE_INLINE void ask(int i, const void* from, bool valid = true) {
    cp_async_16(smem_addr(mine_ + i * (kThreads * 16)), from, valid);
  }
  /// Ends a group of what was asked for.
  DEVICE_INLINE void commit() { cp_async_commit(); }
  /// Waits for all groups, or all but the last one.
  DEVICE_INLINE void wait() { cp_async_wait<0>(); }
  DEVICE_INLINE void wait_but_last() { cp_async_wait<1>(); }
  template <class T>
  DEVICE_INLINE Vec16<T> read(int i) const {
    return *reinterpret_cast<const Vec16<T>*>(mine_ + i * (kThreads * 16));
  }

 private:
  char* mine_;
};

/// columns[v][e] of each thread is column v stride + lane kN + e, for lane kN < stride (at most kLanes kN).
/// Adds the groups of the block in order and writes columns [0, width) of the sum to out.
template <int kThreads, int kLanes, int kV, int kN>
DEVICE_INLINE void store_columns(float* out, float (&columns)[kV][kN], int stride, int width) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  if constexpr (kLanes == kThreads) {
#pragma unroll
    for (int v = 0; v < kV; ++v) {
      const int column = v * stride + lane * kN;
      if (lane * kN < stride && column < width) {
#pragma unroll
        for (int e = 0; e < kN; ++e) out[column + e] = columns[v][e];
      }
    }
  } else {
    constexpr int kTeam = kLanes < 32 ? 32 : kLanes, kTeams = kThreads / kTeam;  // whole warps
    STATIC_SMEM(float, sums, [kV][kLanes * kN]);
#pragma unroll
    for (int v = 0; v < kV; ++v)
#pragma unroll
      for (int e = 0; e < kN; ++e) {
#pragma unroll
        for (int offset = 16; offset >= kLanes; offset >>= 1)
          columns[v][e] += __shfl_xor_sync(kFullWarp, columns[v][e], offset);
      }
    for (int team = 0; team < kTeams; ++team) {
      if (thread / kTeam == team && thread % kTeam < kLanes) {
#pragma unroll
        for (int v = 0; v < kV; ++v)
#pragma unroll
          for (int e = 0; e < kN; ++e) {
            float& sum = sums[v][lane * kN + e];
            sum = team == 0 ? columns[v][e] : sum + columns[v][e];
          }
      }
      __syncthreads();
    }
#pragma unroll
    for (int v = 0; v < kV; ++v) {
      for (int i = thread; i < kLanes * kN; i += kThreads)
        if (i < stride && v * stride + i < width) out[v * stride + i] = sums[v][i];
    }
  }
}

constexpr int kSumColumns = 32, kSumRows = 16;

/// A block processes 32 columns (128 contiguous bytes of a row), its thread (x, y) rows y, y + 16, ... of
/// column x. It is a template only so that several sources can include it.
template <class Unused = void>
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    column_sums_kernel(float* out, const float* rows, int64_t count, int64_t width, bool add) {
  STATIC_SMEM(float, partial, [kSumRows][kSumColumns]);
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kSumColumns + x;
  float sum = 0;
  if (column < width) {
#pragma unroll 8
    for (int64_t r = y; r < count; r += kSumRows) sum += rows[r * width + column];
  }
  partial[y][x] = sum;
  __syncthreads();
  if (y == 0 && column < width) {
#pragma unroll
    for (int i = 1; i < kSumRows; ++i) sum += partial[i][x];
    out[column] = add ? out[column] + sum : sum;
  }
}

/// out (width) = or += the sum of rows (count, width).
inline void column_sums(Context& ctx, const char* name, float* out, const float* rows, int64_t count,
                        int64_t width, Into into) {
  if (width == 0) return;
  launch(ctx, name, {.grid = dim3(blocks_for(width, kSumColumns)), .block = dim3(kSumColumns, kSumRows)},
         column_sums_kernel<>, out, rows, count, width, into == Into::add);
}

}  // namespace sluice::cuda
