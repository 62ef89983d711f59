# Each file of src/ops/cpu is compiled once per instruction set, into a separate namespace (isa_begin.h); the entry point in
# src/ops picks one at run time from CPUID feature bits. No -march flag is used: the file switches its own target after
# its includes, so that no inline function of a library is compiled for a processor it may not run on.
file(GLOB cpu_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/ops/cpu/*.cpp)
set(SLUICE_ISAS baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND SLUICE_ISAS avx2 avx512)
endif()
foreach(isa ${SLUICE_ISAS})
  add_library(sluice_ops_${isa} OBJECT ${cpu_sources})
  target_link_libraries(sluice_ops_${isa} PRIVATE sluice_flags sluice_core DNNL::dnnl BLAS::openblas)
  target_compile_definitions(sluice_ops_${isa} PRIVATE SLUICE_ISA_${isa})
  # No NaN or Inf assumptions are made away; only errno and traps, which no kernel here reads.
  target_compile_options(sluice_ops_${isa} PRIVATE -O3 -fno-math-errno -fno-trapping-math)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    # GCC 12 moves pairs of 64-bit integers through an MMX register and leaves the x87 stack full: the next long double
    # in the program (std::normal_distribution has one) is NaN. tests/ops/vector_math_test.cpp keeps watch.
    target_compile_options(sluice_ops_${isa} PRIVATE -mno-mmx)
  endif()
  if(TARGET sluice_ops)
    target_sources(sluice_ops PRIVATE $<TARGET_OBJECTS:sluice_ops_${isa}>)
  endif()
endforeach()
