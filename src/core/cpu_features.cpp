#include "core/cpu_features.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sluice {
namespace {

#if defined(__x86_64__)
bool kernel_grants_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

CpuFeatures detect() {
  CpuFeatures f;
#if defined(__x86_64__)
  __builtin_cpu_init();
  f.amd = __builtin_cpu_is("amd");
  f.avx2_fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  f.avx512 = f.avx2_fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (f.avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) f.avx512_bf16 = (a >> 5) & 1u;
  if (f.avx512 && __get_cpuid_count(7, 0, &a, &b, &c, &d))
    f.amx_bf16 = f.avx512_bf16 && ((d >> 24) & 1u) && ((d >> 22) & 1u) && kernel_grants_amx();
#endif
  return f;
}

Isa choose() {
  const CpuFeatures& f = cpu_features();
  Isa best = f.avx512 ? Isa::avx512 : f.avx2_fma ? Isa::avx2 : Isa::baseline;
  if (const char* wish = std::getenv("SLUICE_ISA"))
    for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512})
      if (std::strcmp(wish, isa_name(isa)) == 0 && isa < best) best = isa;
  return best;
}

}  // namespace

const char* isa_name(Isa isa) {
  return isa == Isa::avx512 ? "avx512" : isa == Isa::avx2 ? "avx2" : "baseline";
}

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

Isa cpu_isa() {
  static const Isa isa = choose();
  return isa;
}

const char* bf16_unit_name(Bf16Unit unit) {
  switch (unit) {
    case Bf16Unit::none:
      return "f32";
    case Bf16Unit::avx512_bf16:
      return "avx512_bf16";
    case Bf16Unit::amx:
      return "amx";
    case Bf16Unit::amx_emulated:
      return "amx_emulated";
  }
  return "unknown";
}

Bf16Unit bf16_unit() {
  static const Bf16Unit unit = [] {
    const CpuFeatures& f = cpu_features();
    if (const char* wish = std::getenv("SLUICE_ISA")) {
      if (std::strcmp(wish, "amx_emulated") == 0) return Bf16Unit::amx_emulated;
      return std::strcmp(wish, "avx512_bf16") == 0 && f.avx512_bf16 ? Bf16Unit::avx512_bf16 : Bf16Unit::none;
    }
    return f.amx_bf16 ? Bf16Unit::amx : f.avx512_bf16 && f.amd ? Bf16Unit::avx512_bf16 : Bf16Unit::none;
  }();
  return unit;
}

bool bf16_products() { return bf16_unit() != Bf16Unit::none; }

}  // namespace sluice
