// Two events on the context's stream. An event's time has a resolution of about half a microsecond.
#include "common/launch.h"
#include "core/stopwatch.h"

namespace sluice::cuda {
namespace {

class EventStopwatch final : public Stopwatch::Impl {
 public:
  explicit EventStopwatch(Context& ctx) : stream_(stream(ctx)) {
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~EventStopwatch() override {
    if (begin_) cudaEventDestroy(begin_);
    if (end_) cudaEventDestroy(end_);
  }
  void start() override { check(cudaEventRecord(begin_, stream_), "cudaEventRecord"); }
  void stop() override { check(cudaEventRecord(end_, stream_), "cudaEventRecord"); }
  double seconds() override {
    check(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return 1e-3 * milliseconds;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

}  // namespace

std::unique_ptr<Stopwatch::Impl> make_stopwatch(Context& ctx) {
  return std::make_unique<EventStopwatch>(ctx);
}

}  // namespace sluice::cuda
