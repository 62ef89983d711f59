#pragma once
#include <csignal>

namespace emu {

/// For its lifetime, a kernel's access to unmapped memory fails its launch rather than the program.
class FaultReports {
 public:
  FaultReports();
  ~FaultReports();
  FaultReports(const FaultReports&) = delete;
  FaultReports& operator=(const FaultReports&) = delete;

 private:
  [[maybe_unused]] struct sigaction before_[2];
};

}  // namespace emu
