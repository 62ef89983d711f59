// Opens the namespace and the instruction set this file is compiled for (SLUICE_ISA_*, see cpu.cmake).
// Include it after every other header, and isa_end.h at the end of the file. No #pragma once: it is a
// bracket, not a header.
#if defined(__clang__)
#if defined(SLUICE_ISA_avx512)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), \
                             apply_to = function)
#elif defined(SLUICE_ISA_avx2)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#endif
#elif defined(SLUICE_ISA_avx512)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
#elif defined(SLUICE_ISA_avx2)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

#if defined(SLUICE_ISA_avx512)
namespace sluice::cpu::avx512 {
#elif defined(SLUICE_ISA_avx2)
namespace sluice::cpu::avx2 {
#else
namespace sluice::cpu::baseline {
#endif
