#include "comm/communicator.h"

#include <chrono>
#include <vector>

namespace sluice {

class Communicator::Operation {
 public:
  Operation(Communicator& ranks, const char* name, int64_t bytes) : ranks_(ranks) {
    // The parent communicator is marked busy too, because a watchdog observes only the world.
    for (Communicator* c = &ranks; c; c = c->parent_) {
      CommProgress& progress = c->progress_;
      progress.since_ns = now();
      progress.bytes = bytes;
      progress.operation = name;
      ++progress.sequence;
    }
  }
  ~Operation() {
    const int64_t ns = now() - ranks_.progress_.since_ns;
    for (Communicator* c = &ranks_; c; c = c->parent_) {
      c->progress_.operation = nullptr;
      c->progress_.total_ns += ns;
    }
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

 private:
  static int64_t now() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  }

  Communicator& ranks_;
};

namespace {

void check_bytes(const char* op, int64_t bytes) { SLUICE_CHECK(bytes >= 0, "{}: {} bytes", op, bytes); }

void check_rank(const char* op, int rank, int size) {
  SLUICE_CHECK(rank >= 0 && rank < size, "{}: rank {} of {}", op, rank, size);
}

}  // namespace

void Communicator::barrier() {
  const Operation operation(*this, "barrier", 0);
  do_barrier();
}

void Communicator::broadcast(void* data, int64_t bytes, int root) {
  check_bytes("broadcast", bytes);
  check_rank("broadcast", root, size());
  const Operation operation(*this, "broadcast", rank() == root ? bytes : 0);
  do_broadcast(data, bytes, root);
}

void Communicator::all_gather(void* all, const void* mine, int64_t bytes) {
  check_bytes("all_gather", bytes);
  const Operation operation(*this, "all_gather", bytes);
  do_all_gather(all, mine, bytes);
}

void Communicator::all_to_all(void* received, const void* sent, int64_t bytes) {
  check_bytes("all_to_all", bytes);
  const Operation operation(*this, "all_to_all", bytes * size());
  const std::vector<int64_t> parts(static_cast<size_t>(size()), bytes);
  do_all_to_all_v(received, parts.data(), sent, parts.data());
}

void Communicator::all_to_all_v(void* received, const int64_t* received_bytes, const void* sent,
                                const int64_t* sent_bytes) {
  int64_t total = 0;
  for (int r = 0; r < size(); ++r) {
    check_bytes("all_to_all_v", received_bytes[r]);
    check_bytes("all_to_all_v", sent_bytes[r]);
    total += sent_bytes[r];
  }
  const Operation operation(*this, "all_to_all_v", total);
  do_all_to_all_v(received, received_bytes, sent, sent_bytes);
}

void Communicator::send(const void* data, int64_t bytes, int to) {
  check_bytes("send", bytes);
  check_rank("send", to, size());
  SLUICE_CHECK(to != rank(), "send: to itself");
  const Operation operation(*this, "send", bytes);
  do_send(data, bytes, to);
}

void Communicator::receive(void* data, int64_t bytes, int from) {
  check_bytes("receive", bytes);
  check_rank("receive", from, size());
  SLUICE_CHECK(from != rank(), "receive: from itself");
  const Operation operation(*this, "receive", 0);
  do_receive(data, bytes, from);
}

std::unique_ptr<Communicator> Communicator::split(int colour, int key) {
  const Operation operation(*this, "split", 0);
  std::unique_ptr<Communicator> part = do_split(colour, key);
  part->parent_ = this;
  return part;
}

std::unique_ptr<Communicator> Communicator::axis(int stride, int size) {
  SLUICE_CHECK(stride > 0 && size > 0 && this->size() % (stride * size) == 0,
               "axis: {} ranks, {} apart, of {}", size, stride, this->size());
  return do_axis(stride, size);
}

std::unique_ptr<Communicator> Communicator::do_axis(int stride, int size) {
  return split(rank() - rank() / stride % size * stride, rank());
}

}  // namespace sluice
