#pragma once
// Starting threads when the system may refuse: process limits, a container's pid limit, low memory.
#include <functional>
#include <string>
#include <thread>

namespace sluice {

/// Starts `work` in `thread`. Returns false, with the reason in `problem`, if no thread can be started.
bool start_thread(std::thread& thread, std::function<void()> work, std::string& problem);

}  // namespace sluice
