// The time at which work on a stream is performed: immediately, or (SLUICE_EMULATION_STREAMS=late) only when
// it is waited for, so that data read from another stream without waiting is not there yet. Work of one
// stream is performed in order.
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>
#include <utility>

#include "fake_runtime.h"

namespace emu {
namespace {

/// One piece of work at a time, from any thread; work may advance other streams.
std::recursive_mutex& turn() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}
std::set<CUstream_st*>& streams() {
  static auto* all = new std::set<CUstream_st*>;
  return *all;
}

}  // namespace

bool late() {
  static const bool chosen = [] {
    const char* text = std::getenv("SLUICE_EMULATION_STREAMS");
    return text && std::strcmp(text, "late") == 0;
  }();
  return chosen;
}

CUstream_st* new_stream() {
  auto* stream = new CUstream_st;
  const std::lock_guard lock(turn());
  streams().insert(stream);
  return stream;
}

void end_stream(CUstream_st* stream) {
  finish(stream, enqueued(stream));
  const std::lock_guard lock(turn());
  streams().erase(stream);
  if (!late()) delete stream;  // others may still query its completion
}

void enqueue_pending(CUstream_st* stream, std::function<bool()> advance) {
  const std::lock_guard lock(turn());
  stream->pending.push_back(std::move(advance));
  ++stream->enqueued;
}

unsigned long long enqueued(CUstream_st* stream) {
  const std::lock_guard lock(turn());
  return stream ? stream->enqueued : 0;
}

bool advance(CUstream_st* stream, unsigned long long until) {
  if (!stream) return true;
  const std::lock_guard lock(turn());
  while (stream->done < until) {
    if (stream->pending.empty()) return false;  // it is being performed by a caller
    std::function<bool()> work = std::move(stream->pending.front());
    stream->pending.pop_front();
    bool is_done = true;
    try {
      is_done = work();
    } catch (...) {
      ++stream->done;
      throw;
    }
    if (!is_done) {
      stream->pending.push_front(std::move(work));
      return false;
    }
    ++stream->done;
  }
  return true;
}

void finish(CUstream_st* stream, unsigned long long until) {
  while (!advance(stream, until)) std::this_thread::yield();
}

void finish_own_streams() {
  std::set<CUstream_st*> all;
  {
    const std::lock_guard lock(turn());
    all = streams();
  }
  for (CUstream_st* stream : all)
    if (stream->thread == std::this_thread::get_id()) finish(stream, enqueued(stream));
}

}  // namespace emu
