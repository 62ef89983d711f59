// Streams, memory and errors: uses of the CUDA runtime other than kernels.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "common/state.h"
#include "core/device.h"

#if !defined(SLUICE_EMULATION)
#include <nvtx3/nvToolsExt.h>
#endif

namespace sluice::cuda {

#if defined(SLUICE_EMULATION)
constexpr bool kEmulated = true;
#else
constexpr bool kEmulated = false;
#endif

void check(cudaError_t error, const char* call, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears an ordinary error, which is reported once; a sticky one remains
  fail(error == cudaErrorMemoryAllocation ? ExitCode::out_of_memory : ExitCode::internal, "{}{}{}{}: {}: {}",
       call, *what ? "(" : "", what, *what ? ")" : "", cudaGetErrorName(error), cudaGetErrorString(error));
}

void check_storage(const char* op, const Tensor& t) {
  if (t.dtype == DType::f64) fail(ExitCode::usage, "{}: f64 runs on the CPU only", op);
  SLUICE_CHECK(t.dtype == DType::f32 || t.dtype == DType::bf16, "{}: {} must be f32 or bf16, got {}", op,
               t.name, t.describe());
}

/// SLUICE_MULTIPROCESSORS, or all: persistent kernels launch a block for each, so that few of them give every
/// block several tiles even where a test is small.
static int fewer_multiprocessors(int all) {
  const char* const wanted = std::getenv("SLUICE_MULTIPROCESSORS");
  if (!wanted || !*wanted) return all;
  const int count = std::atoi(wanted);
  if (count < 1 || count > all)
    fail(ExitCode::usage, "SLUICE_MULTIPROCESSORS is '{}': a number from 1 to {} is needed", wanted, all);
  return count;
}

State::State() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  multiprocessors = fewer_multiprocessors(multiprocessors);
  compute_capability = 10 * major + minor;
  if (compute_capability < 80)
    fail(ExitCode::usage, "this GPU has compute capability {}.{}; Sluice's kernels need 8.0 or later", major,
         minor);
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  check(cudaStreamCreateWithFlags(&copy_stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  for (cudaEvent_t* event : {&prefetched, &pinned_done[0], &pinned_done[1]})
    check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  check(cudaMalloc(reinterpret_cast<void**>(&status), sizeof(KernelStatus)), "cudaMalloc", "kernel status");
  check(cudaMallocHost(reinterpret_cast<void**>(&status_host), sizeof(KernelStatus)), "cudaMallocHost",
        "kernel status");
  *status_host = {0, 0};
  check(cudaMemsetAsync(status, 0, sizeof(KernelStatus), stream), "cudaMemsetAsync", "kernel status");
}

State::~State() {
  // A failure here is a consequence of an earlier one, which was reported.
  if (stream) cudaStreamSynchronize(stream);
  profile.reset();
  cudnn.reset();
  matmul.reset();
  cudaFree(status);
  cudaFreeHost(status_host);
  for (char* p : pinned) cudaFreeHost(p);
  for (cudaEvent_t event : {prefetched, pinned_done[0], pinned_done[1]})
    if (event) cudaEventDestroy(event);
  if (copy_stream) cudaStreamDestroy(copy_stream);
  if (stream) cudaStreamDestroy(stream);
}

State& state(Context& ctx) {
  if (!ctx.backend) ctx.backend = std::make_unique<State>();
  return static_cast<State&>(*ctx.backend);
}

cudaStream_t stream(Context& ctx) { return state(ctx).stream; }
KernelStatus* kernel_status(Context& ctx) { return state(ctx).status; }
int place_number(Context& ctx, const char* name) {
  std::vector<std::string>& places = state(ctx).places;
  const auto place = static_cast<size_t>(std::find(places.begin(), places.end(), name) - places.begin());
  if (place == places.size()) places.emplace_back(name);
  return static_cast<int>(place);
}
int compute_capability(Context& ctx) { return state(ctx).compute_capability; }
int num_multiprocessors(Context& ctx) { return state(ctx).multiprocessors; }

// ---- functions called by core

std::vector<DeviceInfo> devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return {};
  }
  std::vector<DeviceInfo> result;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, i), "cudaGetDeviceProperties");
    result.push_back({.name = properties.name,
                      .memory_bytes = static_cast<int64_t>(properties.totalGlobalMem),
                      .compute_capability = 10 * properties.major + properties.minor,
                      .multiprocessors = properties.multiProcessorCount,
                      .emulated = kEmulated});
  }
  return result;
}

void choose(int index) { check(cudaSetDevice(index), "cudaSetDevice"); }

void* allocate(int64_t bytes) {
  void* p = nullptr;
  const cudaError_t error = cudaMalloc(&p, static_cast<size_t>(bytes));
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  check(error, "cudaMalloc");
  check(cudaMemset(p, 0, static_cast<size_t>(bytes)), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // other streams may use it immediately
  return p;
}

void release(void* p) noexcept { cudaFree(p); }

void* allocate_pinned(int64_t bytes) {
  void* p = nullptr;
  const cudaError_t error = cudaMallocHost(&p, static_cast<size_t>(bytes));
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  check(error, "cudaMallocHost");
  std::fill_n(static_cast<char*>(p), bytes, 0);
  return p;
}

void release_pinned(void* p) noexcept { cudaFreeHost(p); }

void copy(Context& ctx, void* dst, const void* src, int64_t bytes) {
  check(cudaMemcpyAsync(dst, src, static_cast<size_t>(bytes), cudaMemcpyDefault, stream(ctx)),
        "cudaMemcpyAsync");
}

namespace {

/// The pinned buffers of read and write, on first use.
void need_pinned(State& s) {
  for (char*& p : s.pinned)
    if (!p)
      check(cudaMallocHost(reinterpret_cast<void**>(&p), State::kPinnedBytes), "cudaMallocHost", "copies");
}

}  // namespace

void read(Context& ctx, void* host, const void* device, int64_t bytes) {
  State& s = state(ctx);
  need_pinned(s);
  char* to = static_cast<char*>(host);
  const char* from = static_cast<const char*>(device);
  const int64_t pieces = (bytes + State::kPinnedBytes - 1) / State::kPinnedBytes;
  const auto size = [&](int64_t i) {
    return static_cast<size_t>(std::min(State::kPinnedBytes, bytes - i * State::kPinnedBytes));
  };
  // The next piece is transferred while this one is copied on the host.
  for (int64_t i = 0; i <= pieces; ++i) {
    if (i < pieces) {
      check(cudaMemcpyAsync(s.pinned[i % 2], from + i * State::kPinnedBytes, size(i), cudaMemcpyDeviceToHost,
                            s.stream),
            "cudaMemcpyAsync", "read");
      check(cudaEventRecord(s.pinned_done[i % 2], s.stream), "cudaEventRecord");
    }
    if (i > 0) {
      check(cudaEventSynchronize(s.pinned_done[(i - 1) % 2]), "cudaEventSynchronize");
      std::memcpy(to + (i - 1) * State::kPinnedBytes, s.pinned[(i - 1) % 2], size(i - 1));
    }
  }
}

void write(Context& ctx, void* device, const void* host, int64_t bytes) {
  State& s = state(ctx);
  need_pinned(s);
  const char* from = static_cast<const char*>(host);
  char* to = static_cast<char*>(device);
  for (int64_t done = 0, i = 0; done < bytes; done += State::kPinnedBytes, ++i) {
    const auto size = static_cast<size_t>(std::min(State::kPinnedBytes, bytes - done));
    if (i >= 2) check(cudaEventSynchronize(s.pinned_done[i % 2]), "cudaEventSynchronize");
    std::memcpy(s.pinned[i % 2], from + done, size);
    check(cudaMemcpyAsync(to + done, s.pinned[i % 2], size, cudaMemcpyHostToDevice, s.stream),
          "cudaMemcpyAsync", "write");
    check(cudaEventRecord(s.pinned_done[i % 2], s.stream), "cudaEventRecord");
  }
  check(cudaStreamSynchronize(s.stream), "cudaStreamSynchronize");
}

void prefetch(Context& ctx, void* dst, const void* src, int64_t bytes) {
  State& s = state(ctx);
  check(cudaMemcpyAsync(dst, src, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, s.copy_stream),
        "cudaMemcpyAsync", "prefetch");
  check(cudaEventRecord(s.prefetched, s.copy_stream), "cudaEventRecord");
}

void await_prefetch(Context& ctx) {
  State& s = state(ctx);
  check(cudaStreamWaitEvent(s.stream, s.prefetched, 0), "cudaStreamWaitEvent");
}

namespace {

struct EventMark : Mark::Impl {
  cudaEvent_t event = nullptr;
  EventMark() { check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags"); }
  ~EventMark() override { cudaEventDestroy(event); }
  void set(Context& ctx) override { check(cudaEventRecord(event, stream(ctx)), "cudaEventRecord"); }
  void await(Context& ctx) override {
    check(cudaStreamWaitEvent(stream(ctx), event, 0), "cudaStreamWaitEvent");
  }
};

struct CapturedGraph : Graph::Impl {
  cudaGraphExec_t exec = nullptr;
  ~CapturedGraph() override {
    if (exec) cudaGraphExecDestroy(exec);
  }
  void launch(Context& ctx) override { check(cudaGraphLaunch(exec, stream(ctx)), "cudaGraphLaunch"); }
};

}  // namespace

std::unique_ptr<Mark::Impl> make_mark() { return std::make_unique<EventMark>(); }

std::unique_ptr<Graph::Impl> record(Context& ctx, const std::function<void()>& ops) {
  auto captured = std::make_unique<CapturedGraph>();
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(stream(ctx), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  try {
    ops();
  } catch (...) {
    cudaStreamEndCapture(stream(ctx), &graph);  // ends the capture so that the stream remains usable
    if (graph) cudaGraphDestroy(graph);
    throw;
  }
  check(cudaStreamEndCapture(stream(ctx), &graph), "cudaStreamEndCapture");
  const cudaError_t error = cudaGraphInstantiate(&captured->exec, graph, 0);
  cudaGraphDestroy(graph);
  check(error, "cudaGraphInstantiate");
  return captured;
}

namespace {

std::string reported(const KernelStatus& s, const std::vector<std::string>& places) {
  switch (static_cast<KernelStatus::Code>(s.code)) {
    case KernelStatus::token_outside_vocabulary:
      return fmt::format("token {} is outside the vocabulary", s.value);
    case KernelStatus::position_outside_table:
      return fmt::format("position {} is outside the rotary table", s.value);
    case KernelStatus::target_outside_vocabulary:
      return fmt::format("target {} is outside the vocabulary", s.value);
    case KernelStatus::documents_in_cudnn:
      return fmt::format(
          "attention.kernel cudnn does not support document masks (a first key of {}); use another kernel",
          s.value);
    case KernelStatus::index_score_not_a_number:
      return fmt::format("{}: a score of the indexer is not a number",
                         places.at(static_cast<size_t>(s.value)));
    case KernelStatus::ok:
      break;
  }
  return fmt::format("a kernel reported the unknown code {}", s.code);
}

/// The ops since the last synchronize, each between two events; only with a Profile. Errors of the timing
/// calls also appear in the surrounding ops, which check them.
class OpTimes : public BackendState {
 public:
  explicit OpTimes(cudaStream_t stream) : stream_(stream) {}
  ~OpTimes() override {
    for (Op& op : ops_) {
      cudaEventDestroy(op.begin);
      cudaEventDestroy(op.end);
    }
  }

  /// An op that another one calls is part of it.
  void begin(const char* name) {
    if (depth_++ > 0) return;
    if (used_ == ops_.size()) {
      Op& op = ops_.emplace_back();
      check(cudaEventCreate(&op.begin), "cudaEventCreate");
      check(cudaEventCreate(&op.end), "cudaEventCreate");
    }
    ops_[used_].name = name;
    check(cudaEventRecord(ops_[used_].begin, stream_), "cudaEventRecord");
  }
  void end() {
    if (--depth_ == 0) cudaEventRecord(ops_[used_++].end, stream_);
  }

  /// To be called after the stream has been synchronized.
  void settle(Profile* profile) {
    for (size_t i = 0; profile && i < used_; ++i) {
      float start = 0, duration = 0;  // ms
      cudaEventElapsedTime(&start, ops_[0].begin, ops_[i].begin);
      cudaEventElapsedTime(&duration, ops_[i].begin, ops_[i].end);
      profile->add(ops_[i].name, 1e-3 * start, 1e-3 * duration);
    }
    used_ = 0;
  }

 private:
  struct Op {
    const char* name = nullptr;
    cudaEvent_t begin = nullptr, end = nullptr;
  };
  cudaStream_t stream_;
  std::vector<Op> ops_;
  size_t used_ = 0;
  int depth_ = 0;
};

OpTimes& op_times(Context& ctx) {
  State& s = state(ctx);
  if (!s.profile) s.profile = std::make_unique<OpTimes>(s.stream);
  return static_cast<OpTimes&>(*s.profile);
}

}  // namespace

void synchronize(Context& ctx) {
  State& s = state(ctx);
  check(cudaMemcpyAsync(s.status_host, s.status, sizeof(KernelStatus), cudaMemcpyDeviceToHost, s.stream),
        "cudaMemcpyAsync", "kernel status");
  check(cudaStreamSynchronize(s.stream), "cudaStreamSynchronize");
  if (s.profile) static_cast<OpTimes&>(*s.profile).settle(ctx.profile);
  if (s.status_host->code == KernelStatus::ok) return;
  const KernelStatus report = *s.status_host;
  check(cudaMemsetAsync(s.status, 0, sizeof(KernelStatus), s.stream), "cudaMemsetAsync", "kernel status");
  fail(report.code == KernelStatus::index_score_not_a_number ? ExitCode::numeric : ExitCode::data, "{}",
       reported(report, s.places));
}

// ---- NVTX ranges

OpScope::OpScope(Context& ctx, const char* op) : ctx_(ctx) {
  if (ctx.dry_run) return;
#if !defined(SLUICE_EMULATION)
  nvtxRangePushA(op);
#endif
  if (ctx.profile) op_times(ctx).begin(op);
}

OpScope::~OpScope() {
  if (ctx_.dry_run) return;
  if (ctx_.profile) op_times(ctx_).end();
#if !defined(SLUICE_EMULATION)
  nvtxRangePop();
#endif
}

}  // namespace sluice::cuda
