#pragma once
// Time on a context's device between two points in its sequence of ops: CUDA events on a GPU, the clock on a
// CPU.
#include <memory>

namespace sluice {

struct Context;

class Stopwatch {
 public:
  explicit Stopwatch(Context& ctx);
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  void start();
  void stop();
  /// Seconds between the last start and the last stop; waits for the ops enqueued between them.
  double seconds();

  struct Impl {
    virtual ~Impl() = default;
    virtual void start() = 0;
    virtual void stop() = 0;
    virtual double seconds() = 0;
  };

 private:
  std::unique_ptr<Impl> impl_;
};

#if defined(SLUICE_HAS_CUDA)
namespace cuda {
std::unique_ptr<Stopwatch::Impl> make_stopwatch(Context& ctx);  // cuda/stopwatch.cu
}
#endif

}  // namespace sluice
