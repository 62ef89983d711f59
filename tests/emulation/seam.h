#pragma once
// The interface between kernels and the emulator: all functions called by the emulated bodies in cuda/common,
// and the launch. A CUDA thread is a fiber; a block (or a cluster of blocks) runs on one OS thread, the
// blocks of a grid on several.
#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

namespace emu {

/// The source location where a kernel calls a primitive, taken by default arguments so that reports name the
/// kernel's line.
struct Site {
  const char* file;
  int line;
  static constexpr Site cur(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};
#define EMU_SITE ::emu::Site site = ::emu::Site::cur()

/// State of a thread that is visible to it.
struct ThreadContext {
  uint3 tid, bid;
  dim3 bdim, gdim;
  unsigned lane, warp;    // within the block
  unsigned crank, csize;  // rank of the block in its cluster, blocks in it
  char* smem;             // the block's window of shared memory; shared addresses are offsets into it
};
extern __thread ThreadContext* g_cur;

// ---- launches

struct LaunchParams {
  dim3 grid, block, cluster{1, 1, 1};
  size_t dyn_smem = 0;
  bool asks_for_smem = true;  // cudaFuncAttributeMaxDynamicSharedMemorySize is set: more than 48 KiB
  bool cooperative = false;   // all blocks together, as one group
  const char* name = "kernel";
  cudaStream_t stream = nullptr;  // null: the stream that is being captured, if any
};

/// A kernel with its arguments, by value.
struct KernelCall {
  virtual ~KernelCall() = default;
  virtual void run() const = 0;
  virtual std::unique_ptr<KernelCall> clone() const = 0;
};

/// The finding of a detector. The text: "kernel NAME, block (x,y,z), thread (x,y,z), seed N: what, at
/// file:line".
struct LaunchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Runs every block, or records the launch if its stream is being captured. Throws LaunchError.
void launch_call(const LaunchParams& params, const KernelCall& call);

template <class... P>
struct BoundKernel final : KernelCall {
  void (*kernel)(P...);
  std::tuple<std::remove_cv_t<P>...> arguments;
  template <class... A>
  explicit BoundKernel(void (*k)(P...), A&&... a) : kernel(k), arguments(static_cast<P>(a)...) {}
  void run() const override { std::apply(kernel, arguments); }
  std::unique_ptr<KernelCall> clone() const override { return std::make_unique<BoundKernel>(*this); }
};

template <class... P, class... A>
void launch(const LaunchParams& params, void (*kernel)(P...), A&&... arguments) {
  static_assert(sizeof...(P) == sizeof...(A), "a kernel takes exactly its arguments");
  launch_call(params, BoundKernel<P...>(kernel, std::forward<A>(arguments)...));
}

/// Reports an error of the kernel and ends the launch; never returns to the kernel.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- schedules. Seed 0: in order, every asynchronous operation as late as allowed. Others: by seed % 3,
// random warps and lanes (1), the last woken warp first (2), random priorities of warps (0); asynchronous
// operations at random times. Blocks are started in ascending order, in descending order with 2. The
// environment's SLUICE_EMULATION_SEED and SLUICE_EMULATION_THREADS (OS threads) are what these start with.
void set_seed(uint64_t seed);
uint64_t seed();
void set_threads(int threads);
int threads();

struct Stats {
  uint64_t switches, blocks, threads, collectives, barriers, mma, wgmma, tma, cp_async;
  /// ldmatrix and stmatrix: 8-address phases, and the extra cycles that bank conflicts cost them.
  uint64_t ldsm_phases, ldsm_conflicts;
};
Stats stats();
void reset_stats();

// ---- block and cluster
void bar_sync(int id, int threads, Site site);  // threads 0: the whole block
void bar_arrive(int id, int threads, Site site);
int bar_red(int predicate, int op, Site site);  // 0 count, 1 and, 2 or
void cluster_sync(Site site);
void thread_fence();
/// Lets other threads run. Polling must call this, or it hangs.
void yield();

// ---- warp. Lanes of `mask` that have returned from the kernel count as arrived.
void warp_sync(uint32_t mask, Site site);
enum ShuffleMode { kShuffleIndex, kShuffleUp, kShuffleDown, kShuffleXor };
uint64_t shfl(uint32_t mask, uint64_t value, int mode, int argument, int width, Site site);
uint32_t vote(uint32_t mask, int predicate, int mode, Site site);  // 0 ballot, 1 any, 2 all
uint64_t match_any(uint32_t mask, uint64_t value, Site site);
enum ReduceOp {
  kReduceAdd,
  kReduceMin,
  kReduceMax,
  kReduceAnd,
  kReduceOr,
  kReduceXor,
  kReduceSignedMin,
  kReduceSignedMax
};
uint32_t reduce(uint32_t mask, uint32_t value, int op, Site site);

// ---- shared memory: 32-bit addresses are offsets into the block's window
void* static_smem(const void* tag, size_t size, size_t alignment);
void* dyn_smem(size_t alignment);
uint32_t to_shared(const void* p);
void* from_shared(uint32_t address);
/// A variable of this or another block of the cluster: the number of the block, from 1, in the highest byte.
uint32_t to_cluster(const void* p, unsigned rank);
void* from_cluster(uint32_t address, Site site);
/// Four bytes into a block of the cluster, as a transfer for a barrier of the same block.
void store_async(uint32_t to, int value, uint32_t barrier, Site site);

// ---- matrices of a warp
void ldmatrix(uint32_t* registers, uint32_t address, int matrices, bool transposed, Site site);
void stmatrix(const uint32_t* registers, uint32_t address, int matrices, bool transposed, Site site);
void mma_16816_bf16(float* d, const uint32_t* a, const uint32_t* b, const float* c, Site site);

// ---- asynchronous copies
void cp_async(void* dst, const void* src, int bytes, int src_bytes, Site site = Site::cur());
void cp_async_commit();
void cp_async_wait(int pending);

void mbar_init(uint64_t* barrier, unsigned count, Site site = Site::cur());
void mbar_arrive(uint64_t* barrier, unsigned count = 1, Site site = Site::cur());
void mbar_expect_tx(uint64_t* barrier, unsigned bytes, Site site = Site::cur());
void mbar_wait(uint64_t* barrier, unsigned parity, Site site);
bool mbar_test(uint64_t* barrier, unsigned parity, Site site = Site::cur());

/// A CUtensorMap in the clear. stride[0] is the element size; swizzle is the span in bytes: 0, 32, 64 or 128.
struct TMap {
  char* base;
  int rank, esize, swizzle;
  uint64_t dim[5], stride[5];  // elements, bytes
  uint32_t box[5];             // elements
  uint32_t magic;
};
constexpr uint32_t kTensorMapMagic = 0x7a3d5eed;
void tma_load(void* dst, const TMap* map, uint64_t* barrier, const int* coordinates, int rank,
              Site site = Site::cur());
void tma_load_multicast(void* dst, const TMap* map, uint64_t* barrier, const int* coordinates, int rank,
                        unsigned blocks, Site site = Site::cur());
void tma_store(const TMap* map, const void* src, const int* coordinates, int rank, Site site = Site::cur());
/// Elements of 4 bytes are f32.
void tma_add(const TMap* map, const void* src, const int* coordinates, int rank, Site site = Site::cur());
/// Contiguous bytes, shared to global: copied, or added as f32, one element at a time.
void bulk_store(void* dst, const void* src, unsigned bytes, Site site = Site::cur());
void bulk_reduce_add(float* dst, const void* src, unsigned bytes, Site site = Site::cur());
void bulk_commit();
void bulk_wait(int pending);
void fence_proxy_async();

// ---- wgmma m64nNk16, bf16 x bf16 -> f32. d: N / 2 registers of this thread; a_registers null: A from shared
// memory.
void wgmma(float* d, int n, const uint32_t* a_registers, uint64_t a_descriptor, uint64_t b_descriptor,
           int scale_d, int a_mn_major, int b_mn_major, Site site);
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(int pending, Site site);
void setmaxnreg(int registers, Site site);

// ---- values as bits
template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, static_cast<const void*>(&value), sizeof value);
  return bits;
}
template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof value);
  return value;
}

}  // namespace emu
