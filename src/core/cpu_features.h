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

/// The best instruction set of this processor. SLUICE_ISA=baseline|avx2|avx512|avx512_bf16 can only lower it.
Isa cpu_isa();

/// Whether products of bf16 matrices are computed in bf16, which is the faster way with AMX, and with AVX512-BF16
/// on AMD's processors (Zen 4 and later: twice the rate of f32). Intel's AVX512-BF16 multiplies at half the rate of
/// f32 (measured on a Sapphire Rapids), so f32 products serve there, unless SLUICE_ISA=avx512_bf16 asks for them.
/// Any other value of SLUICE_ISA asks for f32 products.
bool bf16_products();

}  // namespace sluice
