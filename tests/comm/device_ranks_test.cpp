// Communicators for GPU memory pass the tests of those for host memory, through pinned memory and over NCCL
// (in emulation, a fake one).
#include <catch2/catch.hpp>
#include <cstring>
#include <numeric>
#include <utility>

#include "comm/conformance.h"
#include "comm/device.h"
#include "comm/threads.h"
#include "core/context.h"
#include "support/gpu.h"
#if defined(SLUICE_EMULATION)
#include "fake_nccl.h"
#endif

namespace sluice::test {
namespace {

std::vector<DeviceTransport> transports() {
  if (threads_have_nccl()) return {DeviceTransport::host, DeviceTransport::nccl};
  return {DeviceTransport::host};
}

/// Uses a communicator for device memory with host buffers, which are copied to the device and back.
class ThroughDevice : public Communicator {
 public:
  ThroughDevice(std::unique_ptr<Communicator> device, Context& ctx) : device_(std::move(device)), ctx_(ctx) {}
  int rank() const override { return device_->rank(); }
  int size() const override { return device_->size(); }
  std::string name() const override { return device_->name(); }
  [[noreturn]] void abort(ExitCode code) override { fail(code, "aborts"); }

 protected:
  void do_barrier() override { device_->barrier(); }
  void do_broadcast(void* data, int64_t bytes, int root) override {
    const Buffer buffer(ctx_, bytes);
    if (rank() == root) buffer.fill(data);
    device_->broadcast(buffer.data(), bytes, root);
    buffer.read(data);
  }
  void do_all_gather(void* all, const void* mine, int64_t bytes) override {
    const Buffer buffer(ctx_, bytes * size()), part(ctx_, bytes);
    const bool in_place = mine == static_cast<char*>(all) + rank() * bytes;
    if (in_place)
      buffer.fill(all);
    else
      part.fill(mine);
    device_->all_gather(buffer.data(), in_place ? buffer.data() + rank() * bytes : part.data(), bytes);
    buffer.read(all);
  }
  void do_all_to_all_v(void* received, const int64_t* received_bytes, const void* sent,
                       const int64_t* sent_bytes) override {
    const Buffer in(ctx_, std::accumulate(received_bytes, received_bytes + size(), int64_t{0})),
        out(ctx_, std::accumulate(sent_bytes, sent_bytes + size(), int64_t{0}));
    out.fill(sent);
    device_->all_to_all_v(in.data(), received_bytes, out.data(), sent_bytes);
    in.read(received);
  }
  void do_send(const void* data, int64_t bytes, int to) override {
    const Buffer buffer(ctx_, bytes);
    buffer.fill(data);
    device_->send(buffer.data(), bytes, to);
  }
  void do_receive(void* data, int64_t bytes, int from) override {
    const Buffer buffer(ctx_, bytes);
    device_->receive(buffer.data(), bytes, from);
    buffer.read(data);
  }
  std::unique_ptr<Communicator> do_split(int colour, int key) override {
    return std::make_unique<ThroughDevice>(device_->split(colour, key), ctx_);
  }

 private:
  class Buffer {
   public:
    Buffer(Context& ctx, int64_t bytes)
        : ctx_(ctx), arena_("buffer", (bytes + 256) / 256 * 256, Device::cuda) {
      if (bytes > 0) all_ = arena_.alloc("buffer", DType::u8, {bytes});
    }
    char* data() const { return static_cast<char*>(all_.data); }
    void fill(const void* host) const {
      if (all_) write_tensor(ctx_, all_, host);
    }
    void read(void* host) const {
      if (all_) read_tensor(ctx_, host, all_);
    }

   private:
    Context& ctx_;
    mutable Arena arena_;
    Tensor all_;
  };

  std::unique_ptr<Communicator> device_;
  Context& ctx_;
};

#if defined(SLUICE_EMULATION)
/// Runs each of this many ranks with a context.
void with_device_ranks(int size, const DeviceRanksOptions& options,
                       const std::function<void(Communicator&, Context&)>& body) {
  run_thread_ranks(size, [&](Communicator& host) {
    Context ctx(64, Device::cuda);
    const auto device = make_device_communicator(host, ctx, options);
    body(*device, ctx);
  });
}
#endif

}  // namespace

TEST_CASE("communicators for GPU memory pass the conformance tests", "[device_ranks]") {
  if (no_device()) return;
  for (const DeviceTransport transport : transports())
    for (const int ranks : {1, 2, 3, 4})
      run_thread_ranks(ranks, [&](Communicator& host) {
        Context ctx(64, Device::cuda);
        ThroughDevice c(make_device_communicator(host, ctx, {.transport = transport}), ctx);
        check_communicator(c);
        if (host.size() > 1 && host.progress().sequence == 0)
          throw std::runtime_error("a watchdog of the host's ranks would see nothing");
      });
}

TEST_CASE("messages larger than the pinned buffers are sent in pieces", "[device_ranks]") {
  if (no_device()) return;
  for (const DeviceTransport transport : transports())
    run_thread_ranks(3, [&](Communicator& host) {
      Context ctx(64, Device::cuda);
      ThroughDevice c(make_device_communicator(host, ctx, {.transport = transport}), ctx);
      const int me = c.rank(), R = c.size();
      // Rank a sends (a + 2 b) x 1.1 MB and a few bytes to b: up to three pieces of a third of 8 MiB.
      const auto count = [](int from, int to) { return int64_t{(from + 2 * to)} * 1'100'003 + from; };
      std::vector<int64_t> out, in;
      for (int r = 0; r < R; ++r) {
        out.push_back(count(me, r));
        in.push_back(count(r, me));
      }
      const auto byte = [](int from, int to, int64_t i) {
        return static_cast<char>(from * 31 + to * 17 + i * 7 + (i >> 9));
      };
      std::string sent, received(static_cast<size_t>(std::accumulate(in.begin(), in.end(), int64_t{0})), '?');
      for (int r = 0; r < R; ++r)
        for (int64_t i = 0; i < count(me, r); ++i) sent.push_back(byte(me, r, i));
      c.all_to_all_v(received.data(), in.data(), sent.data(), out.data());
      size_t at = 0;
      for (int r = 0; r < R; ++r)
        for (int64_t i = 0; i < count(r, me); ++i)
          if (received[at++] != byte(r, me, i)) throw std::runtime_error("a byte came wrong");
      std::string all(3 * 9'000'001, '?'), mine(9'000'001, static_cast<char>('a' + me));
      c.all_gather(all.data(), mine.data(), std::ssize(mine));
      for (int r = 0; r < R; ++r)
        if (all.compare(static_cast<size_t>(r) * mine.size(), mine.size(),
                        std::string(mine.size(), static_cast<char>('a' + r))) != 0)
          throw std::runtime_error("a part came wrong");
      c.broadcast(mine.data(), std::ssize(mine), 1);
      if (mine != std::string(mine.size(), 'b')) throw std::runtime_error("a broadcast came wrong");
    });
}

TEST_CASE("NCCL failures, mismatched sizes and missing peers end with an error that names the operation",
          "[device_ranks]") {
#if defined(SLUICE_EMULATION)
  if (nccl_version().empty()) return;
  const auto message = [](int ranks, double timeout,
                          const std::function<void(Communicator&, void*)>& body) -> std::string {
    try {
      with_device_ranks(ranks, {.transport = DeviceTransport::nccl, .timeout_seconds = timeout},
                        [&](Communicator& c, Context& ctx) {
                          (void)ctx;
                          Arena arena("memory", 4096, Device::cuda);
                          body(c, arena.alloc("memory", DType::u8, {4096}).data);
                        });
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::hang);
      return error.what();
    }
    return "nothing";
  };
  CHECK_THAT(message(2, 0.2,
                     [](Communicator& c, void* p) {
                       if (c.rank() == 0) c.broadcast(p, 64, 1);
                     }),
             Catch::Contains("nccl: broadcast took more than 0.2 s on rank 0 of 2"));
  CHECK_THAT(
      message(2, 5, [](Communicator& c, void* p) { c.rank() == 0 ? c.send(p, 64, 1) : c.receive(p, 65, 0); }),
      Catch::Contains(
          "nccl: receive on rank 1 of 2: invalid usage: a message of 64 bytes where 65 were expected"));
  emu::fail_nccl_on(1);
  const std::string failed =
      message(3, 5, [](Communicator& c, void* p) { c.all_gather(p, static_cast<char*>(p) + 2048, 16); });
  emu::fail_nccl_on(-1);
  CHECK_THAT(failed, Catch::Contains("nccl: all_gather on rank 1 of 3: remote process exited or there was a "
                                     "network error: a planted failure"));
#endif
}

}  // namespace sluice::test
