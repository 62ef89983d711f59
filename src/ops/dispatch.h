#pragma once
// Dispatch of ops to the backend of the device. SLUICE_DECLARE_BACKENDS(op) declares every backend's function
// from the signature in the op's header; SLUICE_DISPATCH calls the right one. A backend whose function is
// missing or has another signature fails to link, with the name of the op.
#include "core/context.h"
#include "core/cpu_features.h"

#if defined(__x86_64__)
#define SLUICE_DECLARE_CPU(op)      \
  namespace sluice::cpu::baseline { \
  decltype(::sluice::op) op;        \
  }                                 \
  namespace sluice::cpu::avx2 {     \
  decltype(::sluice::op) op;        \
  }                                 \
  namespace sluice::cpu::avx512 {   \
  decltype(::sluice::op) op;        \
  }
#define SLUICE_DISPATCH_CPU(op, ...)                   \
  switch (::sluice::cpu_isa()) {                       \
    case ::sluice::Isa::avx512:                        \
      return ::sluice::cpu::avx512::op(__VA_ARGS__);   \
    case ::sluice::Isa::avx2:                          \
      return ::sluice::cpu::avx2::op(__VA_ARGS__);     \
    case ::sluice::Isa::baseline:                      \
      return ::sluice::cpu::baseline::op(__VA_ARGS__); \
  }                                                    \
  ::sluice::fail(::sluice::ExitCode::internal, "{}: unknown instruction set", #op);
#else
#define SLUICE_DECLARE_CPU(op)      \
  namespace sluice::cpu::baseline { \
  decltype(::sluice::op) op;        \
  }
#define SLUICE_DISPATCH_CPU(op, ...) return ::sluice::cpu::baseline::op(__VA_ARGS__);
#endif

#if defined(SLUICE_HAS_CUDA)
#include "core/cuda_backend.h"
#define SLUICE_DECLARE_CUDA(op) \
  namespace sluice::cuda {      \
  decltype(::sluice::op) op;    \
  }
#define SLUICE_DISPATCH_CUDA(op, ctx, ...)            \
  if ((ctx).device == ::sluice::Device::cuda) {       \
    const ::sluice::cuda::OpScope op_scope(ctx, #op); \
    return ::sluice::cuda::op(ctx, __VA_ARGS__);      \
  }
#else
#define SLUICE_DECLARE_CUDA(op)
#define SLUICE_DISPATCH_CUDA(op, ctx, ...) \
  SLUICE_CHECK((ctx).device == ::sluice::Device::cpu, #op ": this build has no CUDA backend");
#endif

#define SLUICE_DECLARE_BACKENDS(op) \
  SLUICE_DECLARE_CPU(op)            \
  SLUICE_DECLARE_CUDA(op)

/// Last statement of an op's entry point: SLUICE_DISPATCH(rmsnorm_forward, ctx, y, rstd, x, weight, eps).
#define SLUICE_DISPATCH(op, ctx, ...)                               \
  do {                                                              \
    SLUICE_DISPATCH_CUDA(op, ctx, __VA_ARGS__)                      \
    const ::sluice::ProfileScope profile_scope((ctx).profile, #op); \
    SLUICE_DISPATCH_CPU(op, ctx, __VA_ARGS__)                       \
  } while (false)

/// For an op that CUDA has a kernel for but the CPU composes from other ops: first statement of its entry
/// point after the checks, followed by the composition.
#define SLUICE_DISPATCH_CUDA_ONLY(op, ctx, ...) SLUICE_DISPATCH_CUDA(op, ctx, __VA_ARGS__)
