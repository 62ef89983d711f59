#pragma once
#include <string>

#include "core/profile.h"

namespace sluice {

/// The timeline of a profile in the Chrome Trace Event Format (complete events in microseconds), for
/// chrome://tracing and Perfetto. `device` names the row.
std::string chrome_trace(const Profile& profile, const std::string& device);

}  // namespace sluice
