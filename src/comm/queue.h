#pragma once
// Communication beside computation: a thread of its own does what it is given, one after the other.
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "comm/communicator.h"
#include "core/context.h"

namespace sluice {

/// Every rank posts the same operations in the same order, from one thread. Work given to the queue may use
/// communicators; while it has any, nobody else does, but through queued(): MPI is entered by one thread at a
/// time.
class CommQueue {
 public:
  using Ticket = int64_t;

  /// device: where the memory is that its work is about. Where the system makes no thread, the caller of
  /// post() does the work itself: the same results, nothing beside the computation; problem() then says why.
  explicit CommQueue(Device device = Device::cpu);
  const std::string& problem() const { return problem_; }
  ~CommQueue() { finish(); }
  /// Does what was posted (an operation that failed ends the rest), and nothing more: for an owner whose
  /// memory the work is about.
  void finish();
  CommQueue(const CommQueue&) = delete;
  CommQueue& operator=(const CommQueue&) = delete;

  Ticket post(std::function<void()> work);
  /// Returns when that work, and all before it, is done. Throws what it or an earlier one threw; after that
  /// nothing more is done and every wait throws.
  void wait(Ticket ticket);
  void wait_all() { wait(last_posted_); }
  /// Now, in the queue's thread.
  void run(std::function<void()> work) { wait(post(std::move(work))); }
  /// For the work's ops: on a GPU, a stream of its own.
  Context& context() { return ctx_; }

  /// Nanoseconds that callers of wait() have waited.
  int64_t waited_ns() const { return waited_ns_; }

  /// Whether this is the queue's own thread.
  bool serving() const {
    return problem_.empty() ? std::this_thread::get_id() == thread_.get_id() : serving_;
  }
  /// The same ranks, each operation done by the queue and waited for. inner and the queue outlive it. ops:
  /// what it has begun is done before an operation begins (inner's memory is a GPU's).
  std::unique_ptr<Communicator> queued(Communicator& inner, Context* ops = nullptr);

 private:
  void serve();
  void serve_here(const std::function<void()>& work);

  Context ctx_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  Ticket last_posted_ = 0, last_done_ = 0;
  int64_t waited_ns_ = 0;
  bool over_ = false;
  std::exception_ptr failure_;
  bool serving_ = false;  // without a thread: work is being done
  std::string problem_;
  std::thread thread_;
};

}  // namespace sluice
