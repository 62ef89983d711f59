#pragma once
// Measuring ops against each other on one device: the same run, in turns, by the device's own clock.
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/context.h"

namespace sluice::bench {

/// full: the sizes of a 1.7B model, for a GPU. tiny: the same calls in milliseconds, to see that they work.
struct RaceOptions {
  Device device = Device::cpu;
  bool tiny = false;
  double warm_up = 2;  // seconds for each candidate
  int samples = 51;    // turns; each candidate's result is the median of as many
};

/// Tensors of a race, with random values: equal bits draw less power and run faster than a training does.
class Inputs {
 public:
  Inputs(Context& context, Arena& memory) : ctx(context), memory_(memory) {}

  Context& ctx;
  Tensor zeros(DType type, std::initializer_list<int64_t> dims) { return memory_.alloc("bench", type, dims); }
  Tensor normal(DType type, std::initializer_list<int64_t> dims, double spread = 1);
  /// Element i is value(i), i32.
  Tensor integers(int64_t count, const std::function<int32_t(int64_t)>& value);
  /// Element i is value(i), f64.
  Tensor numbers(std::initializer_list<double> values);
  /// For what lays out its own memory.
  Arena& memory() { return memory_; }

 private:
  Arena& memory_;
};

struct Candidate {
  std::string name;
  /// turn 0, 1, 2, ...: for buffers that rotate, so that no cache holds what a call reads.
  std::function<void(int turn)> run;
  double flops = 0, bytes = 0;
  nlohmann::json labels = nlohmann::json::object();  // copied into the result
};

/// Builds the candidates twice, without memory to measure it and for real; warms up; takes turns. One row for
/// each: name, us (median), best_us, samples, and tflops or tb_per_second; or `skipped` with the reason, when
/// the call is refused (Error(usage)).
nlohmann::json race(const RaceOptions& options, const std::function<std::vector<Candidate>(Inputs&)>& make);

}  // namespace sluice::bench
