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
  bool amd = false;       // by CPUID's vendor
};
const CpuFeatures& cpu_features();

/// The best instruction set of this processor. SLUICE_ISA=baseline|avx2|avx512|avx512_bf16|amx_emulated can
/// only lower it.
Isa cpu_isa();

/// What multiplies matrices of bf16. none: they are widened to f32, which is multiplied.
/// amx: wherever the processor and the kernel offer it. avx512_bf16: on AMD's processors (Zen 4 and later:
/// twice the rate of f32); Intel's multiplies at half the rate of f32 (measured on a Sapphire Rapids), so f32
/// serves there, unless SLUICE_ISA=avx512_bf16 asks for it. amx_emulated: the bits of amx on any processor,
/// slowly, for tests; SLUICE_ISA=amx_emulated asks for it. Any other value of SLUICE_ISA asks for none.
enum class Bf16Unit { none, avx512_bf16, amx, amx_emulated };
const char* bf16_unit_name(Bf16Unit unit);
Bf16Unit bf16_unit();

/// Whether products of bf16 matrices are computed in bf16.
bool bf16_products();

}  // namespace sluice
