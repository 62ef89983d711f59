#pragma once
// Instruction sets of this processor, from CPUID feature bits and the kernel's permission; not from its model
// name, which virtual machines mask.
#include <string>

namespace sluice {

/// Instruction sets the CPU kernels are compiled for.
enum class Isa { baseline, avx2, avx512 };
const char* isa_name(Isa isa);

struct CpuFeatures {
  bool avx2_fma = false, avx512 = false, avx512_bf16 = false,
       amx_bf16 = false;  // amx also requires the kernel's permission
};
const CpuFeatures& cpu_features();

/// The best instruction set that this processor supports. SLUICE_ISA=baseline|avx2|avx512 can only lower it.
Isa cpu_isa();

}  // namespace sluice
