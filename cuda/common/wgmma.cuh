#pragma once
// Hopper's matrix products: wgmma.mma_async m64nNk16, bf16 operands, f32 accumulators, by one warpgroup of
// 128 threads. B (and A, in the ss form) are read from shared memory through descriptors; the products are
// asynchronous:
//   wgmma_fence(); wgmma_ss(acc, a, b, ...); wgmma_commit(); ... wgmma_wait<0>(acc);
// Fragments, with g = lane / 4, t = lane % 4 and warp the warp in its group:
//   accumulator d[4 i + 2 r + e]: row 16 warp + g + 8 r, column 8 i + 2 t + e;
//   A in registers a[2 c + r] = elements 2 t, 2 t + 1 of columns 8 c.. in row 16 warp + g + 8 r: of an
//   accumulator's sixteen columns, pack_bf16 of (0, 1), (2, 3), (4, 5), (6, 7).
// Shared operands are tiles of 64-element (128-byte) rows as TMA writes them with the 128-byte swizzle,
// 1024-byte aligned; wider matrices are several such tiles ("chunks") side by side. (PTX ISA 9.0, 9.7.15.)
#include "common/ptx.cuh"

namespace sluice::cuda {

/// kMajor::k: the rows of the tile run along K, K = 16 elements of a row per product. kMajor::mn: along M or
/// N.
enum class Major : int { k = 0, mn = 1 };

/// Bytes between eight rows of a tile with the 128-byte swizzle.
constexpr uint32_t kSwizzleAtom = 1024;

/// Descriptor of an operand with the 128-byte swizzle. address: of its first element, in a tile whose rows
/// start at a multiple of 1024 bytes. chunk_stride: bytes from one 64-element chunk to the next, for
/// Major::mn and M or N above 64.
DEVICE_INLINE uint64_t smem_descriptor(uint32_t address, uint32_t chunk_stride = 16) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(chunk_stride >> 4) << 16 |
         static_cast<uint64_t>(kSwizzleAtom >> 4) << 32 | uint64_t{1} << 62;
}
/// The descriptor of an operand that begins `bytes` further on in shared memory. A single addition, which
/// cannot carry into the fields behind the address.
DEVICE_INLINE uint64_t further(uint64_t descriptor, uint32_t bytes) {
  const uint32_t low = static_cast<uint32_t>(descriptor) + (bytes >> 4);
  return descriptor >> 32 << 32 | low;
}
/// Byte of 16-byte vector `vector` (0 to 7) in row `row` of such a tile.
DEVICE_INLINE uint32_t swizzled(int row, int vector) {
  return static_cast<uint32_t>(row * 128 + ((vector ^ (row & 7)) << 4));
}

#ifdef SLUICE_EMULATION

inline void wgmma_fence(EMU_SITE) { ::emu::wgmma_fence(site); }
inline void wgmma_commit(EMU_SITE) { ::emu::wgmma_commit(site); }
/// Until at most kPending committed groups are under way. The accumulators named are those that may be read
/// from here on, or registers of A that may be written.
template <int kPending>
inline void wgmma_wait(EMU_SITE) {
  ::emu::wgmma_wait(kPending, site);
}
template <class T, int N>
inline void hold_registers(T (&)[N]) {}
template <class T, int M, int N>
inline void hold_registers(T (&)[M][N]) {}
inline void finish_before_next_wait(float) {}

template <Major kA, Major kB, int R>
inline void wgmma_ss(float (&d)[R], uint64_t a, uint64_t b, bool accumulate, EMU_SITE) {
  ::emu::wgmma(d, 2 * R, nullptr, a, b, accumulate, static_cast<int>(kA), static_cast<int>(kB), site);
}
template <Major kB, int R>
inline void wgmma_rs(float (&d)[R], const uint32_t (&a)[4], uint64_t b, bool accumulate, EMU_SITE) {
  ::emu::wgmma(d, 2 * R, a, 0, b, accumulate, 0, static_cast<int>(kB), site);
}

#else

DEVICE_INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE_INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
DEVICE_INLINE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// The compiler may not move reads and writes of these registers across this line. It sees an accumulator as
/// written where the product is issued: after a wait, this keeps what reads it from moving up.
template <int N>
DEVICE_INLINE void hold_registers(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
DEVICE_INLINE void hold_registers(uint32_t (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
template <int M, int N>
DEVICE_INLINE void hold_registers(uint32_t (&d)[M][N]) {
#pragma unroll
  for (int i = 0; i < M; ++i) hold_registers(d[i]);
}

/// Keeps the next wgmma_wait behind the computation of x, which is never negative. A wait names no register,
/// so that ptxas moves it to the front of arithmetic that was to overlap with the products; it does not move
/// it over a branch.
DEVICE_INLINE void finish_before_next_wait(float x) {
  if (x < 0) __trap();
}

// Operand lists: the names %0.. of the accumulators in the text, and the registers bound to them.
// clang-format off
#define SLUICE_TEXT_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define SLUICE_TEXT_0_31 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SLUICE_TEXT_32_63 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SLUICE_TEXT_64_95 "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define SLUICE_TEXT_96_127 "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define SLUICE_BIND_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SLUICE_BIND_32(i) SLUICE_BIND_8(i), SLUICE_BIND_8(i + 8), SLUICE_BIND_8(i + 16), SLUICE_BIND_8(i + 24)

#define SLUICE_BIND_N32 SLUICE_BIND_8(0), SLUICE_BIND_8(8)
#define SLUICE_TEXT_64 SLUICE_TEXT_0_31
#define SLUICE_BIND_N64 SLUICE_BIND_32(0)
#define SLUICE_TEXT_128 SLUICE_TEXT_0_31 "," SLUICE_TEXT_32_63
#define SLUICE_BIND_N128 SLUICE_BIND_32(0), SLUICE_BIND_32(32)
#define SLUICE_TEXT_192 SLUICE_TEXT_128 "," SLUICE_TEXT_64_95
#define SLUICE_BIND_N192 SLUICE_BIND_N128, SLUICE_BIND_32(64)
#define SLUICE_TEXT_256 SLUICE_TEXT_192 "," SLUICE_TEXT_96_127
#define SLUICE_BIND_N256 SLUICE_BIND_N192, SLUICE_BIND_32(96)

// x0.. are the numbers of the operands behind the N / 2 accumulators.
#define SLUICE_WGMMA(N, x0, x1, x2, x3, x4, x5, x6)                                                                    \
  template <Major kA, Major kB>                                                                                        \
  DEVICE_INLINE void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {                            \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #x2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                    \
                 "k16.f32.bf16.bf16 {" SLUICE_TEXT_##N "}, %" #x0 ", %" #x1 ", p, 1, 1, %" #x3 ", %" #x4 "; }"         \
                 : SLUICE_BIND_N##N                                                                                     \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kA)),                       \
                   "n"(static_cast<int>(kB)));                                                                         \
  }                                                                                                                    \
  template <Major kB>                                                                                                  \
  DEVICE_INLINE void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {                \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #x5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                    \
                 "k16.f32.bf16.bf16 {" SLUICE_TEXT_##N "}, {%" #x0 ", %" #x1 ", %" #x2 ", %" #x3 "}, %" #x4            \
                 ", p, 1, 1, %" #x6 "; }"                                                                              \
                 : SLUICE_BIND_N##N                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),              \
                   "n"(static_cast<int>(kB)));                                                                         \
  }
SLUICE_WGMMA(32, 16, 17, 18, 19, 20, 21, 22)
SLUICE_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
SLUICE_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
SLUICE_WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
SLUICE_WGMMA(256, 128, 129, 130, 131, 132, 133, 134)

#undef SLUICE_WGMMA
#undef SLUICE_TEXT_32
#undef SLUICE_TEXT_0_31
#undef SLUICE_TEXT_32_63
#undef SLUICE_TEXT_64_95
#undef SLUICE_TEXT_96_127
#undef SLUICE_TEXT_64
#undef SLUICE_TEXT_128
#undef SLUICE_TEXT_192
#undef SLUICE_TEXT_256
#undef SLUICE_BIND_8
#undef SLUICE_BIND_32
#undef SLUICE_BIND_N32
#undef SLUICE_BIND_N64
#undef SLUICE_BIND_N128
#undef SLUICE_BIND_N192
#undef SLUICE_BIND_N256
// clang-format on

#endif  // SLUICE_EMULATION

}  // namespace sluice::cuda
