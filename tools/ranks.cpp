#include "ranks.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <memory>
#include <thread>

#include "comm/mpi.h"
#include "core/device.h"

namespace sluice {

void run_as_rank(const std::function<void(Communicator& world)>& body, const std::function<void()>& before_abort) {
  const std::unique_ptr<Communicator> world = make_world();
  choose_cuda_device(launcher_size().local_rank);
  try {
    body(*world);
  } catch (const Error& error) {
    if (world->size() == 1) throw;
    before_abort();
    // What all find together rank 0 says, and takes the others with it; what one finds alone, it says when nobody has ended it.
    if (world->rank() != 0) std::this_thread::sleep_for(std::chrono::seconds(4));
    spdlog::error("rank {}: {}", world->rank(), error.what());
    world->abort(error.code());
  }
}

}  // namespace sluice
