#pragma once
// Context: the first argument of every op.
#include <memory>

#include "core/arena.h"
#include "core/device.h"
#include "core/profile.h"

namespace sluice {

/// What a backend keeps between calls (primitives, plans, handles). Created by the backend on first use.
struct BackendState {
  virtual ~BackendState() = default;
};

struct Context {
  Device device = Device::cpu;
  /// Ops check their arguments and take their temporaries, but compute nothing: the memory of a step is
  /// measured by one dry step, and `sluice plan` needs no memory at all. Tensors may have null data.
  bool dry_run = false;
  /// On a GPU: no sum whose order may vary from run to run. (A CPU has none.)
  bool deterministic = true;
  Arena scratch;
  std::unique_ptr<BackendState> backend;  // owned here so that it has no life of its own
  Profile* profile = nullptr;             // where ops report their times, if anywhere

  /// scratch_capacity in bytes; 0 makes a dry-run context that measures.
  explicit Context(int64_t scratch_capacity, Device device_ = Device::cpu)
      : device(device_), dry_run(scratch_capacity == 0), scratch("scratch", scratch_capacity, device_) {}
};

}  // namespace sluice
