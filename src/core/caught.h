#pragma once
// Any exception as the program's one kind, so that message and exit code are the same wherever it is caught.
#include "core/error.h"

namespace sluice {

/// Of the exception that is being handled. An Error stays what it is; std::bad_alloc is out_of_memory and
/// says how much memory the process holds; everything else is internal.
Error caught_error();

}  // namespace sluice
