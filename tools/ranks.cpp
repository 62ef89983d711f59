#include "ranks.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "comm/mpi.h"
#include "core/caught.h"
#include "core/device.h"

namespace sluice {
namespace {

/// make_world. If it fails, all processes find the same problem and cannot communicate: the first one reports
/// it.
std::unique_ptr<Communicator> world_or_exit(double limit_seconds) {
  try {
    return make_world(limit_seconds);
  } catch (const Error& error) {
    if (launcher_size().rank == 0) throw;
    std::this_thread::sleep_for(std::chrono::seconds(1));  // the first to end may end the others
    std::exit(static_cast<int>(error.code()));
  }
}

}  // namespace

void run_as_rank(const std::function<void(Communicator& world)>& body, double limit_seconds,
                 const std::function<void()>& before_abort) {
  const std::unique_ptr<Communicator> world = world_or_exit(limit_seconds);
  choose_cuda_device(launcher_size().local_rank);
  try {
    body(*world);
  } catch (const std::exception&) {
    if (world->size() == 1) throw;
    const Error error = caught_error();
    before_abort();
    // Rank 0 reports errors common to all ranks and ends the others; an error on a single rank is reported by
    // that rank unless it was ended.
    if (world->rank() != 0) std::this_thread::sleep_for(std::chrono::seconds(4));
    const std::string text = error.what();
    spdlog::error("{}{}", text.starts_with("rank") ? "" : fmt::format("rank {}: ", world->rank()),
                  text);  // some messages already name ranks
    world->abort(error.code());
  }
}

void require_groups(const Communicator& world, const std::string& option, int64_t size) {
  if (world.size() % size == 0) return;
  fail(ExitCode::usage, "{}: {} rank{} cannot be divided into groups of that size", option, world.size(),
       world.size() == 1 ? "" : "s");
}

}  // namespace sluice
