#include "comm/communicator.h"

#include <chrono>
#include <vector>

namespace sluice {

class Communicator::Operation {
 public:
  Operation(CommProgress& progress, const char* name, int64_t bytes) : progress_(progress) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    progress.since_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    progress.bytes = bytes;
    progress.operation = name;
    ++progress.sequence;
  }
  ~Operation() { progress_.operation = nullptr; }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

 private:
  CommProgress& progress_;
};

namespace {

void check_bytes(const char* op, int64_t bytes) { SLUICE_CHECK(bytes >= 0, "{}: {} bytes", op, bytes); }

void check_rank(const char* op, int rank, int size) {
  SLUICE_CHECK(rank >= 0 && rank < size, "{}: rank {} of {}", op, rank, size);
}

}  // namespace

void Communicator::barrier() {
  const Operation operation(progress_, "barrier", 0);
  do_barrier();
}

void Communicator::broadcast(void* data, int64_t bytes, int root) {
  check_bytes("broadcast", bytes);
  check_rank("broadcast", root, size());
  const Operation operation(progress_, "broadcast", rank() == root ? bytes : 0);
  do_broadcast(data, bytes, root);
}

void Communicator::all_gather(void* all, const void* mine, int64_t bytes) {
  check_bytes("all_gather", bytes);
  const Operation operation(progress_, "all_gather", bytes);
  do_all_gather(all, mine, bytes);
}

void Communicator::all_to_all(void* received, const void* sent, int64_t bytes) {
  check_bytes("all_to_all", bytes);
  const Operation operation(progress_, "all_to_all", bytes * size());
  const std::vector<int64_t> parts(static_cast<size_t>(size()), bytes);
  do_all_to_all_v(received, parts.data(), sent, parts.data());
}

void Communicator::all_to_all_v(void* received, const int64_t* received_bytes, const void* sent, const int64_t* sent_bytes) {
  int64_t total = 0;
  for (int r = 0; r < size(); ++r) {
    check_bytes("all_to_all_v", received_bytes[r]);
    check_bytes("all_to_all_v", sent_bytes[r]);
    total += sent_bytes[r];
  }
  const Operation operation(progress_, "all_to_all_v", total);
  do_all_to_all_v(received, received_bytes, sent, sent_bytes);
}

void Communicator::send(const void* data, int64_t bytes, int to) {
  check_bytes("send", bytes);
  check_rank("send", to, size());
  SLUICE_CHECK(to != rank(), "send: to itself");
  const Operation operation(progress_, "send", bytes);
  do_send(data, bytes, to);
}

void Communicator::receive(void* data, int64_t bytes, int from) {
  check_bytes("receive", bytes);
  check_rank("receive", from, size());
  SLUICE_CHECK(from != rank(), "receive: from itself");
  const Operation operation(progress_, "receive", 0);
  do_receive(data, bytes, from);
}

std::unique_ptr<Communicator> Communicator::split(int colour, int key) {
  const Operation operation(progress_, "split", 0);
  return do_split(colour, key);
}

}  // namespace sluice
