#include "core/stopwatch.h"

#include <chrono>

#include "core/context.h"

namespace sluice {
namespace {

struct ClockStopwatch final : Stopwatch::Impl {
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin, end;
  void start() override { begin = Clock::now(); }
  void stop() override { end = Clock::now(); }
  double seconds() override { return std::chrono::duration<double>(end - begin).count(); }
};

std::unique_ptr<Stopwatch::Impl> make(Context& ctx) {
#if defined(SLUICE_HAS_CUDA)
  if (ctx.device == Device::cuda && !ctx.dry_run) return cuda::make_stopwatch(ctx);
#else
  (void)ctx;
#endif
  return std::make_unique<ClockStopwatch>();
}

}  // namespace

Stopwatch::Stopwatch(Context& ctx) : impl_(make(ctx)) {}
Stopwatch::~Stopwatch() = default;
void Stopwatch::start() { impl_->start(); }
void Stopwatch::stop() { impl_->stop(); }
double Stopwatch::seconds() { return impl_->seconds(); }

}  // namespace sluice
