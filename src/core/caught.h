#pragma once
// Converts any exception to Error, so that message and exit code do not depend on where it is caught.
#include "core/error.h"

namespace sluice {

/// The exception being handled as an Error. An Error is returned unchanged; std::bad_alloc becomes
/// out_of_memory with the memory use of the process; everything else becomes internal.
Error caught_error();

}  // namespace sluice
