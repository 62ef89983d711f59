// If a kernel accesses unmapped memory, the signal becomes a report with kernel, block and thread. Plain
// builds only; sanitizers have their own reports.
#include "fault.h"

#include <ucontext.h>

#include <csignal>
#include <cstdint>

#include "machine.h"

namespace emu {
namespace {

thread_local const void* fault_address;
thread_local int fault_signal;

[[noreturn]] void report_fault() {
  if (fault_signal == SIGSEGV && fault_address)
    fail("touches %p, which is outside of every allocation", fault_address);
  fail("touches memory outside of every allocation, or a vector at a misaligned address");
}

/// Continues in report_fault on the faulting thread's own stack, below what its frames use.
void on_fault(int signal, siginfo_t* info, void* context) {
  constexpr uintptr_t kRedZone = 128;
  if (!g_cur) {  // not caused by a kernel
    std::signal(signal, SIG_DFL);
    return;
  }
  fault_signal = signal;
  fault_address = info->si_addr;
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const uintptr_t stack = (static_cast<uintptr_t>(registers[REG_RSP]) - kRedZone) & ~uintptr_t{15};
  registers[REG_RSP] = static_cast<greg_t>(stack - 8);  // as after a call
  registers[REG_RIP] = reinterpret_cast<greg_t>(&report_fault);
}

constexpr int kSignals[] = {SIGSEGV, SIGBUS};

}  // namespace

FaultReports::FaultReports() {
  if (EMU_ASAN || EMU_TSAN) return;
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;  // never returned from
  for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &action, &before_[i]);
}

FaultReports::~FaultReports() {
  if (EMU_ASAN || EMU_TSAN) return;
  for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &before_[i], nullptr);
}

}  // namespace emu
