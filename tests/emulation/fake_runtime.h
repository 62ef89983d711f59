#pragma once
// Inside the fake CUDA runtime: one device, whose memory is the host's; streams that finish everything at
// once, in the order of the calls, or as late as they may; captures that record instead (graph.cpp). What a
// real driver refuses is refused.
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

// ---- device_memory.cpp
enum class Memory { pageable, pinned, device };
/// Where [p, p + bytes) lies; false where it begins in an allocation and ends outside of it.
bool find_memory(const void* p, size_t bytes, Memory& memory);
size_t device_bytes_in_use();

// ---- graph.cpp
struct Capture {
  unsigned long long id = 0;
  bool invalid = false;
  std::vector<std::function<void()>> nodes;
};
/// Does the work now, or records it where the stream is being captured.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);
/// Work that is not done when its call returns, but later, when others come to it (fake_nccl.cpp): `advance`
/// does what it can and says whether all is done. What comes after it on the stream waits for it.
void enqueue_pending(cudaStream_t stream, std::function<bool()> advance);
/// Whether nothing on a stream is done before somebody waits for it (streams.cpp).
bool late();
CUstream_st* new_stream();
void end_stream(CUstream_st* stream);
/// Pieces of work that were pending on it so far; what cannot be pending is not counted.
unsigned long long enqueued(CUstream_st* stream);
/// Does what it can of the first `until` of them; whether they are done. finish: until they are. A null
/// stream has none.
bool advance(CUstream_st* stream, unsigned long long until);
void finish(CUstream_st* stream, unsigned long long until);
/// Of all streams that this host thread has created: in a test, one rank's.
void finish_own_streams();
/// The capture this stream belongs to, or null.
Capture* capture_of(cudaStream_t stream);
/// What waits for the device, or allocates, is not allowed while this thread captures: the capture becomes
/// invalid.
bool forbidden_in_capture();

}  // namespace emu

/// NVIDIA leaves these to us.
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
