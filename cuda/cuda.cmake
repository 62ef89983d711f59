# The CUDA backend, reached by the linker alone: object files that every program of a CUDA build takes with it
# (sluice_backend).
#   SLUICE_CUDA=auto      on where the CUDA toolkit is found, otherwise off, and says which
#   SLUICE_CUDA=on|off
#   SLUICE_CUDA=emulated  the same sources compiled for the CPU, with tests/emulation in the place of a GPU
set(SLUICE_CUDA "auto" CACHE STRING "CUDA backend: auto, on, off, or emulated on the CPU")
set_property(CACHE SLUICE_CUDA PROPERTY STRINGS auto on off emulated)
set(SLUICE_CUDA_ARCHITECTURES "80;90a-real" CACHE STRING "Compute capabilities the CUDA backend is compiled for")

set(SLUICE_HAS_CUDA OFF)
if(SLUICE_CUDA STREQUAL "auto" OR SLUICE_CUDA STREQUAL "on")
  include(CheckLanguage)
  if(NOT CMAKE_CUDA_COMPILER)
    check_language(CUDA)
  endif()
  if(CMAKE_CUDA_COMPILER)
    set(SLUICE_HAS_CUDA ON)
  elseif(SLUICE_CUDA STREQUAL "on")
    message(FATAL_ERROR "SLUICE_CUDA=on, but there is no CUDA compiler (nvcc): install the CUDA toolkit or set CUDACXX")
  else()
    message(STATUS "CUDA: no toolkit found; this build computes on the CPU only")
  endif()
elseif(SLUICE_CUDA STREQUAL "emulated")
  set(SLUICE_HAS_CUDA ON)
elseif(NOT SLUICE_CUDA STREQUAL "off")
  message(FATAL_ERROR "SLUICE_CUDA=${SLUICE_CUDA}: must be auto, on, off or emulated")
endif()

file(GLOB SLUICE_CUDA_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cuda/*.cu)
file(GLOB SLUICE_CUDA_HOPPER_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cuda/hopper/*.cu)
file(GLOB SLUICE_CUDA_HOST_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cuda/*.cpp)

if(SLUICE_HAS_CUDA AND NOT SLUICE_CUDA STREQUAL "emulated")
  # The architectures are set per target below; this one only satisfies the compiler check.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80)
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  # CMake 3.25 does not know that CUDA 13 speaks C++20.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  message(STATUS "CUDA: toolkit ${CUDAToolkit_VERSION}, architectures ${SLUICE_CUDA_ARCHITECTURES}")

  function(sluice_cuda_objects name architectures)
    add_library(${name} OBJECT ${ARGN})
    set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${architectures}" CUDA_SEPARABLE_COMPILATION OFF)
    target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/cuda)
    # FMT_USE_CONSTEXPR: fmt 9 takes nvcc for a compiler without constexpr.
    target_compile_definitions(${name} PRIVATE SLUICE_HAS_CUDA FMT_USE_CONSTEXPR=1)
    target_compile_options(${name} PRIVATE
      $<$<COMPILE_LANGUAGE:CUDA>:-O3 -lineinfo --expt-relaxed-constexpr -Xcompiler=-Wall>
      # A spill, or an array the compiler put into local memory, is a defect of a kernel.
      $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-warn-spills,-warn-lmem-usage>)
    if(SLUICE_WERROR)
      target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings -Xptxas=-Werror>)
    endif()
  endfunction()
  sluice_cuda_objects(sluice_cuda "${SLUICE_CUDA_ARCHITECTURES}" ${SLUICE_CUDA_SOURCES} ${SLUICE_CUDA_HOST_SOURCES})
  if(SLUICE_CUDA_HOPPER_SOURCES)
    sluice_cuda_objects(sluice_cuda_hopper "90a-real" ${SLUICE_CUDA_HOPPER_SOURCES})
  endif()
elseif(SLUICE_CUDA STREQUAL "emulated")
  include(${PROJECT_SOURCE_DIR}/tests/emulation/emulation.cmake)
endif()

# Gives a program its GPU backend, where the build has one.
function(sluice_backend target)
  if(NOT SLUICE_HAS_CUDA)
    return()
  endif()
  if(SLUICE_CUDA STREQUAL "emulated")
    target_link_libraries(${target} PRIVATE sluice_cuda_emulated_plain sluice_emulator_plain)
  else()
    target_link_libraries(${target} PRIVATE sluice_cuda)
    if(TARGET sluice_cuda_hopper)
      target_link_libraries(${target} PRIVATE sluice_cuda_hopper)
    endif()
    target_link_libraries(${target} PRIVATE CUDA::cudart_static CUDA::cublasLt)
  endif()
endfunction()
