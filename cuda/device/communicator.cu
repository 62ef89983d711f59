// GPU memory over a host communicator, in pieces through pinned memory, and the choice of the transport.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "device/communicator.h"

namespace sluice::cuda {
namespace {

constexpr int64_t kBufferBytes = int64_t{8} << 20;

/// Pinned memory of a communicator and the communicators split from it, for data to send and data received.
struct Buffers {
  char *leaving = nullptr, *came = nullptr;
  Buffers() {
    for (char** p : {&leaving, &came})
      check(cudaMallocHost(reinterpret_cast<void**>(p), kBufferBytes), "cudaMallocHost", "ranks");
  }
  ~Buffers() {
    cudaFreeHost(leaving);
    cudaFreeHost(came);
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
};

/// The parts of the ranks are consecutive in a buffer, so that each rank's piece is the buffer size divided
/// by the number of ranks.
class Staged : public OverHost {
 public:
  Staged(Communicator& inner, Context& ctx) : OverHost(inner, ctx), buffers_(std::make_shared<Buffers>()) {}
  Staged(std::unique_ptr<Communicator> inner, const Staged& whole)
      : OverHost(std::move(inner), whole.ctx_), buffers_(whole.buffers_) {}
  std::string name() const override { return "host " + inner_.name(); }

 protected:
  void do_broadcast(void* data, int64_t bytes, int root) override {
    for_each_piece(bytes, kBufferBytes, [&](int64_t at, int64_t n) {
      if (rank() == root) fetch(leaving(), static_cast<char*>(data) + at, n);
      inner_.broadcast(leaving(), n, root);
      if (rank() != root) bring(static_cast<char*>(data) + at, leaving(), n);
    });
  }
  void do_all_gather(void* all, const void* mine, int64_t bytes) override {
    if (alone()) return copy_here(all, mine, bytes);
    for_each_piece(bytes, piece(), [&](int64_t at, int64_t n) {
      fetch(leaving(), static_cast<const char*>(mine) + at, n);
      inner_.all_gather(came(), leaving(), n);
      for (int r = 0; r < size(); ++r) send_down(static_cast<char*>(all) + r * bytes + at, came() + r * n, n);
      settle();
    });
  }
  void do_all_to_all_v(void* received, const int64_t* received_bytes, const void* sent,
                       const int64_t* sent_bytes) override {
    const auto ranks = static_cast<size_t>(size());
    if (alone()) return copy_here(received, sent, sent_bytes[0]);
    // All ranks take as many rounds as the largest part of any rank needs.
    int64_t largest = 0;
    for (size_t r = 0; r < ranks; ++r) largest = std::max({largest, sent_bytes[r], received_bytes[r]});
    std::vector<int64_t> of_all(ranks), out(ranks), in(ranks);
    inner_.all_gather(of_all.data(), &largest, sizeof largest);
    largest = *std::max_element(of_all.begin(), of_all.end());
    for_each_piece(largest, piece(), [&](int64_t at, int64_t n) {
      const auto each = [&](std::vector<int64_t>& here, const int64_t* bytes, auto&& move) {
        int64_t whole = 0, staged = 0;
        for (size_t r = 0; r < ranks; ++r) {
          here[r] = std::clamp<int64_t>(bytes[r] - at, 0, n);
          if (here[r] > 0) move(whole + at, staged, here[r]);
          whole += bytes[r];
          staged += here[r];
        }
      };
      each(out, sent_bytes, [&](int64_t from, int64_t to, int64_t count) {
        lift(leaving() + to, static_cast<const char*>(sent) + from, count);
      });
      settle();
      // inner detects sizes that do not match.
      each(in, received_bytes, [](int64_t, int64_t, int64_t) {});
      inner_.all_to_all_v(came(), in.data(), leaving(), out.data());
      each(in, received_bytes, [&](int64_t to, int64_t from, int64_t count) {
        send_down(static_cast<char*>(received) + to, came() + from, count);
      });
      settle();
    });
  }
  void do_send(const void* data, int64_t bytes, int to) override {
    for_each_piece(bytes, kBufferBytes, [&](int64_t at, int64_t n) {
      fetch(leaving(), static_cast<const char*>(data) + at, n);
      inner_.send(leaving(), n, to);
    });
  }
  void do_receive(void* data, int64_t bytes, int from) override {
    for_each_piece(bytes, kBufferBytes, [&](int64_t at, int64_t n) {
      inner_.receive(came(), n, from);
      bring(static_cast<char*>(data) + at, came(), n);
    });
  }
  std::unique_ptr<Communicator> do_split(int colour, int key) override {
    return std::make_unique<Staged>(inner_.split(colour, key), *this);
  }
  std::unique_ptr<Communicator> do_axis(int stride, int axis_size) override {
    return std::make_unique<Staged>(inner_.axis(stride, axis_size), *this);
  }

 private:
  char* leaving() const { return buffers_->leaving; }
  char* came() const { return buffers_->came; }
  /// Bytes of one rank's part per round.
  int64_t piece() const { return std::max<int64_t>(kBufferBytes / size() / 256 * 256, 1); }

  /// Calls body(at, n) over [0, bytes), at least once, because an operation of zero bytes is also an
  /// operation.
  template <class Body>
  static void for_each_piece(int64_t bytes, int64_t most, Body&& body) {
    for (int64_t at = 0; at < bytes || at == 0; at += most) body(at, std::min(most, bytes - at));
  }

  void lift(char* to, const char* from, int64_t n) { move(to, from, n, cudaMemcpyDeviceToHost); }
  void send_down(char* to, const char* from, int64_t n) { move(to, from, n, cudaMemcpyHostToDevice); }
  void fetch(char* to, const char* from, int64_t n) {
    lift(to, from, n);
    settle();
  }
  void bring(char* to, const char* from, int64_t n) {
    send_down(to, from, n);
    settle();
  }
  void move(char* to, const char* from, int64_t n, cudaMemcpyKind kind) {
    if (n > 0)
      check(cudaMemcpyAsync(to, from, static_cast<size_t>(n), kind, stream(ctx_)), "cudaMemcpyAsync",
            "ranks");
  }
  void settle() { check(cudaStreamSynchronize(stream(ctx_)), "cudaStreamSynchronize", "ranks"); }

  std::shared_ptr<Buffers> buffers_;
};

/// Whether every rank has its own GPU.
bool cards_apart(Communicator& ranks) {
  constexpr size_t kBytes = 16;
  int device = 0;
  cudaDeviceProp properties;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  std::array<char, kBytes> mine;
  std::memcpy(mine.data(), &properties.uuid, kBytes);
  std::vector<std::array<char, kBytes>> all(static_cast<size_t>(ranks.size()));
  ranks.all_gather(all.data(), mine.data(), kBytes);
  std::sort(all.begin(), all.end());
  return std::adjacent_find(all.begin(), all.end()) == all.end();
}

}  // namespace

void copy_on_device(Context& ctx, void* to, const void* from, int64_t bytes) {
  if (to == from || bytes == 0) return;
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream(ctx)),
        "cudaMemcpyAsync", "ranks");
}

void OverHost::copy_here(void* to, const void* from, int64_t bytes) {
  copy_on_device(ctx_, to, from, bytes);
  check(cudaStreamSynchronize(stream(ctx_)), "cudaStreamSynchronize", "ranks");
}

std::unique_ptr<Communicator> make_device_communicator(Communicator& inner, Context& ctx,
                                                       const DeviceRanksOptions& options) {
  const bool asked = options.transport == DeviceTransport::nccl;
  if (asked && !built_with_nccl())
    fail(ExitCode::usage,
         "parallel.transport: nccl is not in this build (no nccl.h beside the CUDA toolkit); use auto or "
         "host");
  const bool possible = options.transport != DeviceTransport::host && built_with_nccl() && cards_apart(inner);
#if !defined(SLUICE_EMULATION)
  if (asked && !possible)
    fail(ExitCode::usage,
         "parallel.transport: nccl needs a GPU for every rank, but some of the {} ranks share one; use auto "
         "or "
         "host",
         inner.size());
#endif
  if (asked || possible) return make_nccl(inner, ctx, options.timeout_seconds);
  return std::make_unique<Staged>(inner, ctx);
}

}  // namespace sluice::cuda
