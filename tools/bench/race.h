#pragma once
// Comparative measurements of ops on one device, in alternation within one run, by the device's clock.
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/context.h"

namespace sluice::bench {

/// full: the sizes of a 1.7B model, for a GPU. quick: few of them, for the first minutes on a new card. tiny:
/// the same calls within milliseconds, to test that they work.
struct RaceOptions {
  Device device = Device::cpu;
  bool tiny = false, quick = false;
  double warm_up = 2;  // seconds for each candidate
  int samples = 51;    // number of turns; each candidate's result is the median over them
};

/// Tensors of a race, with random values: constant values consume less power and run faster than in training.
class Inputs {
 public:
  Inputs(Context& context, Arena& memory) : ctx(context), memory_(memory) {}

  Context& ctx;
  Tensor zeros(DType type, std::initializer_list<int64_t> dims) { return memory_.alloc("bench", type, dims); }
  Tensor normal(DType type, std::initializer_list<int64_t> dims, double spread = 1);
  /// Element i is value(i).
  Tensor values(DType type, std::initializer_list<int64_t> dims, const std::function<float(int64_t)>& value);
  /// Element i is value(i), i32.
  Tensor integers(int64_t count, const std::function<int32_t(int64_t)>& value);
  /// Element i is value(i), f64.
  Tensor numbers(std::initializer_list<double> values);
  /// For code that allocates its own memory.
  Arena& memory() { return memory_; }

 private:
  Arena& memory_;
};

struct Candidate {
  std::string name;
  /// turn 0, 1, 2, ...: selects among rotating buffers, so that the inputs of a call are not in a cache.
  std::function<void(int turn)> run;
  double flops = 0, bytes = 0;
  nlohmann::json labels = nlohmann::json::object();  // copied into the result
};

/// Builds the candidates twice, first in a dry run to measure their memory; warms up; then runs them in
/// turns. One row for each: name, us (median), best_us, samples, and tflops or tb_per_second; or `skipped`
/// with the reason if the call is refused (Error(usage)).
nlohmann::json race(const RaceOptions& options, const std::function<std::vector<Candidate>(Inputs&)>& make);

}  // namespace sluice::bench
