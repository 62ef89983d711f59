// Losses and gradients of long rows on Hopper: a cluster of 8 blocks takes a row, each block the vectors of
// its share of the row's threads, which it keeps in shared memory between the two uses (38 KB at 151,936
// words, so that five blocks share a multiprocessor). A row is so read once, where a block alone reads it a
// second time from the cache, of which the rows at work take 40 MB: two accesses of 304 KB instead of three.
// Maxima and sums go from block to block, in the order of a block alone: bits are equal.
//
// Bound by memory: at 4.3 TB/s a multiprocessor has 32,700 cycles for a row of 151,936 words, of which 19,000
// are those of two exponentials for each word. Not yet run on a GPU.
#include "cross_entropy/softmax.cuh"

namespace sluice::cuda {
namespace {

constexpr int kBlocks = 8;  // of a cluster: the most that every GPU takes
/// Shorter rows, of four vectors or less for each thread, stay in the cache.
constexpr int kShortRow = 4 * kRowThreads * kVecWidth<nv_bf16>;
constexpr size_t kMostShared = 224 * 1024;

/// kThreads: of a block.
template <bool kCapped, bool kZLoss, int kThreads>
__global__ void __launch_bounds__(kThreads) softmax_cluster(SoftmaxRows<nv_bf16> p) {
  constexpr int kWidth = kVecWidth<nv_bf16>, kOfRow = kBlocks * kThreads, kWarps = kThreads / 32;
  STATIC_SMEM(MaxSum, partial, [kBlocks * kWarps]);  // of the row's warps
  DYN_SMEM(Vec16<nv_bf16>, row_vectors, 16);
  const int64_t row = p.rows - 1 - blockIdx.x / kBlocks;
  const unsigned rank = blockIdx.x % kBlocks;
  const int tid = static_cast<int>(threadIdx.x), thread = static_cast<int>(rank) * kThreads + tid;
  const int target = target_of(p, row, thread == 0);
  if (target < 0) {  // the whole cluster returns
    no_loss<true, kZLoss, kOfRow>(p, row, thread);
    return;
  }
  nv_bf16* const x = p.logits + row * p.stride;
  const int vectors = p.vocabulary / kWidth, tail = vectors * kWidth;
  Vec16<nv_bf16>* const mine = row_vectors + tid;  // this thread's, kThreads apart
  for (int i = thread, at = 0; i < vectors; i += kOfRow, at += kThreads)
    cp_async_16(smem_addr(mine + at), x + i * kWidth, true);
  cp_async_commit();
  const Logits<kCapped> logits(p.cap);
  const float at_target = logits.value(to_float(x[target]));
  cluster_sync();  // all blocks run: their memory may be written
  cp_async_wait<0>();

  MaxSum sum = {-FLT_MAX, 0};
#pragma unroll 2
  for (int i = thread, at = 0; i < vectors; i += kOfRow, at += kThreads) {
    float y[kWidth];
    logits.values(y, mine[at]);
    sum = add_logits(sum, y);
  }
  for (int i = tail + thread; i < p.vocabulary; i += kOfRow)
    sum = join(sum, {logits.value(to_float(x[i])), 1});
  sum = join_warp(sum);
  if (tid % 32 < kBlocks)
    store_to_block(partial + thread / 32, static_cast<unsigned>(tid % 32), sum.max, sum.sum);
  cluster_sync();  // no block looks into another's memory behind it, so each may return alone
  MaxSum all = partial[0];
#pragma unroll
  for (int i = 1; i < kBlocks * kWarps; ++i) all = join(all, partial[i]);
  if (thread == 0) store_loss<kZLoss>(p, row, all, at_target);

  const LogitGradient<kCapped, kZLoss> gradient(p, all, logits.inverse);
  for (int i = tail + thread; i < p.vocabulary; i += kOfRow)
    x[i] = from_float<nv_bf16>(gradient(logits.value(to_float(x[i])), i == target));
#pragma unroll 2
  for (int i = thread, at = 0; i < vectors; i += kOfRow, at += kThreads) {
    float y[kWidth];
    logits.values(y, mine[at]);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) y[j] = gradient(y[j], j == target - i * kWidth);
    store_vec(x + i * kWidth, from_floats<nv_bf16>(y));
  }
}

}  // namespace

bool softmax_rows_hopper(Context& ctx, const char* op, const SoftmaxRows<nv_bf16>& p, bool capped,
                         bool with_z) {
  const int row_threads = with_z ? kRowThreadsZ : kRowThreads, vectors = p.vocabulary / kVecWidth<nv_bf16>;
  const int of_a_thread = (vectors + row_threads - 1) / row_threads;
  const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(p.rows * kBlocks)),
                               .block = dim3(static_cast<unsigned>(row_threads / kBlocks)),
                               .smem = size_t{16} * of_a_thread * (row_threads / kBlocks),
                               .cluster = dim3(kBlocks)};
  if (p.vocabulary <= kShortRow || config.smem > kMostShared) return false;
  constexpr int kThreads = kRowThreads / kBlocks, kThreadsZ = kRowThreadsZ / kBlocks;
  launch(ctx, op, config,
         with_z ? (capped ? softmax_cluster<true, true, kThreadsZ> : softmax_cluster<false, true, kThreadsZ>)
         : capped ? softmax_cluster<true, false, kThreads>
                  : softmax_cluster<false, false, kThreads>,
         p);
  return true;
}

}  // namespace sluice::cuda
