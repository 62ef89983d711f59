// GPU memory over NCCL, which is used only to move bytes. The host communicator connects the ranks; every
// operation is monitored and aborted if NCCL reports an error or it exceeds the time limit.
#if defined(SLUICE_HAS_NCCL)
#include <nccl.h>  // before the emulator redefines CUDA names
#endif

#include <chrono>
#include <exception>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "device/communicator.h"

namespace sluice::cuda {

#if defined(SLUICE_HAS_NCCL)
namespace {

class Nccl : public OverHost {
 public:
  Nccl(Communicator& inner, Context& ctx, double timeout_seconds)
      : OverHost(inner, ctx), timeout_(timeout_seconds) {
    part_of(&inner);
    connect();
  }
  /// A communicator split from another one, with the split host communicator.
  Nccl(std::unique_ptr<Communicator> inner, Context& ctx, double timeout_seconds)
      : OverHost(std::move(inner), ctx), timeout_(timeout_seconds) {
    connect();
  }
  ~Nccl() override {
    if (done_) cudaEventDestroy(done_);
    if (!comm_) return;
    // Other ranks may never enter the current operation.
    if (failed_ || std::uncaught_exceptions() > 0)
      ncclCommAbort(comm_);
    else
      ncclCommDestroy(comm_);
  }
  std::string name() const override { return "nccl"; }

 protected:
  void do_broadcast(void* data, int64_t bytes, int root) override {
    if (alone() || bytes == 0) return;
    run("broadcast", [&] {
      return ncclBroadcast(data, data, static_cast<size_t>(bytes), ncclInt8, root, comm_, stream(ctx_));
    });
  }
  void do_all_gather(void* all, const void* mine, int64_t bytes) override {
    if (alone()) return copy_here(all, mine, bytes);
    if (bytes > 0)
      run("all_gather", [&] {
        return ncclAllGather(mine, all, static_cast<size_t>(bytes), ncclInt8, comm_, stream(ctx_));
      });
  }
  void do_all_to_all_v(void* received, const int64_t* received_bytes, const void* sent,
                       const int64_t* sent_bytes) override {
    SLUICE_CHECK(sent_bytes[rank()] == received_bytes[rank()],
                 "all_to_all_v: rank {} sends {} bytes to itself, expects {}", rank(), sent_bytes[rank()],
                 received_bytes[rank()]);
    auto* to = static_cast<char*>(received);
    const auto* from = static_cast<const char*>(sent);
    if (alone()) return copy_here(to, from, sent_bytes[0]);
    run("all_to_all", [&] {
      ncclResult_t result = ncclGroupStart();
      for (int r = 0; r < size(); ++r) {
        if (r == rank())
          copy_on_device(ctx_, to, from, sent_bytes[r]);
        else
          keep_first(result, sent_bytes[r] > 0 ? ncclSend(from, static_cast<size_t>(sent_bytes[r]), ncclInt8,
                                                          r, comm_, stream(ctx_))
                                               : ncclSuccess);
        if (r != rank() && received_bytes[r] > 0)
          keep_first(result,
                     ncclRecv(to, static_cast<size_t>(received_bytes[r]), ncclInt8, r, comm_, stream(ctx_)));
        from += sent_bytes[r];
        to += received_bytes[r];
      }
      keep_first(result, ncclGroupEnd());
      return result;
    });
  }
  void do_send(const void* data, int64_t bytes, int to) override {
    if (bytes > 0)
      run("send",
          [&] { return ncclSend(data, static_cast<size_t>(bytes), ncclInt8, to, comm_, stream(ctx_)); });
  }
  void do_receive(void* data, int64_t bytes, int from) override {
    if (bytes > 0)
      run("receive",
          [&] { return ncclRecv(data, static_cast<size_t>(bytes), ncclInt8, from, comm_, stream(ctx_)); });
  }
  std::unique_ptr<Communicator> do_split(int colour, int key) override {
    return std::make_unique<Nccl>(inner_.split(colour, key), ctx_, timeout_);
  }
  std::unique_ptr<Communicator> do_axis(int stride, int axis_size) override {
    return std::make_unique<Nccl>(inner_.axis(stride, axis_size), ctx_, timeout_);
  }

 private:
  using Clock = std::chrono::steady_clock;

  void connect() {
    if (alone()) return;
    check(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    ncclUniqueId id{};
    ncclResult_t got = ncclSuccess;
    if (rank() == 0) got = ncclGetUniqueId(&id);
    inner_.broadcast(&id, sizeof id, 0);
    demand("ncclGetUniqueId", got);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    begin();
    settle("ncclCommInitRankConfig", ncclCommInitRankConfig(&comm_, size(), id, rank(), &config));
  }

  static void keep_first(ncclResult_t& result, ncclResult_t next) {
    if (result == ncclSuccess || result == ncclInProgress) result = next;
  }

  void begin() { began_ = Clock::now(); }

  /// Enqueues an operation and waits until the GPU has completed it.
  template <class Enqueue>
  void run(const char* operation, Enqueue&& enqueue) {
    SLUICE_CHECK(!failed_, "nccl: {} after a failure", operation);
    begin();
    settle(operation, enqueue());
    check(cudaEventRecord(done_, stream(ctx_)), "cudaEventRecord", "ranks");
    for (;;) {
      const cudaError_t now = cudaEventQuery(done_);
      if (now == cudaSuccess) return;
      if (now != cudaErrorNotReady) check(now, "cudaEventQuery", operation);
      cudaGetLastError();
      ncclResult_t state = ncclSuccess;
      demand(operation, ncclCommGetAsyncError(comm_, &state));
      if (state != ncclSuccess && state != ncclInProgress) demand(operation, state);
      rest(operation);
    }
  }

  /// A call to a non-blocking communicator, which returns immediately and completes later.
  void settle(const char* call, ncclResult_t result) {
    while (result == ncclInProgress) {
      rest(call);
      demand(call, ncclCommGetAsyncError(comm_, &result));
    }
    demand(call, result);
  }

  /// Pauses briefly, longer each time.
  void rest(const char* operation) {
    const double waited = std::chrono::duration<double>(Clock::now() - began_).count();
    if (timeout_ > 0 && waited > timeout_)
      give_up(
          fmt::format("nccl: {} took more than {} s on rank {} of {}", operation, timeout_, rank(), size()));
    std::this_thread::sleep_for(std::chrono::microseconds(waited < 0.01 ? 5 : 200));
  }

  void demand(const char* call, ncclResult_t result) {
    if (result == ncclSuccess) return;
    const std::string_view more = comm_ ? ncclGetLastError(comm_) : "";
    give_up(fmt::format("nccl: {} on rank {} of {}: {}{}{}", call, rank(), size(), ncclGetErrorString(result),
                        more.empty() ? "" : ": ", more));
  }

  [[noreturn]] void give_up(const std::string& why) {
    failed_ = true;
    if (comm_)
      ncclCommAbort(std::exchange(comm_, nullptr));  // aborts the current operation and frees the stream
    fail(ExitCode::hang, "{}", why);
  }

  double timeout_;
  ncclComm_t comm_ = nullptr;
  cudaEvent_t done_ = nullptr;
  Clock::time_point began_;
  bool failed_ = false;
};

}  // namespace

bool built_with_nccl() { return true; }

std::unique_ptr<Communicator> make_nccl(Communicator& inner, Context& ctx, double timeout_seconds) {
  return std::make_unique<Nccl>(inner, ctx, timeout_seconds);
}

std::string nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "";
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

#else

bool built_with_nccl() { return false; }
std::unique_ptr<Communicator> make_nccl(Communicator&, Context&, double) {
  fail(ExitCode::internal, "make_nccl: not in this build");
}
std::string nccl_version() { return ""; }

#endif

}  // namespace sluice::cuda
