#pragma once
// Between launches and the fake runtime's graphs (graph.cpp).
#include "seam.h"

namespace emu {

/// Runs a launch now.
void run_launch(const LaunchParams& params, const KernelCall& call);
/// True where the launch was kept for later and must not run now: its stream is being captured, or does
/// everything late.
bool record_launch(const LaunchParams& params, const KernelCall& call);

}  // namespace emu
