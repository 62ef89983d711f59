#pragma once
// Interface between launches and the fake runtime's graphs (graph.cpp).
#include "seam.h"

namespace emu {

/// Runs a launch immediately.
void run_launch(const LaunchParams& params, const KernelCall& call);
/// True if the launch was stored and must not run now, because its stream is being captured or works late.
bool record_launch(const LaunchParams& params, const KernelCall& call);

}  // namespace emu
