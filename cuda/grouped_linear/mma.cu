// Grouped matrix products in bf16 for every GPU since sm_80: mma.sync m16n8k16, f32 sums.
//
// Mapping: a tile of 128 x 128 per block of four warps, 64 x 64 each, so that eight ldmatrix serve 32
// products; the contraction goes 32 elements at a time through four stages of shared memory, filled by
// cp.async, and two blocks share a multiprocessor: while one is at its first loads or its last stores, the
// other multiplies. Rows are gathered where they are copied: a thread keeps the numbers of its four rows, or,
// where rows are contracted, reads those of the next step while this one is multiplied; permuting into memory
// first would read and write every row once more. The output leaves through shared memory in rows of 16-byte
// vectors; a weight's gradient is read, added to and written where it lies, 32 bytes of a row at a time, by
// the one block that owns its tile: no atomics. Where rows are not whole vectors, elements are loaded and
// stored one by one. Bound by the tensor cores, then by L2 (64 operations per byte). Not yet run on a GPU.
#include "attention/mma.cuh"
#include "grouped_linear/kernels.cuh"

namespace sluice::cuda {
namespace {

constexpr int kTile = kGroupedTileRows, kDepth = 32, kStages = 4, kThreads = 128;
constexpr int kOperandBytes = kTile * kDepth * 2, kStageBytes = 2 * kOperandBytes;
constexpr int kSmemBytes = kStages * kStageBytes;
static_assert(kTile * kTile * 2 <= kSmemBytes, "the output passes through the stages");

/// Copies one operand's part of a tile, 32 elements of the contraction at a time. It is stored
/// [row][contraction], or with kContractsRows [contraction][column]; so it lies in shared memory too, 128 x
/// 32 or 32 x 128.
template <bool kContractsRows, bool kVectors>
class Loader {
 public:
  static constexpr int kRowElements = kContractsRows ? kTile : kDepth;

  /// Rows [row, end) of a matrix with `columns` columns, from column `column` on, through the index if there
  /// is one.
  DEVICE_INLINE Loader(const nv_bf16* matrix, const int* index, int columns, int row, int end, int column)
      : matrix_(matrix),
        index_(index),
        columns_(columns),
        row_(row + own_row()),
        end_(end),
        column_(column + own_chunk() * 8) {
    fetch_rows();
  }

  DEVICE_INLINE void load(unsigned char* tile) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const uint32_t at = swizzled<kRowElements>(own_row() + i * kRowStep, own_chunk());
      const bool inside = rows_[i] >= 0 && column_ < columns_;
      const nv_bf16* from = matrix_ + (inside ? static_cast<int64_t>(rows_[i]) * columns_ + column_ : 0);
      if constexpr (kVectors) {
        cp_async_16(smem_addr(tile) + at, from, inside);
      } else {
        Vec16<nv_bf16> v;
#pragma unroll
        for (int e = 0; e < 8; ++e)
          v.v[e] = inside && column_ + e < columns_ ? from[e] : __float2bfloat16_rn(0.f);
        *reinterpret_cast<Vec16<nv_bf16>*>(tile + at) = v;
      }
    }
    if constexpr (kContractsRows) {
      row_ += kDepth;
      fetch_rows();
    } else {
      column_ += kDepth;
    }
  }

 private:
  static constexpr int kChunks = kRowElements / 8, kRowStep = kThreads / kChunks, kCopies = 4;
  DEVICE_INLINE static int own_row() { return static_cast<int>(threadIdx.x) / kChunks; }
  DEVICE_INLINE static int own_chunk() { return static_cast<int>(threadIdx.x) % kChunks; }
  DEVICE_INLINE void fetch_rows() {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = row_ + i * kRowStep;
      rows_[i] = row < end_ ? (index_ ? index_[row] : row) : -1;
    }
  }

  const nv_bf16* matrix_;
  const int* index_;
  int columns_, row_, end_, column_;
  int rows_[kCopies];  // rows of the matrix that the next load takes; -1: zeros
};

template <bool kVectors>
DEVICE_INLINE void store_rows(const GroupedProduct& p, const GroupedTile& t, const unsigned char* tile) {
  auto* out = static_cast<nv_bf16*>(p.out);
  const int chunk = static_cast<int>(threadIdx.x) % 16, column = t.n0 + chunk * 8;
  for (int row = static_cast<int>(threadIdx.x) / 16; row < kTile; row += kThreads / 16) {
    if (t.m0 + row >= t.m_end || column >= p.n) break;
    nv_bf16* to = out + static_cast<int64_t>(t.m0 + row) * p.n + column;
    const auto v = *reinterpret_cast<const Vec16<nv_bf16>*>(tile + swizzled<kTile>(row, chunk));
    if constexpr (kVectors) {
      store_vec<8>(to, v);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (column + e < p.n) to[e] = v.v[e];
    }
  }
}

template <bool kVectors>
DEVICE_INLINE void add_to_weight(const GroupedProduct& p, const GroupedTile& t, int m, int n,
                                 const float (&acc)[4][8][4]) {
  float* out = static_cast<float*>(p.out) + static_cast<int64_t>(t.group) * p.m * p.n;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = t.m0 + m + i * 16 + r * 8;
      if (row >= t.m_end) continue;
      float* to = out + static_cast<int64_t>(row) * p.n;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int column = t.n0 + n + j * 8;
        const float x = acc[i][j][2 * r], y = acc[i][j][2 * r + 1];
        if constexpr (kVectors) {
          if (column >= p.n) continue;
          const Vec<float, 2> old = load_vec<2>(to + column);
          store_vec<2>(to + column, {{old.v[0] + x, old.v[1] + y}});
        } else {
          if (column < p.n) to[column] += x;
          if (column + 1 < p.n) to[column + 1] += y;
        }
      }
    }
}

template <GroupedKind kKind, bool kVectors>
__global__ void __launch_bounds__(kThreads, 2) grouped_linear_mma_kernel(GroupedProduct p) {
  constexpr bool kWeight = kKind == GroupedKind::backward_weight;
  constexpr bool kRowsOfA = kWeight, kRowsOfB = kKind != GroupedKind::forward;  // what is contracted
  using LoaderA = Loader<kRowsOfA, kVectors>;
  using LoaderB = Loader<kRowsOfB, kVectors>;
  DYN_SMEM(unsigned char, smem, 1024);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int m = warp / 2 * 64, n = warp % 2 * 64;  // the warp's corner of the tile
  // Where this lane's fragments begin; the next 16 rows or columns are a constant further, or ^ 32.
  const uint32_t a_lane = kRowsOfA ? swizzled<kTile>(fragment_row_t(lane), m / 8 + fragment_chunk_t(lane))
                                   : swizzled<kDepth>(m + fragment_row(lane), fragment_chunk(lane));
  const uint32_t b_lane = kRowsOfB ? swizzled<kTile>(fragment_row(lane), n / 8 + fragment_chunk(lane))
                                   : swizzled<kDepth>(n + fragment_row_t(lane), fragment_chunk_t(lane));

  const int tiles = num_tiles<kKind, kTile>(p);
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
    const GroupedTile t = locate<kKind, kTile>(p, tile);
    const int steps = (t.k_end - t.k0 + kDepth - 1) / kDepth;
    if (kWeight && steps == 0) continue;  // adds nothing
    const auto *a = static_cast<const nv_bf16*>(p.a), *b = static_cast<const nv_bf16*>(p.b);
    if (!kWeight) b += static_cast<int64_t>(t.group) * p.n * p.k;
    LoaderA load_a = kRowsOfA ? LoaderA(a, p.a_index, p.m, t.k0, t.k_end, t.m0)
                              : LoaderA(a, p.a_index, p.k, t.m0, t.m_end, 0);
    LoaderB load_b =
        kRowsOfB ? LoaderB(b, p.b_index, p.n, t.k0, t.k_end, t.n0) : LoaderB(b, nullptr, p.k, t.n0, p.n, 0);
    const auto load = [&](int step) {
      if (step < steps) {
        unsigned char* stage = smem + step % kStages * kStageBytes;
        load_a.load(stage);
        load_b.load(stage + kOperandBytes);
      }
      cp_async_commit();
    };

    float acc[4][8][4] = {};
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) load(s);
    for (int step = 0; step < steps; ++step) {
      cp_async_wait<kStages - 2>();
      __syncthreads();  // this step has arrived, and the previous one is no longer read
      load(step + kStages - 1);
      const uint32_t a_tile = smem_addr(smem) + step % kStages * kStageBytes, b_tile = a_tile + kOperandBytes;
#pragma unroll
      for (int kk = 0; kk < kDepth / 16; ++kk) {
        uint32_t fa[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (kRowsOfA)
            ldmatrix_x4_trans(fa[i], a_tile + (a_lane ^ (i << 5)) + kk * 16 * kTile * 2);
          else
            ldmatrix_x4(fa[i], a_tile + (a_lane ^ (kk << 5)) + i * 16 * kDepth * 2);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t fb[4];
          if constexpr (kRowsOfB)
            ldmatrix_x4_trans(fb, b_tile + (b_lane ^ (j << 5)) + kk * 16 * kTile * 2);
          else
            ldmatrix_x4(fb, b_tile + (b_lane ^ (kk << 5)) + j * 16 * kDepth * 2);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            mma_16816(acc[i][2 * j], fa[i], fb[0], fb[1]);
            mma_16816(acc[i][2 * j + 1], fa[i], fb[2], fb[3]);
          }
        }
      }
    }
    cp_async_wait<0>();
    __syncthreads();  // no stage is read any more

    if constexpr (kWeight) {
      add_to_weight<kVectors>(p, t, m + lane / 4, n + lane % 4 * 2, acc);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) store_accumulators<kTile>(smem, m + i * 16, n / 8, acc[i], 1.f, 1.f);
      __syncthreads();
      store_rows<kVectors>(p, t, smem);
      __syncthreads();
    }
  }
}

template <GroupedKind kKind>
void run(Context& ctx, const GroupedProduct& p) {
  const int64_t blocks = std::min<int64_t>(max_tiles<kKind>(p, kTile), 2 * num_multiprocessors(ctx));
  const LaunchConfig config = {
      .grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads), .smem = kSmemBytes};
  if (whole_vectors(p))
    launch(ctx, "grouped_linear_mma", config, grouped_linear_mma_kernel<kKind, true>, p);
  else
    launch(ctx, "grouped_linear_mma", config, grouped_linear_mma_kernel<kKind, false>, p);
}

}  // namespace

void grouped_linear_mma(Context& ctx, GroupedKind kind, const GroupedProduct& p) {
  if (kind == GroupedKind::forward)
    run<GroupedKind::forward>(ctx, p);
  else if (kind == GroupedKind::backward_input)
    run<GroupedKind::backward_input>(ctx, p);
  else
    run<GroupedKind::backward_weight>(ctx, p);
}

}  // namespace sluice::cuda
