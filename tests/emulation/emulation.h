#pragma once
// CUDA on the CPU: the header that replaces <cuda_runtime.h> when g++ compiles a kernel file with
// SLUICE_EMULATION. NVIDIA's headers supply the vector types and bf16 (host bodies); everything else is
// implemented here. See README.md.
#include <cuda_bf16.h>
#include <math.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "seam.h"

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __cluster_dims__
#define __cluster_dims__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __constant__
#define __constant__
// A raw __shared__ variable would not be separate per block, poisoned or bounds-checked here.
#undef __shared__
#define __shared__ static_assert(false, "shared memory through STATIC_SMEM or DYN_SMEM only");

#define threadIdx (::emu::g_cur->tid)
#define blockIdx (::emu::g_cur->bid)
#define blockDim (::emu::g_cur->bdim)
#define gridDim (::emu::g_cur->gdim)
#define warpSize 32

#include "atomics.h"
#include "intrinsics.h"
