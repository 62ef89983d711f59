// Not yet run on a GPU.
#include "sparse/tile_choice.cuh"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 128;

struct Choose {
  Selected selected;
  int* divided;  // (G, tiles)
  int whole_tokens, part_tokens;
};

/// Grid (tiles, G). Counts the keys of the tile's union and of its parts' unions; sums of integers, so that
/// their order does not matter.
__global__ void __launch_bounds__(kThreads) sparse_tile_choice_kernel(Choose a) {
  using Keys = KeyUnion<kThreads>;
  DYN_SMEM(unsigned char, smem, 16);
  STATIC_SMEM(int, counts, [2]);  // of the whole tile's keys, of its parts'
  auto& shared = *reinterpret_cast<typename Keys::Shared*>(smem);
  const int thread = static_cast<int>(threadIdx.x), set = static_cast<int>(blockIdx.y);
  const int64_t t0 = static_cast<int64_t>(blockIdx.x) * a.whole_tokens, left = a.selected.queries - t0;
  if (thread < 2) counts[thread] = 0;
  Keys list(shared, a.selected, set, t0, left < a.whole_tokens ? static_cast<int>(left) : a.whole_tokens);
  const unsigned first_part = (1u << a.part_tokens) - 1;  // part_tokens <= 16
  int whole = 0, parts = 0;
  for (int tiles = list.list(); tiles > 0; tiles = list.list())
    for (int i = thread; i < tiles * Keys::kTile; i += kThreads) {
      const unsigned members = list.members(i / Keys::kTile, i % Keys::kTile);
      whole += members != 0;
      for (int t = 0; t < a.whole_tokens; t += a.part_tokens) parts += (members >> t & first_part) != 0;
    }
  atomicAdd(&counts[0], whole);
  atomicAdd(&counts[1], parts);
  __syncthreads();
  if (thread == 0)
    a.divided[set * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)] =
        static_cast<int64_t>(counts[1]) * kPartCost < static_cast<int64_t>(counts[0]) * kWholeTileCost;
}

}  // namespace

TileChoice choose_tiles(Context& ctx, ScratchScope& scratch, const Selected& selected, int sets,
                        int group_bits) {
  const int whole = whole_tile_rows(group_bits) >> group_bits;
  TileChoice choice = {nullptr, static_cast<int>(blocks_for(selected.queries, whole)), whole};
  if ((1 << group_bits) > kPartRows) return choice;
  const Tensor divided = scratch.alloc("divided tiles", DType::i32, {sets, choice.tiles});
  if (ctx.dry_run) return choice;
  choice.divided = device_data<int>(divided);
  launch(ctx, "sparse_tile_choice",
         {.grid = dim3(static_cast<unsigned>(choice.tiles), static_cast<unsigned>(sets)),
          .block = dim3(kThreads),
          .smem = sizeof(KeyUnion<kThreads>::Shared)},
         sparse_tile_choice_kernel,
         Choose{selected, device_data<int>(divided), whole, kPartRows >> group_bits});
  return choice;
}

}  // namespace sluice::cuda
