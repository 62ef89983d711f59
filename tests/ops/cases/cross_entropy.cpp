// Head and cross-entropy: vocabularies on and off the vector width, one and several chunks of rows, rows
// without loss.
#include "ops/cross_entropy.h"

#include <spdlog/fmt/fmt.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <vector>

#include "core/targets.h"
#include "ops/cases.h"
#include "support/gpu.h"

namespace sluice::test {
namespace {

constexpr int64_t kNever = int64_t{1} << 40;

/// A GPU stores the logits of a bf16 model as bf16, a CPU as f32: a loss is the difference of two such
/// logits, and where it is small (a handful of words) their rounding, not its own, bounds it. Sums over
/// 40,000 words in f32 differ by their order.
double tolerance_factor(int64_t vocabulary) { return vocabulary < 64 ? 8 : vocabulary > 10000 ? 4 : 2; }

/// Every `without`-th row has no target. With gradient, or the losses alone.
OpCase loss_case(int64_t rows, int64_t width, int64_t vocabulary, bool gradient, int64_t without = 7,
                 double cap = 0, double z = 0, Into into = Into::add) {
  return {fmt::format("cross_entropy_forward{} T={} C={} V={} -1 every {} cap {} z {}{}",
                      gradient ? "_backward" : "", rows, width, vocabulary, without, cap, z,
                      into == Into::add ? "" : " overwritten"),
          [=](CaseRun& r) {
            const Tensor hidden = r.input("hidden", {rows, width});
            LinearWeight head;
            head.value = r.input("head", {vocabulary, width}, 2 / std::sqrt(static_cast<double>(width)));
            const Tensor targets = r.input("targets", DType::i32, {rows}, [=](int64_t i) {
              if (i % without == without - 1) return static_cast<double>(i % 2 ? kNoTarget : kPadding);
              return static_cast<double>((i * 7919 + 13) % vocabulary);
            });
            const Tensor losses = r.output("losses", r.wide, {rows});
            if (!gradient) return cross_entropy_forward(r.ctx, losses, hidden, head, targets, cap);
            const Tensor scale = r.input("gradient_scale", DType::f64, {1}, [=](int64_t) { return 0.25; });
            const Tensor dhidden = r.output("dhidden", {rows, width});
            const Tensor dweight = into == Into::add ? r.inout("dweight", r.wide, {vocabulary, width}, 0.1)
                                                     : r.output("dweight", r.wide, {vocabulary, width});
            cross_entropy_forward_backward(r.ctx, losses, dhidden, dweight, hidden, head, targets, scale, cap,
                                           {z, z > 0 ? r.output("squares", r.wide, {rows}) : Tensor()}, into);
          },
          tolerance_factor(vocabulary)};
}

}  // namespace

OpFamily cross_entropy_cases() {
  OpFamily family{"cross_entropy", {}, {}};
  for (const bool gradient : {false, true}) {
    family.cases.push_back(loss_case(1, 8, 2, gradient, kNever));
    family.cases.push_back(loss_case(3, 17, 33, gradient, kNever));
    family.cases.push_back(loss_case(5, 16, 64, gradient, 1));             // no row counts
    family.cases.push_back(loss_case(13, 24, 1003, gradient));             // off the vector width
    family.cases.push_back(loss_case(3, 8, 16384 + 5, gradient, kNever));  // blocks of 1024 threads
    family.cases.push_back(loss_case(9, 17, 1003, gradient, 7, 3));        // logits of 2 under a cap of 3
    family.cases.push_back(loss_case(2, 8, 16384 + 5, gradient, kNever, 3));
    family.cases.push_back(
        loss_case(2, 4, 40007, gradient, 2));  // more than four vectors per thread: clusters
  }
  family.cases.push_back(loss_case(13, 24, 1003, true, 7, 0, 0.2));  // with a z-loss
  family.cases.push_back(loss_case(3, 8, 16384 + 5, true, 2, 3, 0.1));
  family.cases.push_back(loss_case(2, 4, 40007, true, 2, 0, 0.1));
  for (const double z : {0.0, 0.1}) family.cases.push_back(loss_case(1, 4, 40007, true, kNever, 3, z));
  family.cases.push_back(loss_case(5, 16, 64, true, 1, 0, 0.2));  // no row counts
  family.cases.push_back(loss_case(4096 + 4, 3, 9, true));        // two chunks, each off the grid
  family.cases.back().bf16 = false;                               // a million emulated threads are enough
  family.cases.push_back(loss_case(0, 8, 16, true));
  for (const int64_t rows : {0, 5, 4096 + 4})
    family.cases.push_back(loss_case(rows, 3, 9, true, 7, 0, 0, Into::overwrite));
  family.cases.back().bf16 = false;
  family.fuzz = [](Random& random) {
    return loss_case(uniform(random, 1, 20), uniform(random, 1, 40), uniform(random, 2, 3000),
                     uniform(random, 0, 1) == 1, one_of<int64_t>(random, {1, 3, 7, kNever}),
                     one_of(random, {0.0, 2.0, 15.0}), one_of(random, {0.0, 0.1}));
  };
  return family;
}

TEST_CASE("a target outside the vocabulary is reported at the next synchronize, and has no loss",
          "[cross_entropy]") {
  if (no_device()) return;
  Context ctx(int64_t{64} << 20, Device::cuda);
  Arena memory("case", 1 << 20, Device::cuda);
  CaseRun r(ctx, DType::f32, memory);
  const Tensor hidden = r.input("hidden", {3, 8}), losses = r.output("losses", {3});
  LinearWeight head;
  head.value = r.input("head", {20, 8});
  const Tensor targets = r.input("targets", DType::i32, {3}, [](int64_t i) { return i == 1 ? 20.0 : 4.0; });
  cross_entropy_forward(ctx, losses, hidden, head, targets);
  CHECK(message_of([&] { synchronize(ctx); }) == "target 20 is outside the vocabulary");
  const std::vector<CaseRun::Output>& outputs = r.collect();  // reported once
  CHECK(Pool::get(outputs[0].host, 0) > 0);
  CHECK(Pool::get(outputs[0].host, 1) == 0);
}

TEST_CASE("a cluster of blocks gives a long row the bits of a single block", "[cross_entropy]") {
  if (no_device()) return;
  const double z = GENERATE(0.0, 0.1), cap = GENERATE(0.0, 3.0);
  const char* const before = std::getenv("SLUICE_EMULATED_ARCH");
  std::vector<std::vector<double>> results[2];
  for (const int i : {0, 1}) {
    setenv("SLUICE_EMULATED_ARCH", i == 0 ? "90" : "80", 1);  // on a GPU: the same kernel twice
    Context ctx(int64_t{64} << 20, Device::cuda);
    Arena memory("case", int64_t{64} << 20, Device::cuda);
    CaseRun r(ctx, DType::bf16, memory);
    loss_case(2, 4, 40007, true, kNever, cap, z).run(r);
    for (const CaseRun::Output& output : r.collect()) {
      std::vector<double>& values = results[i].emplace_back();
      for (int64_t e = 0; e < output.host.numel(); ++e) values.push_back(Pool::get(output.host, e));
    }
  }
  if (before)
    setenv("SLUICE_EMULATED_ARCH", before, 1);
  else
    unsetenv("SLUICE_EMULATED_ARCH");
  CHECK((results[0] == results[1]));  // not to be printed
}

}  // namespace sluice::test
