#pragma once
// Small kernels with a selectable bug, to test which variant of the emulator catches it.
#include <array>
#include <cstdint>
#include <string>

namespace sluice::cuda {

enum class Bug {
  none,
  missing_barrier,         // block reduction: partial sums are read before they are written
  missing_second_barrier,  // block reduction: the next call overwrites what a slow warp still reads
  missing_syncwarp,        // lanes exchange values through shared memory
  global_out_of_bounds,
  shared_out_of_bounds,
  misaligned_vector,
  less_aligned_shared,  // an array of floats in shared memory, read as vectors
  cp_async_wait_off_by_one,
  missing_refill_barrier,  // cp.async: a stage is filled again while it is read
  early_release,           // wgmma: a stage is released before the wait
  wrong_phase,
  wrong_byte_count,
  skipped_empty_wait,
  missing_proxy_fence,  // before a TMA store
  non_atomic_add,       // of several blocks to one number
  missing_stream_wait,  // a copy on one stream of what a kernel on another one writes
};
inline constexpr std::array kBugNames = {"none",
                                         "missing_barrier",
                                         "missing_second_barrier",
                                         "missing_syncwarp",
                                         "global_out_of_bounds",
                                         "shared_out_of_bounds",
                                         "misaligned_vector",
                                         "less_aligned_shared",
                                         "cp_async_wait_off_by_one",
                                         "missing_refill_barrier",
                                         "early_release",
                                         "wrong_phase",
                                         "wrong_byte_count",
                                         "skipped_empty_wait",
                                         "missing_proxy_fence",
                                         "non_atomic_add",
                                         "missing_stream_wait"};

/// Runs the kernels that have this bug (none: all of them), and compares with plain loops. Throws
/// emu::LaunchError.
bool results_are_right(Bug bug);

}  // namespace sluice::cuda
