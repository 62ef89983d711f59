#pragma once
// Threads that the system may refuse to make: limits on processes, a container's limit on pids, little
// memory.
#include <functional>
#include <string>
#include <thread>

namespace sluice {

/// Starts `work` in `thread`. False where no thread can be made; `problem` then says why.
bool start_thread(std::thread& thread, std::function<void()> work, std::string& problem);

}  // namespace sluice
