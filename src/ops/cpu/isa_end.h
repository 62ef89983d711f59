// Closes the namespace and instruction set opened by isa_begin.h.
}  // namespace

#if defined(__clang__)
#if defined(SLUICE_ISA_avx512) || defined(SLUICE_ISA_avx2)
#pragma clang attribute pop
#endif
#elif defined(SLUICE_ISA_avx512) || defined(SLUICE_ISA_avx2)
#pragma GCC pop_options
#endif
