#pragma once
// Ranks as processes of one test, which, unlike threads, can fail or die individually. Small collectives
// through shared memory.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>
#include <functional>
#include <new>
#include <thread>
#include <vector>

#include "comm/communicator.h"

namespace sluice {

/// State shared by the processes.
struct ProcessGroup {
  static constexpr int kMaxRanks = 4;
  static constexpr int64_t kSlot = 1 << 14;  // bytes per rank and operation
  std::atomic<int> arrived{0}, generation{0};
  char slots[kMaxRanks][kSlot];
};

/// Barrier, broadcast and all_gather, the operations that a checkpoint needs.
class ProcessRank : public Communicator {
 public:
  ProcessRank(ProcessGroup& group, int rank, int size) : group_(group), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string name() const override { return "processes"; }
  [[noreturn]] void abort(ExitCode code) override { ::_exit(static_cast<int>(code)); }

 protected:
  void do_barrier() override {
    const int generation = group_.generation;
    if (++group_.arrived == size_) {
      group_.arrived = 0;
      ++group_.generation;
    } else {
      while (group_.generation == generation) ::usleep(20);
    }
  }
  void do_broadcast(void* data, int64_t bytes, int root) override {
    SLUICE_CHECK(bytes <= ProcessGroup::kSlot, "broadcast: {} bytes", bytes);
    if (rank_ == root) std::memcpy(group_.slots[root], data, static_cast<size_t>(bytes));
    do_barrier();
    std::memcpy(data, group_.slots[root], static_cast<size_t>(bytes));
    do_barrier();
  }
  void do_all_gather(void* all, const void* mine, int64_t bytes) override {
    SLUICE_CHECK(bytes <= ProcessGroup::kSlot, "all_gather: {} bytes", bytes);
    std::memcpy(group_.slots[rank_], mine, static_cast<size_t>(bytes));
    do_barrier();
    for (int r = 0; r < size_; ++r)
      std::memcpy(static_cast<char*>(all) + r * bytes, group_.slots[r], static_cast<size_t>(bytes));
    do_barrier();
  }
  void do_all_to_all_v(void*, const int64_t*, const void*, const int64_t*) override { unknown(); }
  void do_send(const void*, int64_t, int) override { unknown(); }
  void do_receive(void*, int64_t, int) override { unknown(); }
  std::unique_ptr<Communicator> do_split(int, int) override { unknown(); }

 private:
  [[noreturn]] static void unknown() {
    fail(ExitCode::internal, "processes of a test do not exchange more than checkpoints need");
  }

  ProcessGroup& group_;
  int rank_, size_;
};

/// Runs body(communicator) in `size` forked processes and returns their wait statuses. The exit status is the
/// return value of body, 99 for an Error. Like a launcher, it ends the other processes `grace_ms` after one
/// was killed.
inline std::vector<int> run_process_ranks(int size, const std::function<int(Communicator&)>& body,
                                          int grace_ms = 0) {
  REQUIRE(size <= ProcessGroup::kMaxRanks);
  void* shared =
      ::mmap(nullptr, sizeof(ProcessGroup), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(shared != MAP_FAILED);
  auto* group = new (shared) ProcessGroup;
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      int status = 99;
      try {
        ProcessRank communicator(*group, rank, size);
        status = body(communicator);
      } catch (const Error& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      ::_exit(status);
    }
    children.push_back(child);
  }
  std::vector<int> statuses(static_cast<size_t>(size), -1);
  for (int left = size; left > 0; --left) {
    int status = 0;
    const pid_t child = ::waitpid(-1, &status, 0);
    const auto at = std::find(children.begin(), children.end(), child);
    REQUIRE(at != children.end());
    statuses[static_cast<size_t>(at - children.begin())] = status;
    *at = -1;
    if (!WIFSIGNALED(status)) continue;
    ::usleep(static_cast<useconds_t>(grace_ms) * 1000);
    for (const pid_t other : children)
      if (other > 0) ::kill(other, SIGKILL);
  }
  ::munmap(shared, sizeof(ProcessGroup));
  return statuses;
}

}  // namespace sluice
