#pragma once
// A communicator for GPU memory.
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "core/context.h"

namespace sluice {

/// How bytes travel from one rank's GPU to another's.
enum class DeviceTransport : uint8_t {
  automatic,  // nccl if every rank has its own GPU and this program has NCCL, otherwise host
  nccl,       // directly between GPUs
  host        // through pinned host memory and the host communicator; several ranks may share a GPU
};

struct DeviceRanksOptions {
  DeviceTransport transport = DeviceTransport::automatic;
  /// NCCL: an operation that takes longer is aborted with Error(hang). This is a fallback for the watchdog,
  /// which names the rank responsible; 0: never.
  double timeout_seconds = 0;
};

/// Collective over inner, which must outlive the result and handles its abort(). Operations take memory of
/// ctx's device, start after the ops of ctx and are complete when they return, except barrier(), which waits
/// for the ranks and not for their GPUs. Only one thread at a time may use it, inner and ctx. name() is
/// "nccl", or "host" followed by inner's name. Error(usage) if NCCL is requested but this program lacks it or
/// ranks share a GPU; Error(hang) for errors that NCCL reports.
std::unique_ptr<Communicator> make_device_communicator(Communicator& inner, Context& ctx,
                                                       const DeviceRanksOptions& options);

/// "2.28.3"; empty if this program has no NCCL.
std::string nccl_version();

}  // namespace sluice
