#include "comm/threads.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace sluice {
namespace {

/// State shared by all ranks of one run: whether one has failed.
struct Run {
  ThreadRanksOptions options;
  std::mutex mutex;
  std::condition_variable changed;
  int failed_rank = -1;
  std::string failure;
};

/// State shared by the ranks of one communicator. Every collective posts pointers, meets, copies and meets
/// again, but for a barrier, which meets once. Posts lie in two rows in turn: where operations do not match,
/// a rank that left a barrier posts while others still read what it was in.
struct Group {
  explicit Group(Run& r, int n)
      : run(r),
        size(n),
        posts{std::vector<Post>(static_cast<size_t>(n)), std::vector<Post>(static_cast<size_t>(n))},
        mailboxes(static_cast<size_t>(n * n)) {}

  struct Post {
    const char* operation = nullptr;
    const char* data = nullptr;
    const int64_t* bytes = nullptr;  // (size) for all_to_all_v
    int64_t count = 0, colour = 0, key = 0;
  };
  struct Message {
    const void* data;
    int64_t bytes;
    bool taken = false;
  };

  Run& run;
  const int size;
  std::array<std::vector<Post>, 2> posts;       // by turn, then rank
  std::vector<std::deque<Message*>> mailboxes;  // (from, to)
  int waiting = 0;
  int64_t generation = 0;
  std::map<std::pair<int64_t, int64_t>, std::shared_ptr<Group>> parts;  // (generation, colour) of a split
};

class ThreadRank : public Communicator {
 public:
  ThreadRank(std::shared_ptr<Group> group, int rank) : group_(std::move(group)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return group_->size; }
  std::string name() const override { return "threads"; }
  [[noreturn]] void abort(ExitCode code) override { fail(code, "rank {} aborts", rank_); }

 protected:
  void do_barrier() override {
    post({.operation = "barrier"});
    meet();
  }
  void do_broadcast(void* data, int64_t bytes, int root) override {
    post({.operation = "broadcast", .data = static_cast<const char*>(data), .count = bytes, .key = root});
    meet();
    const Group::Post& from = posted(root);
    check_same("broadcast", [&](const Group::Post& p) { return p.count == bytes && p.key == root; });
    if (rank_ != root) move(data, from.data, bytes);
    meet();
  }
  void do_all_gather(void* all, const void* mine, int64_t bytes) override {
    post({.operation = "all_gather", .data = static_cast<const char*>(mine), .count = bytes});
    meet();
    check_same("all_gather", [&](const Group::Post& p) { return p.count == bytes; });
    for (int r = 0; r < size(); ++r) {
      char* to = static_cast<char*>(all) + r * bytes;
      const char* from = posted(r).data;
      if (to != from) move(to, from, bytes);
    }
    meet();
  }
  void do_all_to_all_v(void* received, const int64_t* received_bytes, const void* sent,
                       const int64_t* sent_bytes) override {
    post({.operation = "all_to_all", .data = static_cast<const char*>(sent), .bytes = sent_bytes});
    meet();
    check_same("all_to_all", [](const Group::Post&) { return true; });
    char* to = static_cast<char*>(received);
    for (int r = 0; r < size(); ++r) {
      const Group::Post& from = posted(r);
      SLUICE_CHECK(from.bytes[rank_] == received_bytes[r],
                   "all_to_all: rank {} sends {} bytes to rank {}, which expects {}", r, from.bytes[rank_],
                   rank_, received_bytes[r]);
      int64_t offset = 0;
      for (int i = 0; i < rank_; ++i) offset += from.bytes[i];
      move(to, from.data + offset, received_bytes[r]);
      to += received_bytes[r];
    }
    meet();
  }
  void do_send(const void* data, int64_t bytes, int to) override {
    Group::Message message{data, bytes};
    std::unique_lock lock(group_->run.mutex);
    group_->mailboxes[static_cast<size_t>(rank_ * size() + to)].push_back(&message);
    group_->run.changed.notify_all();
    wait(lock, [&] { return message.taken; });
  }
  void do_receive(void* data, int64_t bytes, int from) override {
    std::unique_lock lock(group_->run.mutex);
    auto& mailbox = group_->mailboxes[static_cast<size_t>(from * size() + rank_)];
    wait(lock, [&] { return !mailbox.empty(); });
    Group::Message* message = mailbox.front();
    SLUICE_CHECK(message->bytes == bytes, "receive: rank {} sends {} bytes to rank {}, which expects {}",
                 from, message->bytes, rank_, bytes);
    move(data, message->data, bytes);
    mailbox.pop_front();
    message->taken = true;
    group_->run.changed.notify_all();
  }
  std::unique_ptr<Communicator> do_split(int colour, int key) override {
    post({.operation = "split", .colour = colour, .key = key});
    meet();
    check_same("split", [](const Group::Post&) { return true; });
    std::vector<std::pair<int64_t, int>> members;
    for (int r = 0; r < size(); ++r)
      if (const Group::Post& p = posted(r); p.colour == colour) members.push_back({p.key, r});
    std::sort(members.begin(), members.end());
    std::shared_ptr<Group> part;
    {
      const std::scoped_lock lock(group_->run.mutex);
      auto& slot = group_->parts[{group_->generation, colour}];
      if (!slot) slot = std::make_shared<Group>(group_->run, static_cast<int>(members.size()));
      part = slot;
    }
    int rank = 0;
    while (members[static_cast<size_t>(rank)].second != rank_) ++rank;
    meet();
    return std::make_unique<ThreadRank>(std::move(part), rank);
  }

 private:
  void post(const Group::Post& p) {
    row_ = meetings_ % 2;
    group_->posts[row_][static_cast<size_t>(rank_)] = p;
  }
  /// What the rank posted for this operation.
  const Group::Post& posted(int rank) const { return group_->posts[row_][static_cast<size_t>(rank)]; }

  /// Waits for all ranks of the group.
  void meet() {
    ++meetings_;
    std::unique_lock lock(group_->run.mutex);
    const int64_t generation = group_->generation;
    if (++group_->waiting == size()) {
      group_->waiting = 0;
      ++group_->generation;
      group_->run.changed.notify_all();
      return;
    }
    wait(lock, [&] { return group_->generation != generation; });
  }

  template <class Ready>
  void wait(std::unique_lock<std::mutex>& lock, Ready ready) {
    Run& run = group_->run;
    const auto over = [&] { return ready() || run.failed_rank >= 0; };
    if (run.options.timeout_seconds > 0) {
      if (!run.changed.wait_for(lock, std::chrono::duration<double>(run.options.timeout_seconds), over))
        fail(ExitCode::hang, "rank {} waited {} s in {}", rank_, run.options.timeout_seconds,
             progress().operation.load());
    } else {
      run.changed.wait(lock, over);
    }
    if (!ready()) fail(ExitCode::hang, "rank {} lost rank {}: {}", rank_, run.failed_rank, run.failure);
  }

  /// Checks that every rank is in the same operation with matching arguments.
  template <class Fits>
  void check_same(const char* operation, Fits fits) const {
    for (int r = 0; r < size(); ++r) {
      const Group::Post& p = posted(r);
      SLUICE_CHECK(std::strcmp(p.operation, operation) == 0, "rank {} is in {} where rank {} is in {}", r,
                   p.operation, rank_, operation);
      SLUICE_CHECK(fits(p), "{}: ranks {} and {} disagree on sizes", operation, r, rank_);
    }
  }

  void move(void* to, const void* from, int64_t bytes) const {
    if (bytes == 0) return;
    if (SlowLink* link = group_->run.options.link;
        link && link->seconds_per_byte > 0 && (link->only_moves_of == 0 || bytes == link->only_moves_of)) {
      const auto start = std::chrono::steady_clock::now();
      std::this_thread::sleep_for(
          std::chrono::duration<double>(link->seconds_per_byte * static_cast<double>(bytes)));
      link->taken_ns +=
          std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start)
              .count();
    }
    std::memmove(to, from, static_cast<size_t>(bytes));
  }

  std::shared_ptr<Group> group_;
  int rank_;
  size_t meetings_ = 0, row_ = 0;
};

}  // namespace

void run_thread_ranks(int size, const std::function<void(Communicator&)>& body,
                      const ThreadRanksOptions& options) {
  SLUICE_CHECK(size >= 1, "run_thread_ranks: {} ranks", size);
  Run run;
  run.options = options;
  const auto world = std::make_shared<Group>(run, size);
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      ThreadRank communicator(world, rank);
      const auto failed = [&](const std::string& what) {
        const std::scoped_lock lock(run.mutex);
        if (run.failed_rank < 0) {
          run.failed_rank = rank;
          run.failure = what;
          first = std::current_exception();
        }
        run.changed.notify_all();
      };
      try {
        body(communicator);
      } catch (const std::exception& error) {
        failed(error.what());
      } catch (...) {
        failed("an unknown exception");
      }
    });
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace sluice
