#include "core/start_thread.h"

#include <cerrno>
#include <exception>
#include <system_error>
#include <utility>

#include "core/faults.h"

namespace sluice {

bool start_thread(std::thread& thread, std::function<void()> work, std::string& problem) {
  try {
    if (faults::thread_fails()) throw std::system_error(EAGAIN, std::generic_category());
    thread = std::thread(std::move(work));
    return true;
  } catch (const std::exception& error) {  // std::system_error, std::bad_alloc
    problem = std::string("cannot start a thread: ") + error.what();
    return false;
  }
}

}  // namespace sluice
