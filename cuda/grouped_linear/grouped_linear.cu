// Grouped matrix products (ops/grouped_linear.h): choice of the kernel, list of tiles, and the kernel for
// f32.
//   f32                                    here: for verification
//   bf16 on sm_90, rows of whole vectors   hopper.cu
//   bf16                                   mma.cu
// Weights are read in their stored order.
#include "grouped_linear/kernels.cuh"
#include "ops/elementwise.h"
#include "ops/grouped_linear.h"

namespace sluice::cuda {
namespace {

// The list of row tiles: [0].x says how many, [0].y is GroupedProduct::counter, then {group, first row, end
// of the group, 0} each. One block: a thread has the tiles of one group counted and added up with those
// before, then each warp writes those of its groups. Runs for a few microseconds whatever the sizes, bound by
// the latency of a launch and of three accesses.
constexpr int kPlanThreads = 256;
__global__ void __launch_bounds__(kPlanThreads)
    plan_row_tiles_kernel(int4* list, const int* offsets, int groups) {
  STATIC_SMEM(int, warp_tiles, [kPlanThreads / 32]);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  int before = 0;  // tiles of the groups that earlier rounds did
  for (int g0 = 0; g0 < groups; g0 += kPlanThreads) {
    const int g = g0 + thread;
    const int first = g < groups ? offsets[g] : 0, end = g < groups ? offsets[g + 1] : 0;
    const int tiles = (end - first + kGroupedTileRows - 1) / kGroupedTileRows;
    int sum = tiles;  // of the warp's groups up to this one
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(kFullWarp, sum, step);
      if (lane >= step) sum += left;
    }
    __syncthreads();  // the round before has been read
    if (lane == 31) warp_tiles[warp] = sum;
    __syncthreads();
    int at = before + sum - tiles;
#pragma unroll
    for (int w = 0; w < kPlanThreads / 32; ++w) {
      if (w < warp) at += warp_tiles[w];
      before += warp_tiles[w];
    }
    for (int j = 0; j < 32; ++j) {
      const int count = __shfl_sync(kFullWarp, tiles, j), group_at = __shfl_sync(kFullWarp, at, j);
      const int group_first = __shfl_sync(kFullWarp, first, j), group_end = __shfl_sync(kFullWarp, end, j);
      for (int i = lane; i < count; i += 32)
        list[1 + group_at + i] =
            make_int4(g0 + warp * 32 + j, group_first + i * kGroupedTileRows, group_end, 0);
    }
  }
  if (thread == 0) list[0] = make_int4(before, 0, 0, 0);
}

// f32 on the CUDA cores: a tile of 128 x 64, contracted 16 at a time through shared memory, of which a
// thread has 8 x 4 elements, every sixteenth row and column; each sum runs over the contraction in its order.
// Bound by reads of shared memory, then by arithmetic; made to be read. Not yet run on a GPU.
constexpr int kF32Columns = 64, kF32Depth = 16, kF32Threads = 256;

template <GroupedKind kKind>
__global__ void __launch_bounds__(kF32Threads, 2) grouped_linear_f32_kernel(GroupedProduct p) {
  constexpr bool kWeight = kKind == GroupedKind::backward_weight;
  STATIC_SMEM(float, a_tile, [kF32Depth][kGroupedTileRows + 1]);
  STATIC_SMEM(float, b_tile, [kF32Depth][kF32Columns + 1]);
  const auto *a = static_cast<const float*>(p.a), *b = static_cast<const float*>(p.b);
  auto* out = static_cast<float*>(p.out);
  const int thread = static_cast<int>(threadIdx.x), x = thread % 16, y = thread / 16;

  for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles<kKind, kF32Columns>(p);
       tile += static_cast<int>(gridDim.x)) {
    const GroupedTile t = locate<kKind, kF32Columns>(p, tile);
    // Element (m, k) of a, and (k, n) of b; zero outside.
    const auto a_at = [&](int m, int k) {
      if (m >= t.m_end || k >= t.k_end) return 0.f;
      const int row = kWeight ? k : m, column = kWeight ? m : k;
      return a[static_cast<int64_t>(p.a_index ? p.a_index[row] : row) * (kWeight ? p.m : p.k) + column];
    };
    const auto b_at = [&](int k, int n) {
      if (n >= p.n || k >= t.k_end) return 0.f;
      if constexpr (kWeight) return b[static_cast<int64_t>(p.b_index ? p.b_index[k] : k) * p.n + n];
      const float* weight = b + static_cast<int64_t>(t.group) * p.n * p.k;
      return kKind == GroupedKind::forward ? weight[static_cast<int64_t>(n) * p.k + k]
                                           : weight[static_cast<int64_t>(k) * p.n + n];
    };
    float sum[8][4] = {};
    for (int k = t.k0; k < t.k_end; k += kF32Depth) {
      __syncthreads();  // the step before has been read
      // Neighbouring threads read neighbouring elements of memory.
      for (int i = thread; i < kGroupedTileRows * kF32Depth; i += kF32Threads) {
        const int m = kWeight ? i % kGroupedTileRows : i / kF32Depth,
                  d = kWeight ? i / kGroupedTileRows : i % kF32Depth;
        a_tile[d][m] = a_at(t.m0 + m, k + d);
      }
      for (int i = thread; i < kF32Columns * kF32Depth; i += kF32Threads) {
        constexpr bool kAlongK = kKind == GroupedKind::forward;
        const int n = kAlongK ? i / kF32Depth : i % kF32Columns,
                  d = kAlongK ? i % kF32Depth : i / kF32Columns;
        b_tile[d][n] = b_at(k + d, t.n0 + n);
      }
      __syncthreads();
#pragma unroll
      for (int d = 0; d < kF32Depth; ++d)
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[i][j] += a_tile[d][y + 16 * i] * b_tile[d][x + 16 * j];
    }
    if (kWeight && t.k0 >= t.k_end) continue;  // adds nothing
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int m = t.m0 + y + 16 * i, n = t.n0 + x + 16 * j;
        if (m >= t.m_end || n >= p.n) continue;
        float& element =
            out[(static_cast<int64_t>(kWeight ? t.group * static_cast<int64_t>(p.m) : 0) + m) * p.n + n];
        element = kWeight ? element + sum[i][j] : sum[i][j];
      }
  }
}

void grouped_linear_f32(Context& ctx, GroupedKind kind, const GroupedProduct& p) {
  const auto run = [&]<GroupedKind kKind>(void (*kernel)(GroupedProduct)) {
    const int64_t blocks = std::min<int64_t>(max_tiles<kKind>(p, kF32Columns), 4 * num_multiprocessors(ctx));
    launch(ctx, "grouped_linear_f32",
           {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kF32Threads)}, kernel, p);
  };
  using enum GroupedKind;
  if (kind == forward) run.template operator()<forward>(grouped_linear_f32_kernel<forward>);
  if (kind == backward_input)
    run.template operator()<backward_input>(grouped_linear_f32_kernel<backward_input>);
  if (kind == backward_weight)
    run.template operator()<backward_weight>(grouped_linear_f32_kernel<backward_weight>);
}

void multiply(Context& ctx, GroupedKind kind, DType dtype, GroupedProduct& p) {
  ScratchScope t(ctx.scratch);
  const bool rows = kind != GroupedKind::backward_weight;
  int4* const list = device_data<int4>(
      t.alloc("grouped_linear.row_tiles", DType::i32, {rows ? 1 + max_row_tiles(p) : 1, 4}));
  if (ctx.dry_run || p.rows == 0) return;
  p.counter = &list->y;
  const bool hopper = dtype != DType::f32 && compute_capability(ctx) == 90 && whole_vectors(p);
  if (rows) {
    launch(ctx, "grouped_linear_plan", {.grid = dim3(1), .block = dim3(kPlanThreads)}, plan_row_tiles_kernel,
           list, p.offsets, p.groups);
    p.row_tiles = list;
  } else if (hopper) {  // the only one that reads the counter
    check(cudaMemsetAsync(list, 0, sizeof(int4), stream(ctx)), "cudaMemsetAsync", "grouped_linear.row_tiles");
  }
  if (dtype == DType::f32)
    grouped_linear_f32(ctx, kind, p);
  else if (hopper)
    grouped_linear_hopper(ctx, kind, p);
  else
    grouped_linear_mma(ctx, kind, p);
}

void product_of_rows(Context& ctx, const char* op, GroupedKind kind, const Tensor& y, const Tensor& x,
                     const LinearWeight& w, const Tensor& offsets, const Tensor& index) {
  check_storage(op, x);
  GroupedProduct p = {};
  p.a = x.data, p.b = w.value.data, p.out = y.data;
  p.a_index = device_data<int>(index), p.offsets = device_data<int>(offsets);
  p.groups = static_cast<int>(w.groups), p.rows = static_cast<int>(y.dim(0));
  p.n = static_cast<int>(y.dim(1)), p.k = static_cast<int>(x.dim(1));
  p.a_rows = x.dim(0);
  multiply(ctx, kind, x.dtype, p);
}

}  // namespace

LinearPackedBytes grouped_linear_packed_bytes(Context&, DType, int64_t, int64_t, int64_t) { return {}; }
void grouped_linear_pack(Context&, const LinearWeight&) {}

void grouped_linear_forward(Context& ctx, Tensor y, const Tensor& x, const LinearWeight& w,
                            const Tensor& offsets, const Tensor& index) {
  product_of_rows(ctx, "grouped_linear_forward", GroupedKind::forward, y, x, w, offsets, index);
}

void grouped_linear_backward_input(Context& ctx, Tensor dx, const Tensor& dy, const LinearWeight& w,
                                   const Tensor& offsets, const Tensor& index) {
  product_of_rows(ctx, "grouped_linear_backward_input", GroupedKind::backward_input, dx, dy, w, offsets,
                  index);
}

void grouped_linear_backward_weight(Context& ctx, Tensor dw, const Tensor& dy, const Tensor& x,
                                    const Tensor& offsets, const Tensor& dy_index, const Tensor& x_index,
                                    Into into) {
  check_storage("grouped_linear_backward_weight", x);
  if (into == Into::overwrite) fill(ctx, dw, 0);  // the kernels add
  GroupedProduct p = {};
  p.a = dy.data, p.b = x.data, p.out = dw.data;
  p.a_index = device_data<int>(dy_index), p.b_index = device_data<int>(x_index),
  p.offsets = device_data<int>(offsets);
  p.groups = static_cast<int>(offsets.dim(0) - 1);
  p.rows = static_cast<int>((dy_index ? dy_index : x_index ? x_index : x).dim(0));
  p.m = static_cast<int>(dy.dim(1)), p.n = static_cast<int>(x.dim(1));
  p.a_rows = dy.dim(0), p.b_rows = x.dim(0);
  multiply(ctx, GroupedKind::backward_weight, x.dtype, p);
}

}  // namespace sluice::cuda
