#include "core/build_info.h"

#include <sluice_commit.h>  // commit.cmake writes it

namespace sluice {

const BuildInfo& build_info() {
  static constexpr BuildInfo kInfo = {.version = SLUICE_PROJECT_VERSION,
                                      .commit = SLUICE_COMMIT,
                                      .compiler = SLUICE_COMPILER,
                                      .build_type = SLUICE_BUILD_TYPE,
                                      .instruction_sets = SLUICE_INSTRUCTION_SETS,
                                      .cuda = SLUICE_CUDA_BUILD};
  return kInfo;
}

}  // namespace sluice
