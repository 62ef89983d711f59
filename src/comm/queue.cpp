#include "comm/queue.h"

#include <chrono>
#include <cstdlib>
#include <utility>

#include "core/parallel_for.h"
#include "core/start_thread.h"

namespace sluice {
namespace {

class Queued : public Communicator {
 public:
  Queued(CommQueue& queue, Communicator& inner, Context* ops) : queue_(queue), inner_(inner), ops_(ops) {}
  Queued(CommQueue& queue, std::unique_ptr<Communicator> inner, Context* ops)
      : queue_(queue), owned_(std::move(inner)), inner_(*owned_), ops_(ops) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::string name() const override { return inner_.name(); }
  [[noreturn]] void abort(ExitCode code) override {
    inner_.abort(code);
    std::abort();
  }

 protected:
  void do_barrier() override {
    run([this] { inner_.barrier(); });
  }
  void do_broadcast(void* data, int64_t bytes, int root) override {
    run([=, this] { inner_.broadcast(data, bytes, root); });
  }
  void do_all_gather(void* all, const void* mine, int64_t bytes) override {
    run([=, this] { inner_.all_gather(all, mine, bytes); });
  }
  void do_all_to_all_v(void* received, const int64_t* received_bytes, const void* sent,
                       const int64_t* sent_bytes) override {
    run([=, this] { inner_.all_to_all_v(received, received_bytes, sent, sent_bytes); });
  }
  void do_send(const void* data, int64_t bytes, int to) override {
    run([=, this] { inner_.send(data, bytes, to); });
  }
  void do_receive(void* data, int64_t bytes, int from) override {
    run([=, this] { inner_.receive(data, bytes, from); });
  }
  std::unique_ptr<Communicator> do_split(int colour, int key) override {
    std::unique_ptr<Communicator> part;
    run([&, this] { part = inner_.split(colour, key); });
    return std::make_unique<Queued>(queue_, std::move(part), ops_);
  }
  std::unique_ptr<Communicator> do_axis(int stride, int size) override {
    std::unique_ptr<Communicator> part;
    run([&, this] { part = inner_.axis(stride, size); });
    return std::make_unique<Queued>(queue_, std::move(part), ops_);
  }

 private:
  template <class Work>
  void run(Work&& work) {
    if (queue_.serving()) return work();  // called from work in the queue itself
    if (!ops_) return queue_.run(std::forward<Work>(work));
    begun_.set(*ops_);
    queue_.run([&] {
      begun_.await(queue_.context());
      work();
    });
  }

  CommQueue& queue_;
  std::unique_ptr<Communicator> owned_;
  Communicator& inner_;
  Context* ops_;
  Mark begun_;
};

}  // namespace

CommQueue::CommQueue(Device device) : ctx_(64, device) {
  start_thread(
      thread_, [this] { serve(); }, problem_);
}

void CommQueue::finish() {
  {
    const std::scoped_lock lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

CommQueue::Ticket CommQueue::post(std::function<void()> work) {
  if (!problem_.empty()) {
    serve_here(work);
    return last_posted_;
  }
  Ticket ticket = 0;
  {
    const std::scoped_lock lock(mutex_);
    work_.push_back(std::move(work));
    ticket = ++last_posted_;
  }
  changed_.notify_all();
  return ticket;
}

/// Does what the thread would do. Work that is posted by other work runs immediately, which keeps the order
/// of the calls.
void CommQueue::serve_here(const std::function<void()>& work) {
  ++last_posted_;
  const bool outer = serving_;
  serving_ = true;
  try {
    if (!failure_) work();
  } catch (...) {
    failure_ = std::current_exception();
  }
  serving_ = outer;
  last_done_ = last_posted_;
}

void CommQueue::wait(Ticket ticket) {
  std::unique_lock lock(mutex_);
  if (last_done_ < ticket && !failure_) {
    const auto start = std::chrono::steady_clock::now();
    changed_.wait(lock, [&] { return last_done_ >= ticket || failure_; });
    waited_ns_ +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start)
            .count();
  }
  if (failure_) std::rethrow_exception(failure_);
}

void CommQueue::serve() {
  set_num_threads(1);  // leave the cores to the computation
  if (ctx_.device == Device::cuda) use_chosen_cuda_device();
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return over_ || !work_.empty(); });
    if (work_.empty()) return;
    const std::function<void()> work = std::move(work_.front());
    work_.pop_front();
    if (!failure_) {
      lock.unlock();
      std::exception_ptr failure;
      try {
        work();
      } catch (...) {
        failure = std::current_exception();
      }
      lock.lock();
      failure_ = failure;
    }
    ++last_done_;
    changed_.notify_all();
  }
}

std::unique_ptr<Communicator> CommQueue::queued(Communicator& inner, Context* ops) {
  return std::make_unique<Queued>(*this, inner, ops);
}

}  // namespace sluice
