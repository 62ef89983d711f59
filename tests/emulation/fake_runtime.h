#pragma once
// Internals of the fake CUDA runtime: one device, whose memory is host memory; streams that complete work
// immediately, in the order of the calls, or as late as allowed; captures that record it instead (graph.cpp).
// Calls that a real driver refuses are refused.
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "capture.h"
#include "seam.h"

namespace emu {

/// Keeps the error for cudaGetLastError.
cudaError_t result(cudaError_t error);

/// Lets this thread's events find that more time has passed, as a real device would.
void spend(double seconds);

// ---- device_memory.cpp
enum class Memory { pageable, pinned, device };
/// The location of [p, p + bytes); false if it starts in an allocation and ends outside of it.
bool find_memory(const void* p, size_t bytes, Memory& memory);
size_t device_bytes_in_use();

// ---- graph.cpp
struct Capture {
  unsigned long long id = 0;
  bool invalid = false;
  std::vector<std::function<void()>> nodes;
};
/// Performs the work, or records it if the stream is being captured.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);
/// Work that completes after its call returns, when other ranks join it (fake_nccl.cpp): `advance` does what
/// is possible and returns whether it is complete. Later work on the stream waits for it.
void enqueue_pending(cudaStream_t stream, std::function<bool()> advance);
/// Whether work on a stream is performed only when it is waited for (streams.cpp).
bool late();
CUstream_st* new_stream();
void end_stream(CUstream_st* stream);
/// Number of pieces of work that were ever pending on it; work that cannot be pending is not counted.
unsigned long long enqueued(CUstream_st* stream);
/// Does what is possible of the first `until` pieces and returns whether they are complete. finish: repeat
/// until they are. A null stream has none.
bool advance(CUstream_st* stream, unsigned long long until);
void finish(CUstream_st* stream, unsigned long long until);
/// The same for all streams created by this host thread, which in a test is one rank.
void finish_own_streams();
/// The capture this stream belongs to, or null.
Capture* capture_of(cudaStream_t stream);
/// Calls that wait for the device or allocate are forbidden while this thread captures; they invalidate the
/// capture.
bool forbidden_in_capture();

}  // namespace emu

/// Types that NVIDIA's headers only declare.
struct CUstream_st {
  emu::Capture* capture = nullptr;
  std::thread::id thread = std::this_thread::get_id();
  std::deque<std::function<bool()>> pending;
  unsigned long long enqueued = 0, done = 0;
  unsigned long long work = 0,
                     joined = 0;  // of a stream that was drawn into a capture: recorded, and joined back
};
struct CUevent_st {
  bool timing = true, recorded = false;
  double seconds = 0;
  emu::Capture* capture = nullptr;
  CUstream_st* stream = nullptr;
  unsigned long long work = 0;
  unsigned long long at = 0;  // of what is pending on the stream
};
