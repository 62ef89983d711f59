#pragma once
// Ranks that work together. A communicator moves bytes and never adds: sums are made of moves and this
// house's own additions in a fixed order (comm/reduce.h), so that no result depends on the algorithm of a
// library, or on how many ranks there are.
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "core/error.h"

namespace sluice {

/// What a rank is doing, for a watchdog in another thread: written by every operation, read without a lock.
struct CommProgress {
  std::atomic<int64_t> sequence{0};             // operations begun
  std::atomic<const char*> operation{nullptr};  // the one going on; null between two
  std::atomic<int64_t> bytes{0};                // that this rank sends in it
  std::atomic<int64_t> since_ns{0};             // steady clock, of its beginning
  std::atomic<int64_t> total_ns{0};  // spent in operations that have ended, of those split off it too
};

/// The one virtual interface. Every rank calls the same operations in the same order, from one thread at a
/// time; each returns when this rank's buffers may be used again. Memory is the host's, but with
/// comm/device.h a GPU's. Sizes are bytes, up to 2^63. A peer that dies or calls something else is
/// Error(hang) where it can be known, and a watchdog's business where it cannot.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string name() const = 0;  // "local", "threads", "mpi", "nccl"

  void barrier();
  /// data of root to all.
  void broadcast(void* data, int64_t bytes, int root);
  /// all (size x bytes) = every rank's mine (bytes), in rank order. mine may be its place in all.
  void all_gather(void* all, const void* mine, int64_t bytes);
  /// Part r of sent (size x bytes) goes to rank r; part r of received comes from it. The buffers do not
  /// overlap.
  void all_to_all(void* received, const void* sent, int64_t bytes);
  /// The same with parts of any size: `*_bytes` (size) of each, behind each other. What r sends here is what
  /// is received.
  void all_to_all_v(void* received, const int64_t* received_bytes, const void* sent,
                    const int64_t* sent_bytes);
  void send(const void* data, int64_t bytes, int to);
  void receive(void* data, int64_t bytes, int from);

  /// Those of equal colour, ordered by key, then rank. Collective; the parent outlives it.
  std::unique_ptr<Communicator> split(int colour, int key);
  /// The `size` ranks, this one among them, whose numbers differ by multiples of `stride` on one axis of a
  /// mesh: rank / stride % size is the place on it. Collective like split; stride x size divides the number
  /// of ranks.
  std::unique_ptr<Communicator> axis(int stride, int size);
  /// Ends all ranks at once, with this exit code: called once, after the error was printed.
  [[noreturn]] virtual void abort(ExitCode code) = 0;

  const CommProgress& progress() const { return progress_; }

 protected:
  /// What this one does shows in the progress of another, too, from which it was made.
  void part_of(Communicator* parent) { parent_ = parent; }

  virtual void do_barrier() = 0;
  virtual void do_broadcast(void* data, int64_t bytes, int root) = 0;
  virtual void do_all_gather(void* all, const void* mine, int64_t bytes) = 0;
  virtual void do_all_to_all_v(void* received, const int64_t* received_bytes, const void* sent,
                               const int64_t* sent_bytes) = 0;
  virtual void do_send(const void* data, int64_t bytes, int to) = 0;
  virtual void do_receive(void* data, int64_t bytes, int from) = 0;
  virtual std::unique_ptr<Communicator> do_split(int colour, int key) = 0;
  virtual std::unique_ptr<Communicator> do_axis(int stride, int size);

 private:
  class Operation;
  CommProgress progress_;
  Communicator* parent_ = nullptr;  // that it was split off
};

/// One rank alone: every operation is a copy, or nothing.
std::unique_ptr<Communicator> make_local_communicator();

/// One of `size` ranks that are not there: for dry runs, which ask how many there are and move nothing. Only
/// axis() works, and gives another such; everything else is an error of the program.
std::unique_ptr<Communicator> make_dry_communicator(int rank, int size);

}  // namespace sluice
