# Run at build time: writes the commit of the sources to OUTPUT, and leaves the file alone where it says so already, so that
# only a new commit compiles anything.
#   cmake -DSOURCE=folder -DOUTPUT=file.h -P commit.cmake
set(commit "unknown")
find_program(GIT git)
if(GIT)
  # Sources that were unpacked inside another repository are none of its commits.
  execute_process(COMMAND ${GIT} -C ${SOURCE} rev-parse --show-toplevel
                  OUTPUT_VARIABLE top OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  get_filename_component(source "${SOURCE}" REALPATH)
  if(top AND top STREQUAL source)
    execute_process(COMMAND ${GIT} -C ${SOURCE} --no-optional-locks describe --always --exclude=* --abbrev=12 --dirty
                    OUTPUT_VARIABLE described OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(described)
      set(commit "${described}")
    endif()
  endif()
endif()
set(text "#define SLUICE_COMMIT \"${commit}\"\n")
set(before "")
if(EXISTS "${OUTPUT}")
  file(READ "${OUTPUT}" before)
endif()
if(NOT text STREQUAL before)
  file(WRITE "${OUTPUT}" "${text}")
endif()
