// Peak speed of the machine, to which the other results are compared.
#include <array>
#include <cstring>

#include "bench/bench.h"
#include "core/arena.h"
#include "core/cpu_features.h"
#include "core/parallel_for.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sluice::bench {
namespace {

constexpr int kChains = 24;  // exceeds latency x units on every core since 2013; uses 24 + 2 of 32 registers
constexpr int64_t kRounds = 100'000, kTileRounds = 25'000;

/// Each runs kRounds x kChains vector FMAs and returns a value that depends on all of them.
#if defined(__x86_64__)
__attribute__((target("avx512f"))) float chains_avx512() {
  __m512 a[kChains];
  for (int i = 0; i < kChains; ++i) a[i] = _mm512_set1_ps(1e-3f * static_cast<float>(i));
  const __m512 x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(1e-3f);
  for (int64_t r = 0; r < kRounds; ++r) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) a[i] = _mm512_fmadd_ps(a[i], x, y);
  }
  __m512 s = a[0];
  for (int i = 1; i < kChains; ++i) s = _mm512_add_ps(s, a[i]);
  float out[16];
  _mm512_storeu_ps(out, s);
  return out[0];
}
/// Each product of two vectors of 32 bf16 adds a pair of products to each of 16 f32.
__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) float chains_bf16() {
  __m512 a[kChains];
  for (int i = 0; i < kChains; ++i) a[i] = _mm512_set1_ps(1e-3f * static_cast<float>(i));
  const auto x = (__m512bh)_mm512_set1_epi16(0x3c24),
             y = (__m512bh)_mm512_set1_epi16(0x3f7f);  // 0.01, almost 1
  for (int64_t r = 0; r < kRounds; ++r) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) a[i] = _mm512_dpbf16_ps(a[i], x, y);
  }
  __m512 s = a[0];
  for (int i = 1; i < kChains; ++i) s = _mm512_add_ps(s, a[i]);
  float out[16];
  _mm512_storeu_ps(out, s);
  return out[0];
}
/// Each product of two tiles adds 16 x 16 sums of 32 products; four run at the same time. The operands are
/// not zero: with zeros the unit takes less power, and the clock rises.
__attribute__((target("avx512f,amx-tile,amx-bf16"))) float chains_amx() {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } tiles;
  alignas(64) std::array<uint16_t, 512> a, b;
  alignas(64) std::array<float, 256> sums;
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<uint16_t>(0x3c00 + i * 37 % 251);
    b[i] = static_cast<uint16_t>(0xbf00 + i * 53 % 127);
  }
  asm volatile("" ::"r"(&tiles), "r"(a.data()), "r"(b.data()) : "memory");
  _tile_loadconfig(&tiles);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, a.data(), 64);
  _tile_loadd(5, b.data(), 64);
  for (int64_t r = 0; r < kTileRounds; ++r) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, sums.data(), 64);
  asm volatile("" ::: "memory");
  _tile_release();
  return sums[0];
}
__attribute__((target("avx2,fma"))) float chains_avx2() {
  constexpr int kHalf = kChains / 2;  // 16 registers
  __m256 a[kHalf];
  for (int i = 0; i < kHalf; ++i) a[i] = _mm256_set1_ps(1e-3f * static_cast<float>(i));
  const __m256 x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(1e-3f);
  for (int64_t r = 0; r < 2 * kRounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kHalf; ++i) a[i] = _mm256_fmadd_ps(a[i], x, y);
  }
  __m256 s = a[0];
  for (int i = 1; i < kHalf; ++i) s = _mm256_add_ps(s, a[i]);
  float out[8];
  _mm256_storeu_ps(out, s);
  return out[0];
}
#endif
/// Vectors of four with multiply and add, which every target supports.
float chains_baseline() {
  constexpr int kHalf = kChains / 2;
  using Vector = float __attribute__((vector_size(16)));
  Vector a[kHalf];
  for (int i = 0; i < kHalf; ++i) a[i] = Vector{} + 1e-3f * static_cast<float>(i);
  const Vector x = Vector{} + 0.999f, y = Vector{} + 1e-3f;
  for (int64_t r = 0; r < 2 * kRounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kHalf; ++i) a[i] = a[i] * x + y;
  }
  Vector s = a[0];
  for (int i = 1; i < kHalf; ++i) s += a[i];
  return s[0];
}

struct Kernel {
  float (*run)();
  double flops;  // of one run
};
constexpr double chain_flops(int lanes) { return 2.0 * lanes * kChains * kRounds; }
Kernel kernel() {
#if defined(__x86_64__)
  if (cpu_isa() == Isa::avx512) return {chains_avx512, chain_flops(16)};
  if (cpu_isa() == Isa::avx2) return {chains_avx2, chain_flops(8)};
#endif
  return {chains_baseline, chain_flops(4)};
}

/// GFLOP/s of a kernel.
double peak_of(const Kernel& k, int threads, double seconds) {
  volatile float sink = 0;
  const double time = best_time(seconds, [&] {
#pragma omp parallel num_threads(threads)
    {
      const float s = k.run();
#pragma omp critical
      sink = sink + s;
    }
  });
  return k.flops * threads / time * 1e-9;
}

}  // namespace

double fma_peak(int threads, double seconds) { return peak_of(kernel(), threads, seconds); }

double bf16_peak([[maybe_unused]] Bf16Unit unit, [[maybe_unused]] int threads,
                 [[maybe_unused]] double seconds) {
#if defined(__x86_64__)
  const CpuFeatures& cpu = cpu_features();
  if (cpu_isa() == Isa::avx512 && unit == Bf16Unit::avx512_bf16 && cpu.avx512_bf16)
    return peak_of({chains_bf16, chain_flops(32)}, threads, seconds);
  if (cpu_isa() == Isa::avx512 && unit == Bf16Unit::amx && cpu.amx_bf16)
    return peak_of({chains_amx, 4 * 2.0 * 16 * 16 * 32 * kTileRounds}, threads, seconds);
#endif
  return 0;
}

ProductsPeak::ProductsPeak(DType dtype) : in_bf16(dtype == DType::bf16 && bf16_peak(bf16_unit(), 1, 0) > 0) {}

double ProductsPeak::measure(double seconds) const {
  return in_bf16 ? bf16_peak(bf16_unit(), num_threads(), seconds) : fma_peak(num_threads(), seconds);
}

double copy_rate(double seconds) {
  constexpr int64_t kFloats = int64_t{64} << 20;  // 256 MiB each: larger than any cache
  Arena arena("bandwidth", 2 * kFloats * 4);
  float* const a = arena.alloc("a", DType::f32, {kFloats}).as<float>();
  float* const b = arena.alloc("b", DType::f32, {kFloats}).as<float>();
  parallel_for(kFloats, 1 << 16, [=](int64_t begin, int64_t end) { std::fill(b + begin, b + end, 1.0f); });
  const double time = best_time(seconds, [&] {
    parallel_for(kFloats, 1 << 16, [=](int64_t begin, int64_t end) {
      std::memcpy(a + begin, b + begin, static_cast<size_t>(end - begin) * 4);
    });
  });
  return 2.0 * kFloats * 4 / time * 1e-9;
}

Peak measure_peak(double seconds) {
  Peak p;
  p.fma_one_thread = fma_peak(1, seconds);
  p.fma = fma_peak(num_threads(), seconds);
  p.bf16_one_thread = bf16_peak(Bf16Unit::avx512_bf16, 1, seconds);
  p.bf16 = bf16_peak(Bf16Unit::avx512_bf16, num_threads(), seconds);
  p.amx_one_thread = bf16_peak(Bf16Unit::amx, 1, seconds);
  p.amx = bf16_peak(Bf16Unit::amx, num_threads(), seconds);
  p.copy = copy_rate(seconds);

  constexpr int64_t kFloats = int64_t{64} << 20;
  Arena arena("bandwidth", 3 * kFloats * 4);
  float* a = arena.alloc("a", DType::f32, {kFloats}).as<float>();
  float* b = arena.alloc("b", DType::f32, {kFloats}).as<float>();
  float* c = arena.alloc("c", DType::f32, {kFloats}).as<float>();
  const auto each = [&](auto body) { parallel_for(kFloats, 1 << 16, body); };
  each([=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) a[i] = 0, b[i] = 1, c[i] = 2;
  });
  const double triad = best_time(seconds, [&] {
    each([=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) a[i] = b[i] + 0.5f * c[i];
    });
  });
  p.triad = 3.0 * kFloats * 4 / triad * 1e-9;
  return p;
}

}  // namespace sluice::bench
