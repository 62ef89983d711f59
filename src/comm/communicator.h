#pragma once
// Communication between ranks. A communicator moves bytes and never reduces: sums combine these moves with
// Sluice's own additions in a deterministic order (comm/reduce.h), so that no result depends on a library's
// reduction algorithm.
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "core/error.h"

namespace sluice {

/// The current operation of a rank, for a watchdog in another thread. Written by every operation, read
/// without a lock.
struct CommProgress {
  std::atomic<int64_t> sequence{0};             // operations started
  std::atomic<const char*> operation{nullptr};  // the current one; null between operations
  std::atomic<int64_t> bytes{0};                // sent by this rank in it
  std::atomic<int64_t> since_ns{0};             // its start, on the steady clock
  std::atomic<int64_t> total_ns{
      0};  // time in completed operations, including those of communicators split from this one
};

/// The communicator interface. Every rank calls the same operations in the same order, from one thread at a
/// time; each returns when this rank's buffers may be reused. Memory is on the host, or on a GPU with
/// comm/device.h. Sizes are in bytes, up to 2^63. A peer that dies or calls another operation causes
/// Error(hang) if this can be detected; otherwise a watchdog has to find it.
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
  /// Copies root's data to all ranks.
  void broadcast(void* data, int64_t bytes, int root);
  /// All-gather: all (size x bytes) = every rank's mine (bytes), in rank order. mine may be its own part of
  /// all.
  void all_gather(void* all, const void* mine, int64_t bytes);
  /// All-to-all: part r of sent (size x bytes) goes to rank r; part r of received comes from rank r. The
  /// buffers must not overlap.
  void all_to_all(void* received, const void* sent, int64_t bytes);
  /// The same with consecutive parts of any size, given by `*_bytes` (size). The sizes that two ranks state
  /// for the same part must agree.
  void all_to_all_v(void* received, const int64_t* received_bytes, const void* sent,
                    const int64_t* sent_bytes);
  void send(const void* data, int64_t bytes, int to);
  void receive(void* data, int64_t bytes, int from);

  /// Splits off the ranks of equal colour, ordered by key, then rank. Collective; the parent must outlive the
  /// result.
  std::unique_ptr<Communicator> split(int colour, int key);
  /// The communicator along one axis of a mesh: the `size` ranks, including this one, that differ by
  /// multiples of `stride`; rank / stride % size is the coordinate. Collective like split; stride x size must
  /// divide the number of ranks.
  std::unique_ptr<Communicator> axis(int stride, int size);
  /// Ends all ranks immediately with this exit code. Called once, after the error was printed.
  [[noreturn]] virtual void abort(ExitCode code) = 0;

  const CommProgress& progress() const { return progress_; }

 protected:
  /// Also reports the operations of this communicator in the progress of the one it was created from.
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
  Communicator* parent_ = nullptr;  // the communicator that it was split from
};

/// A single rank: every operation is a copy or does nothing.
std::unique_ptr<Communicator> make_local_communicator();

/// One of `size` ranks that do not exist, for dry runs, which need the number of ranks but move nothing. Only
/// axis() works and returns a communicator of the same kind; every other operation is Error(internal).
std::unique_ptr<Communicator> make_dry_communicator(int rank, int size);

}  // namespace sluice
