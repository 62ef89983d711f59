// The fake CUDA runtime: memory, copies, streams, events, captures.
#include <catch2/catch.hpp>
#include <cstring>

#include "support.h"

namespace sluice::cuda {
namespace {

__global__ void add(int* x, int n) { atomicAdd(x, n); }

struct Stream {
  cudaStream_t s = nullptr;
  Stream() { cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking); }
  ~Stream() { cudaStreamDestroy(s); }
};
struct Event {
  cudaEvent_t e = nullptr;
  explicit Event(unsigned flags = 0) { cudaEventCreateWithFlags(&e, flags); }
  ~Event() { cudaEventDestroy(e); }
};

void launch_add(int* x, int n, cudaStream_t stream = nullptr) {
  emu::LaunchParams p = shape(1, 1, 0, "add");
  p.stream = stream;
  emu::launch(p, add, x, n);
}

TEST_CASE("a captured stream records work with its arguments and performs it at every launch", "[runtime]") {
  Stream stream;
  const DeviceArray<int> x(std::vector<int>{0});
  int* pinned = nullptr;
  REQUIRE(cudaMallocHost(reinterpret_cast<void**>(&pinned), sizeof(int)) == cudaSuccess);
  REQUIRE(cudaStreamBeginCapture(stream.s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  CHECK(cudaMemsetAsync(x.get(), 0, sizeof(int), stream.s) == cudaSuccess);
  for (int n = 1; n <= 3; ++n) launch_add(x.get(), n);  // n is kept by value
  CHECK(cudaMemcpyAsync(pinned, x.get(), sizeof(int), cudaMemcpyDeviceToHost, stream.s) == cudaSuccess);
  *pinned = -1;
  cudaStreamCaptureStatus status;
  CHECK(cudaStreamIsCapturing(stream.s, &status) == cudaSuccess);
  CHECK(status == cudaStreamCaptureStatusActive);
  cudaGraph_t graph;
  REQUIRE(cudaStreamEndCapture(stream.s, &graph) == cudaSuccess);
  CHECK(x.host()[0] == 0);
  CHECK(*pinned == -1);
  size_t nodes = 0;
  CHECK(cudaGraphGetNodes(graph, nullptr, &nodes) == cudaSuccess);
  CHECK(nodes == 5);

  cudaGraphExec_t exec;
  REQUIRE(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  for (int i = 0; i < 2; ++i) {
    *pinned = -1;
    CHECK(cudaGraphLaunch(exec, stream.s) == cudaSuccess);
    CHECK(*pinned == 6);
  }
  launch_add(x.get(), 1);  // nothing is captured any more
  CHECK(x.host()[0] == 7);
  CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
  cudaFreeHost(pinned);
}

TEST_CASE("calls that a capture forbids are refused and invalidate the capture", "[runtime]") {
  Stream stream;
  const DeviceArray<int> x(1);
  int pageable = 0;
  void* p = nullptr;
  const auto spoils = [&](auto&& call) {
    REQUIRE(cudaStreamBeginCapture(stream.s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(call() == cudaErrorStreamCaptureUnsupported);
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(stream.s, &graph) == cudaErrorStreamCaptureInvalidated);
    CHECK(graph == nullptr);
  };
  spoils([&] { return cudaStreamSynchronize(stream.s); });
  spoils([&] { return cudaDeviceSynchronize(); });
  spoils([&] { return cudaMalloc(&p, 16); });
  spoils([&] { return cudaMemcpy(&pageable, x.get(), 4, cudaMemcpyDeviceToHost); });
  spoils([&] { return cudaMemcpyAsync(&pageable, x.get(), 4, cudaMemcpyDeviceToHost, stream.s); });
}

TEST_CASE("A second stream joins a capture through an event, and must be joined back", "[runtime]") {
  Stream origin, side;
  Event fork(cudaEventDisableTiming), join(cudaEventDisableTiming);
  const DeviceArray<int> x(std::vector<int>{0});
  for (const bool joined : {true, false}) {
    REQUIRE(cudaStreamBeginCapture(origin.s, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(cudaEventRecord(fork.e, origin.s) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(side.s, fork.e, 0) == cudaSuccess);
    launch_add(x.get(), 1, side.s);
    CHECK(cudaEventRecord(join.e, side.s) == cudaSuccess);
    if (joined) CHECK(cudaStreamWaitEvent(origin.s, join.e, 0) == cudaSuccess);
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(origin.s, &graph) == (joined ? cudaSuccess : cudaErrorStreamCaptureUnjoined));
    CHECK(cudaEventSynchronize(join.e) == cudaErrorCapturedEvent);
    cudaGraphDestroy(graph);
  }
  CHECK(x.host()[0] == 0);
}

TEST_CASE("copies are checked against the allocations that they start in", "[runtime]") {
  const DeviceArray<char> device(100);
  std::vector<char> host(200);
  CHECK(cudaMemcpy(device.get(), host.data(), 100, cudaMemcpyHostToDevice) == cudaSuccess);
  CHECK(cudaMemcpy(device.get(), host.data(), 101, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(cudaMemcpy(device.get() + 90, host.data(), 11, cudaMemcpyDefault) == cudaErrorInvalidValue);
  CHECK(cudaMemcpy(device.get(), host.data(), 10, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
  CHECK(cudaMemset(host.data(), 0, 10) == cudaErrorInvalidValue);
  CHECK(cudaMemset(device.get(), 0, 101) == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("a write past the end of an allocation is reported when it is freed", "[runtime]") {
  char* p = nullptr;
  REQUIRE(cudaMalloc(reinterpret_cast<void**>(&p), 100) == cudaSuccess);
  CHECK(reinterpret_cast<uintptr_t>(p) % 256 == 0);
  p[100] = 0;
  CHECK(cudaFree(p) == cudaErrorIllegalAddress);
  CHECK(cudaFree(p) == cudaErrorInvalidValue);
  cudaGetLastError();
}

TEST_CASE("Events measure time", "[runtime]") {
  Stream stream;
  Event begin, end, without(cudaEventDisableTiming);
  float ms = -1;
  CHECK(cudaEventElapsedTime(&ms, begin.e, end.e) != cudaSuccess);
  cudaEventRecord(begin.e, stream.s);
  cudaEventRecord(end.e, stream.s);
  cudaEventRecord(without.e, stream.s);
  CHECK(cudaEventElapsedTime(&ms, begin.e, end.e) == cudaSuccess);
  CHECK(ms >= 0);
  CHECK(cudaEventElapsedTime(&ms, begin.e, without.e) != cudaSuccess);
  cudaGetLastError();
}

}  // namespace
}  // namespace sluice::cuda
