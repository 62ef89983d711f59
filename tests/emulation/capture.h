#pragma once
// Between launches and the fake runtime's graphs (graph.cpp).
#include "seam.h"

namespace emu {

/// Runs a launch now.
void run_launch(const LaunchParams& params, const KernelCall& call);
/// True where the launch's stream is being captured: it was recorded and must not run.
bool record_launch(const LaunchParams& params, const KernelCall& call);

}  // namespace emu
