# The facts of build_info.cpp: those of the configuration as definitions of that file alone, and the commit, found at build
# time by commit.cmake. Nothing else is compiled again when one of them changes.
if(SLUICE_CUDA STREQUAL "emulated")
  set(cuda_build "emulated on the CPU")
elseif(SLUICE_HAS_CUDA)
  string(REPLACE ";" ", " cuda_build "toolkit ${CUDAToolkit_VERSION}, architectures ${SLUICE_CUDA_ARCHITECTURES}")
else()
  set(cuda_build "off")
endif()
string(REPLACE ";" ", " instruction_sets "${SLUICE_ISAS}")
set(build_type "$<IF:$<BOOL:$<CONFIG>>,$<CONFIG>,none>")
if(SLUICE_SANITIZE)
  string(APPEND build_type " with sanitizers ${SLUICE_SANITIZE}")
endif()
set(generated ${PROJECT_BINARY_DIR}/generated)
set_source_files_properties(${PROJECT_SOURCE_DIR}/src/core/build_info.cpp PROPERTIES INCLUDE_DIRECTORIES ${generated} COMPILE_DEFINITIONS
  "SLUICE_PROJECT_VERSION=\"${PROJECT_VERSION}\";SLUICE_COMPILER=\"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\";SLUICE_BUILD_TYPE=\"${build_type}\";SLUICE_INSTRUCTION_SETS=\"${instruction_sets}\";SLUICE_CUDA_BUILD=\"${cuda_build}\"")

add_custom_target(sluice_commit BYPRODUCTS ${generated}/sluice_commit.h VERBATIM COMMENT ""
  COMMAND ${CMAKE_COMMAND} -DSOURCE=${PROJECT_SOURCE_DIR} -DOUTPUT=${generated}/sluice_commit.h
          -P ${PROJECT_SOURCE_DIR}/src/core/commit.cmake)
add_dependencies(sluice_core sluice_commit)
