#pragma once
// The ranks of a communicator, for memory of their GPUs.
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "core/context.h"

namespace sluice {

/// How bytes of a GPU reach another rank's.
enum class DeviceTransport : uint8_t {
  automatic,  // nccl where every rank has a GPU of its own and this program has NCCL, otherwise host
  nccl,       // from GPU to GPU
  host        // through pinned host memory and the host's communicator: several ranks may share a GPU
};

struct DeviceRanksOptions {
  DeviceTransport transport = DeviceTransport::automatic;
  /// NCCL: an operation that takes longer is given up, Error(hang). A backstop behind the watchdog, which
  /// names who is to blame; 0: never.
  double timeout_seconds = 0;
};

/// Collective over inner, which outlives it and whose abort() is its abort(). Operations take memory of ctx's
/// device, begin after the ops of ctx and are done when they return, but for barrier(), which waits for the
/// ranks and not for their GPUs. One thread at a time may use it, inner and ctx. name(): "nccl", or "host"
/// behind which inner's name stands. Error(usage) where NCCL is asked for and not in this program, or ranks
/// share a GPU; Error(hang) for what NCCL reports.
std::unique_ptr<Communicator> make_device_communicator(Communicator& inner, Context& ctx,
                                                       const DeviceRanksOptions& options);

/// "2.28.3"; empty where this program has no NCCL.
std::string nccl_version();

}  // namespace sluice
