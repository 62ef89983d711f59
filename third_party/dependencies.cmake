# Finds every dependency on the system; nothing is downloaded or vendored. What each is for: third_party/README.md.
find_package(PkgConfig REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(ZLIB REQUIRED)

# Many ranks. Without it Sluice is one process.
set(SLUICE_MPI auto CACHE STRING "Ranks under mpirun and srun: auto (where MPI is found), on, off")
if(NOT SLUICE_MPI STREQUAL "off")
  if(SLUICE_MPI STREQUAL "on")
    find_package(MPI REQUIRED COMPONENTS CXX)
  else()
    find_package(MPI QUIET COMPONENTS CXX)
  endif()
endif()

pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
add_library(xxHash::xxhash ALIAS PkgConfig::XXHASH)
pkg_check_modules(SENTENCEPIECE REQUIRED IMPORTED_TARGET sentencepiece)
add_library(sentencepiece::sentencepiece ALIAS PkgConfig::SENTENCEPIECE)

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
