#include "bench/race.h"

#include <algorithm>
#include <array>
#include <memory>

#include "bench/bench.h"
#include "core/error.h"
#include "core/random.h"
#include "core/stopwatch.h"

namespace sluice::bench {
namespace {

constexpr int64_t kBlock = 1 << 18;  // number of random elements; larger tensors repeat them

/// Fills a tensor in blocks of kBlock elements; the first one again and again if they repeat.
template <class T, class F>
void fill_blocks(Context& ctx, const Tensor& t, bool repeat, F&& element) {
  if (ctx.dry_run) return;
  std::vector<T> block(static_cast<size_t>(std::min(kBlock, t.numel())));
  const Tensor flat = t.view({t.numel()});
  for (int64_t begin = 0; begin < t.numel(); begin += kBlock) {
    if (begin == 0 || !repeat)
      for (size_t i = 0; i < block.size(); ++i) block[i] = T(element(begin + static_cast<int64_t>(i)));
    const Tensor part = flat.rows(begin, std::min(kBlock, t.numel() - begin));
    write_tensor(ctx, part, block.data());
  }
}

template <class F>
void fill(Context& ctx, const Tensor& t, bool repeat, F&& element) {
  if (t.dtype == DType::bf16)
    fill_blocks<bf16>(ctx, t, repeat, element);
  else
    fill_blocks<float>(ctx, t, repeat, element);
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

/// Calls per sample, chosen so that a sample takes about a millisecond, because events resolve half a
/// microsecond.
int calls_per_sample(double seconds_per_call) {
  return static_cast<int>(std::clamp(1e-3 / std::max(seconds_per_call, 1e-9), 1.0, 20.0));
}

struct Runner {
  const Candidate* candidate;
  std::string refused;
  int calls = 1, turn = 0;
  std::vector<double> seconds;  // per call

  /// Whether the candidate runs at all.
  template <class F>
  void attempt(F&& f) {
    if (!refused.empty()) return;
    try {
      f();
    } catch (const Error& e) {
      if (e.code() != ExitCode::usage) throw;
      refused = e.what();
    }
  }
};

}  // namespace

Tensor Inputs::normal(DType type, std::initializer_list<int64_t> dims, double spread) {
  const Tensor t = memory_.alloc("bench", type, dims);
  const RandomStream random(static_cast<uint64_t>(memory_.entries().size()), "bench");
  const auto value = [&](int64_t i) {
    return static_cast<float>(spread * random.normal(static_cast<uint64_t>(i)));
  };
  fill(ctx, t, /*repeat=*/true, value);
  return t;
}

Tensor Inputs::values(DType type, std::initializer_list<int64_t> dims,
                      const std::function<float(int64_t)>& value) {
  const Tensor t = memory_.alloc("bench", type, dims);
  fill(ctx, t, /*repeat=*/false, value);
  return t;
}

Tensor Inputs::integers(int64_t count, const std::function<int32_t(int64_t)>& value) {
  const Tensor t = memory_.alloc("bench", DType::i32, {count});
  if (ctx.dry_run) return t;
  std::vector<int32_t> host(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) host[static_cast<size_t>(i)] = value(i);
  write_tensor(ctx, t, host.data());
  return t;
}

Tensor Inputs::numbers(std::initializer_list<double> values) {
  const Tensor t = memory_.alloc("bench", DType::f64, {static_cast<int64_t>(values.size())});
  write_tensor(ctx, t, values.begin());
  return t;
}

nlohmann::json race(const RaceOptions& options, const std::function<std::vector<Candidate>(Inputs&)>& make) {
  int64_t scratch_bytes = 64, memory_bytes = 64;
  {
    Context dry(0, options.device);
    Arena measure("bench", 0, options.device);
    Inputs inputs(dry, measure);
    for (const Candidate& c : make(inputs)) {
      Runner r{&c, "", 1, 0, {}};
      r.attempt([&] { c.run(0); });
    }
    scratch_bytes = std::max(scratch_bytes, dry.scratch.high_water());
    memory_bytes = std::max(memory_bytes, measure.high_water());
  }
  Context ctx(scratch_bytes, options.device);
  Arena memory("bench", memory_bytes, options.device);
  Inputs inputs(ctx, memory);
  const std::vector<Candidate> candidates = make(inputs);
  std::vector<Runner> runners;
  for (const Candidate& c : candidates) runners.push_back({&c, "", 1, 0, {}});
  Stopwatch watch(ctx);

  for (Runner& r : runners)
    r.attempt([&] {
      const double begin = now();
      double last = 0;
      do {
        watch.start();
        r.candidate->run(r.turn++);
        watch.stop();
        last = watch.seconds();
      } while (now() - begin < options.warm_up);
      r.calls = calls_per_sample(last);
      synchronize(ctx);
    });
  for (int sample = 0; sample < options.samples; ++sample)
    for (Runner& r : runners)
      r.attempt([&] {
        watch.start();
        for (int i = 0; i < r.calls; ++i) r.candidate->run(r.turn++);
        watch.stop();
        r.seconds.push_back(watch.seconds() / r.calls);
      });
  synchronize(ctx);  // throws errors that kernels reported

  nlohmann::json rows = nlohmann::json::array();
  for (const Runner& r : runners) {
    nlohmann::json row = r.candidate->labels;
    row["name"] = r.candidate->name;
    if (!r.refused.empty()) {
      row["skipped"] = r.refused;
    } else {
      const double seconds = median(r.seconds);
      row["us"] = seconds * 1e6;
      row["best_us"] = *std::min_element(r.seconds.begin(), r.seconds.end()) * 1e6;
      row["samples"] = r.seconds.size();
      if (r.candidate->flops > 0) row["tflops"] = r.candidate->flops / seconds * 1e-12;
      if (r.candidate->bytes > 0) row["tb_per_second"] = r.candidate->bytes / seconds * 1e-12;
    }
    rows.push_back(row);
  }
  return rows;
}

}  // namespace sluice::bench
