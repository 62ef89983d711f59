# The emulator, and the CUDA sources compiled for it, in three variants; everything else of a program is compiled once.
#   plain  -O2
#   asan   AddressSanitizer and UndefinedBehaviorSanitizer: bounds of global and shared memory, misaligned vectors
#   tsan   ThreadSanitizer, with every CUDA thread shown to it as a fiber: races
# For each: sluice_cuda_emulated_V (the sources) and sluice_emulator_V (the runtime, fake CUDA libraries included).
find_path(SLUICE_CUDA_INCLUDE_DIR cuda_bf16.h REQUIRED PATHS /usr/local/cuda/include $ENV{CUDA_HOME}/include)
# Only the header of NCCL is used: fake_nccl.cpp implements it for ranks that are threads of one process.
find_path(SLUICE_NCCL_INCLUDE_DIR nccl.h HINTS ${SLUICE_CUDA_INCLUDE_DIR})
set(SLUICE_EMULATOR ${PROJECT_SOURCE_DIR}/tests/emulation)
file(GLOB SLUICE_EMULATOR_SOURCES CONFIGURE_DEPENDS ${SLUICE_EMULATOR}/*.cpp)
list(FILTER SLUICE_EMULATOR_SOURCES EXCLUDE REGEX "_test.cpp$|_main.cpp$")

set(SLUICE_VARIANT_FLAGS_plain -O2)
# Sanitizers cause false positives of -Wmaybe-uninitialized.
set(SLUICE_VARIANT_FLAGS_asan -O1 -g1 -Wno-maybe-uninitialized -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all
    -fno-omit-frame-pointer)
set(SLUICE_VARIANT_FLAGS_tsan -O1 -g1 -Wno-maybe-uninitialized -fsanitize=thread)
# The runtime reports its synchronisation to ThreadSanitizer itself (sanitizer.h), so it is not instrumented; the compiler
# must not turn its loops and copies into calls that libtsan intercepts.
set(SLUICE_RUNTIME_FLAGS_plain -O3)
set(SLUICE_RUNTIME_FLAGS_asan ${SLUICE_VARIANT_FLAGS_asan})
set(SLUICE_RUNTIME_FLAGS_tsan -O2 -g1 -fno-tree-loop-distribute-patterns -minline-all-stringops
    -DSLUICE_EMULATION_TSAN)
set(SLUICE_VARIANT_LINK_asan -fsanitize=address,undefined)
set(SLUICE_VARIANT_LINK_tsan -fsanitize=thread)

# Options for compiling a .cu file for the emulator, in one variant.
function(sluice_emulated_flags target variant)
  target_compile_definitions(${target} PRIVATE SLUICE_HAS_CUDA SLUICE_EMULATION $<$<BOOL:${SLUICE_NCCL_INCLUDE_DIR}>:SLUICE_HAS_NCCL>)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/cuda ${SLUICE_EMULATOR})
  target_include_directories(${target} SYSTEM PRIVATE ${SLUICE_CUDA_INCLUDE_DIR})
  # nvcc also contracts to fused multiply-adds.
  target_compile_options(${target} PRIVATE ${SLUICE_SWITCH_FLAGS} -Wall -Wno-unknown-pragmas -march=x86-64-v3 -ffp-contract=fast
                         ${SLUICE_VARIANT_FLAGS_${variant}})
  if(SLUICE_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()

function(sluice_emulated_variant variant)
  add_library(sluice_cuda_emulated_${variant} OBJECT ${SLUICE_CUDA_SOURCES} ${SLUICE_CUDA_HOPPER_SOURCES})
  sluice_emulated_flags(sluice_cuda_emulated_${variant} ${variant})
  add_library(sluice_emulator_${variant} OBJECT ${SLUICE_EMULATOR_SOURCES})
  target_compile_definitions(sluice_emulator_${variant} PRIVATE SLUICE_EMULATION)
  target_include_directories(sluice_emulator_${variant} PRIVATE ${SLUICE_EMULATOR})
  target_include_directories(sluice_emulator_${variant} SYSTEM PRIVATE ${SLUICE_CUDA_INCLUDE_DIR})
  target_compile_options(sluice_emulator_${variant} PRIVATE ${SLUICE_SWITCH_FLAGS} -Wall -Wextra -Wshadow -march=x86-64-v3
                         ${SLUICE_RUNTIME_FLAGS_${variant}})
  target_link_options(sluice_emulator_${variant} INTERFACE ${SLUICE_VARIANT_LINK_${variant}})
  if(SLUICE_WERROR)
    target_compile_options(sluice_emulator_${variant} PRIVATE -Werror)
  endif()
endfunction()

set_source_files_properties(${SLUICE_CUDA_SOURCES} ${SLUICE_CUDA_HOPPER_SOURCES} PROPERTIES
  LANGUAGE CXX COMPILE_OPTIONS "-x;c++")
foreach(variant plain asan tsan)
  sluice_emulated_variant(${variant})
endforeach()
