#pragma once
// Host name and time, for status files, locks and messages.
#include <string>

namespace sluice {

std::string host_name();
/// "2026-01-31T23:59:59Z"
std::string utc_now();

}  // namespace sluice
