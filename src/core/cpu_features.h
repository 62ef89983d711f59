#pragma once
// What this processor offers, read from CPUID feature bits and the kernel's leave; never from its model name,
// which virtual machines mask.
#include <string>

namespace sluice {

/// Instruction sets the CPU kernels are compiled for.
enum class Isa { baseline, avx2, avx512 };
const char* isa_name(Isa isa);

struct CpuFeatures {
  bool avx2_fma = false, avx512 = false, avx512_bf16 = false,
       amx_bf16 = false;  // amx: and granted by the kernel
};
const CpuFeatures& cpu_features();

/// The best set this processor runs; SLUICE_ISA=baseline|avx2|avx512 lowers it (never raises it).
Isa cpu_isa();

}  // namespace sluice
