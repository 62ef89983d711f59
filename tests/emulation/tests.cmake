# Programs and tests of an emulated build. Four seeds, so that every scheduling policy runs; both sanitizers.
find_program(SLUICE_SETARCH setarch)
if(SLUICE_SETARCH)
  # GCC 12's ThreadSanitizer crashes if the kernel randomises addresses too widely.
  set(SLUICE_NO_RANDOMISATION ${SLUICE_SETARCH} ${CMAKE_HOST_SYSTEM_PROCESSOR} -R)
endif()
# One random shape per family under ASan and none under TSan: the fixed list covers the edge cases, and these runs take longest.
# Every fourth case of it, others under each; all of them under both with scripts/test --sanitize (label sanitized_in_full).
set(SLUICE_ASAN_OPTIONS "ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0" "SLUICE_FUZZ_CASES=1")
# OpenMP's own synchronisation is invisible to ThreadSanitizer; with one thread the CPU backend needs none.
set(SLUICE_TSAN_OPTIONS "TSAN_OPTIONS=halt_on_error=1:history_size=4" "OMP_NUM_THREADS=1" "SLUICE_EMULATION_THREADS=1"
    "SLUICE_FUZZ_CASES=0")

function(sluice_emulated_test name program)
  cmake_parse_arguments(T "" "LABEL" "COMMAND_PREFIX;ENVIRONMENT;ARGUMENTS" ${ARGN})
  if(NOT T_LABEL)
    set(T_LABEL emulation)
  endif()
  add_test(NAME ${name} COMMAND ${T_COMMAND_PREFIX} $<TARGET_FILE:${program}> ${T_ARGUMENTS}
           WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(${name} PROPERTIES ENVIRONMENT "${T_ENVIRONMENT}" LABELS ${T_LABEL})
endfunction()

# The op cases on the CPU and on the emulated GPU: test_cuda, and the same objects with the other variants' kernels.
foreach(variant asan tsan)
  add_executable(test_cuda_${variant} $<TARGET_OBJECTS:sluice_parity>)
  target_link_libraries(test_cuda_${variant} PRIVATE sluice_test_main sluice_run sluice_cuda_emulated_${variant}
                        sluice_emulator_${variant})
endforeach()
# Each seed has different random shapes, and two of them another GPU, so that the kernels for sm_80 and sm_86 run, too.
set(SLUICE_ARCH_OF_SEED_1 80)
set(SLUICE_ARCH_OF_SEED_2 86)
foreach(seed 0 1 2 3)
  set(environment SLUICE_EMULATION_SEED=${seed} SLUICE_FUZZ_SEED=${seed})
  # Two seeds run every case, two every third one, in turn.
  if(seed GREATER 1)
    list(APPEND environment SLUICE_CASE_STRIDE=3 SLUICE_CASE_FIRST=${seed})
  endif()
  if(SLUICE_ARCH_OF_SEED_${seed})
    list(APPEND environment SLUICE_EMULATED_ARCH=${SLUICE_ARCH_OF_SEED_${seed}})
  endif()
  sluice_emulated_test(cuda_seed_${seed} test_cuda ARGUMENTS ~[device_ranks] ENVIRONMENT "${environment}")
endforeach()
# Trainings, also on several ranks, in which work on a stream is performed only when it is waited for, so that a missing wait shows.
sluice_emulated_test(cuda_late_streams test_cuda ARGUMENTS [device_ranks],[cuda_training]
                     ENVIRONMENT SLUICE_EMULATION_STREAMS=late)
# Under a sanitizer the long trainings take minutes and run no kernel that the other cases do not.
set(SLUICE_SANITIZED_CASES "~\"ten steps*\"~\"a training*\"~\"recomputing*\"")
sluice_emulated_test(cuda_asan test_cuda_asan ARGUMENTS ${SLUICE_SANITIZED_CASES}~[device_ranks]
                     ENVIRONMENT ${SLUICE_ASAN_OPTIONS} SLUICE_CASE_STRIDE=4 SLUICE_CASE_FIRST=0)
sluice_emulated_test(cuda_tsan test_cuda_tsan COMMAND_PREFIX ${SLUICE_NO_RANDOMISATION} ARGUMENTS ${SLUICE_SANITIZED_CASES}~[device_ranks]
                     ENVIRONMENT ${SLUICE_TSAN_OPTIONS} SLUICE_CASE_STRIDE=4 SLUICE_CASE_FIRST=2)
sluice_emulated_test(cuda_asan_in_full test_cuda_asan LABEL sanitized_in_full ARGUMENTS ${SLUICE_SANITIZED_CASES}
                     ENVIRONMENT ${SLUICE_ASAN_OPTIONS})
sluice_emulated_test(cuda_tsan_in_full test_cuda_tsan LABEL sanitized_in_full COMMAND_PREFIX ${SLUICE_NO_RANDOMISATION}
                     ARGUMENTS ${SLUICE_SANITIZED_CASES}~[device_ranks] ENVIRONMENT ${SLUICE_TSAN_OPTIONS})

# The longest first, which balances two parallel jobs.
set_tests_properties(cuda_tsan PROPERTIES COST 220)
set_tests_properties(cuda_asan PROPERTIES COST 130)

# The emulator's own tests, and one program per variant for the planted bugs.
set_source_files_properties(emulation/planted_bugs.cu PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-x;c++")
set(SLUICE_PLANTED_DEFINITIONS)
foreach(variant plain asan tsan)
  add_library(sluice_planted_${variant} OBJECT emulation/planted_bugs.cu)
  sluice_emulated_flags(sluice_planted_${variant} ${variant})
  add_executable(planted_bugs_${variant} emulation/planted_bugs_main.cpp)
  target_include_directories(planted_bugs_${variant} SYSTEM PRIVATE ${SLUICE_CUDA_INCLUDE_DIR})
  target_link_libraries(planted_bugs_${variant} PRIVATE sluice_planted_${variant} sluice_emulator_${variant}
                        Threads::Threads)
  list(APPEND SLUICE_PLANTED_DEFINITIONS SLUICE_PLANTED_${variant}="$<TARGET_FILE:planted_bugs_${variant}>")
endforeach()
list(JOIN SLUICE_NO_RANDOMISATION " " SLUICE_RUN_TSAN)
file(GLOB SLUICE_EMULATION_TESTS CONFIGURE_DEPENDS emulation/*_test.cpp)
include(${CMAKE_CURRENT_LIST_DIR}/conformance/conformance.cmake)
add_executable(test_emulation ${SLUICE_EMULATION_TESTS} emulation/conformance/expected.cpp)
sluice_emulated_flags(test_emulation plain)
target_compile_options(test_emulation PRIVATE -O1)
target_compile_definitions(test_emulation PRIVATE ${SLUICE_PLANTED_DEFINITIONS} SLUICE_RUN_TSAN="${SLUICE_RUN_TSAN}")
target_link_libraries(test_emulation PRIVATE sluice_test_main ptx_conformance_kernels sluice_emulator_plain
                      nlohmann_json::nlohmann_json)
add_dependencies(test_emulation planted_bugs_plain planted_bugs_asan planted_bugs_tsan)
sluice_emulated_test(emulation test_emulation)

# scripts/gpu_check with an emulated GPU, and the benchmarks at tiny sizes.
sluice_emulated_test(gpu_check test_tools ARGUMENTS "[gpu_check],[bench],[gpu_ranks],[doctor]"
                     ENVIRONMENT SLUICE_BINARY=$<TARGET_FILE:sluice>)

# Everything `ctest -L emulation` needs.
add_custom_target(emulation_tests)
add_dependencies(emulation_tests test_cuda test_cuda_asan test_cuda_tsan test_emulation ptx_conformance sluice test_tools)
