# Finds every dependency on the system; nothing is downloaded or vendored. What each is for: third_party/README.md.
find_package(PkgConfig REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(ZLIB REQUIRED)

pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
add_library(xxHash::xxhash ALIAS PkgConfig::XXHASH)
pkg_check_modules(SENTENCEPIECE REQUIRED IMPORTED_TARGET sentencepiece)
add_library(sentencepiece::sentencepiece ALIAS PkgConfig::SENTENCEPIECE)
# By name, so that the message says which package is missing.
function(sluice_pkg_library target module package)
  pkg_check_modules(SLUICE_${target} QUIET IMPORTED_TARGET ${module})
  if(NOT SLUICE_${target}_FOUND)
    message(FATAL_ERROR "${module} was not found: install ${package} (scripts/setup does)")
  endif()
  add_library(${target}::${target} ALIAS PkgConfig::SLUICE_${target})
endfunction()
sluice_pkg_library(pcre2 libpcre2-8 libpcre2-dev)
sluice_pkg_library(utf8proc libutf8proc libutf8proc-dev)

# The fuzz programs hold readers alone.
if(SLUICE_FUZZ)
  return()
endif()
find_package(OpenMP REQUIRED COMPONENTS CXX)
# Only `sluice serve` needs it, which says so where it is missing.
pkg_check_modules(HTTPLIB QUIET IMPORTED_TARGET cpp-httplib)
if(NOT HTTPLIB_FOUND)
  message(STATUS "cpp-httplib was not found: no sluice serve (libcpp-httplib-dev)")
endif()
find_package(CLI11 REQUIRED)

# Many ranks. Without it Sluice is one process.
set(SLUICE_MPI auto CACHE STRING "Ranks under mpirun and srun: auto (where MPI is found), on, off")
if(NOT SLUICE_MPI STREQUAL "off")
  if(SLUICE_MPI STREQUAL "on")
    find_package(MPI REQUIRED COMPONENTS CXX)
  else()
    find_package(MPI QUIET COMPONENTS CXX)
  endif()
endif()

# By library and header: Debian's CMake package of oneDNN asks for OpenCL, which nothing here needs.
find_library(DNNL_LIBRARY dnnl REQUIRED)
find_path(DNNL_INCLUDE_DIR dnnl.hpp REQUIRED)
add_library(DNNL::dnnl INTERFACE IMPORTED)
target_link_libraries(DNNL::dnnl INTERFACE ${DNNL_LIBRARY})
target_include_directories(DNNL::dnnl INTERFACE ${DNNL_INCLUDE_DIR})

find_library(OPENBLAS_LIBRARY openblas REQUIRED)
find_path(OPENBLAS_INCLUDE_DIR cblas.h REQUIRED PATH_SUFFIXES openblas x86_64-linux-gnu aarch64-linux-gnu)
add_library(BLAS::openblas INTERFACE IMPORTED)
target_link_libraries(BLAS::openblas INTERFACE ${OPENBLAS_LIBRARY})
target_include_directories(BLAS::openblas INTERFACE ${OPENBLAS_INCLUDE_DIR})
