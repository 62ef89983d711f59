#pragma once
// Communication that overlaps computation: a separate thread performs the posted work in order.
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

/// Every rank posts the same operations in the same order, from one thread. Posted work may use
/// communicators; while any is pending, other code may use them only through queued(), because MPI is entered
/// by one thread at a time.
class CommQueue {
 public:
  using Ticket = int64_t;

  /// device: where the memory of the work is. If the system cannot start a thread, the caller of post() does
  /// the work itself, with the same results but no overlap; problem() then gives the reason.
  explicit CommQueue(Device device = Device::cpu);
  const std::string& problem() const { return problem_; }
  ~CommQueue() { finish(); }
  /// Completes the posted work (a failed operation cancels the rest) and accepts no more. Called by the owner
  /// of the memory before it is released.
  void finish();
  CommQueue(const CommQueue&) = delete;
  CommQueue& operator=(const CommQueue&) = delete;

  Ticket post(std::function<void()> work);
  /// Returns when this work, and all work before it, is complete. Rethrows the exception of this or earlier
  /// work; after a failure no further work is done and every wait throws.
  void wait(Ticket ticket);
  void wait_all() { wait(last_posted_); }
  /// Runs in the thread of the queue immediately.
  void run(std::function<void()> work) { wait(post(std::move(work))); }
  /// The context for ops of the work; on a GPU it has a separate stream.
  Context& context() { return ctx_; }

  /// Total time that callers spent in wait(), in nanoseconds.
  int64_t waited_ns() const { return waited_ns_; }

  /// Whether the calling thread is the thread of the queue.
  bool serving() const {
    return problem_.empty() ? std::this_thread::get_id() == thread_.get_id() : serving_;
  }
  /// A communicator over the same ranks whose operations are performed by the queue and waited for. inner and
  /// the queue must outlive it. ops (if inner works on GPU memory): an operation starts after the ops of this
  /// context are complete.
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
  bool serving_ = false;  // without a thread: work is in progress
  std::string problem_;
  std::thread thread_;
};

}  // namespace sluice
