// Gradients in bf16 with stochastic rounding: unbiased, reproducible, and different by step, bucket and rank.
#include "optim/bf16_wire.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <vector>

#include "comm/threads.h"
#include "core/parallel_for.h"
#include "ops/elementwise.h"

using namespace sluice;

namespace {

Tensor view(std::vector<float>& x) { return Tensor(x.data(), DType::f32, {std::ssize(x)}); }

void round(std::vector<bf16>& to, std::vector<float> x, uint32_t key) {
  Context ctx(64);
  round_stochastically(ctx, Tensor(to.data(), DType::bf16, {std::ssize(to)}), view(x), key);
}

}  // namespace

TEST_CASE("stochastic rounding goes to a neighbour and is unbiased", "[bf16_wire]") {
  for (const float x : {1.00390625f * 0.75f + 0.25f * 1.0f, -3.1415927f, 1.2345e-20f, 6.02e23f}) {
    constexpr int64_t kTimes = 400000;
    const std::vector<float> many(kTimes, x);
    std::vector<bf16> rounded(kTimes);
    round(rounded, many, 17);
    const float down = std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0xffff0000u);
    const float up = std::bit_cast<float>((std::bit_cast<uint32_t>(x) & 0xffff0000u) + 0x10000u);
    double sum = 0;
    for (const bf16 r : rounded) {
      REQUIRE((static_cast<float>(r) == down || static_cast<float>(r) == up));
      sum += static_cast<double>(static_cast<float>(r));
    }
    // Five deviations of the mean of so many.
    const double gap = std::abs(static_cast<double>(up) - static_cast<double>(down));
    CHECK(std::abs(sum / kTimes - static_cast<double>(x)) <
          5 * 0.5 * gap / std::sqrt(static_cast<double>(kTimes)));
  }
}

TEST_CASE("values representable in bf16, non-finite ones and the largest are unchanged", "[bf16_wire]") {
  const float infinite = std::numeric_limits<float>::infinity(), largest = std::numeric_limits<float>::max();
  std::vector<float> x;
  for (int i = 0; i < 64; ++i)
    for (const float v :
         {0.0f, -0.0f, 1.5f, -0.0078125f, infinite, -infinite, largest, -largest, std::nanf("")})
      x.push_back(v);
  x.push_back(std::bit_cast<float>(0x7f800001u));  // a NaN whose bits lie below the cut
  // NaN of which the random bits would carry into the sign; the first is the one that GPUs compute.
  for (int i = 0; i < 64; ++i)
    for (const uint32_t bits : {0x7fffffffu, 0xffffffffu, 0x7fff8000u})
      x.push_back(std::bit_cast<float>(bits));
  std::vector<bf16> r(x.size());
  round(r, x, 3);
  for (size_t i = 0; i < x.size(); ++i) {
    const float y = static_cast<float>(r[i]);
    INFO(x[i]);
    if (std::isnan(x[i]))
      CHECK(std::isnan(y));
    else if (std::abs(x[i]) == largest)
      CHECK((std::isfinite(y) && std::signbit(y) == std::signbit(x[i])));
    else
      CHECK(std::bit_cast<uint32_t>(y) == std::bit_cast<uint32_t>(x[i]));
  }
}

TEST_CASE("each rank, step, micro-batch and bucket rounds with different random bits; threads have no effect",
          "[bf16_wire]") {
  constexpr int64_t kCount = 40000;
  const auto travel = [&](int threads, const Bf16Wire::Place& place) {
    std::vector<float> arrived(3 * kCount);
    run_thread_ranks(3, [&](Communicator& ranks) {
      set_num_threads(threads);
      Arena arena("wire", 1 << 22);
      Bf16Wire wire;
      wire.allocate(arena, 3 * kCount);
      std::vector<float> mine(3 * kCount, 0.1f), received(3 * kCount), gathered(3 * kCount);
      Bf16Wire::Place here = place;
      here.rank = ranks.rank();
      Context ctx(64);
      wire.all_to_all(ctx, ranks, view(received), view(mine), here);
      wire.all_gather(ctx, ranks, view(gathered), view(received).rows(0, kCount), here);
      if (ranks.rank() == 1) arrived = received;
    });
    return arrived;
  };
  const auto first = travel(1, {.step = 5}), again = travel(2, {.step = 5});
  CHECK((first == again));
  for (const Bf16Wire::Place& other :
       {Bf16Wire::Place{.step = 6}, {.step = 5, .micro_batch = 1}, {.step = 5, .bucket_begin = 64}})
    CHECK((travel(1, other) != first));
  // The three ranks sent the same numbers and rounded them apart.
  CHECK((std::vector<float>(first.begin(), first.begin() + kCount) !=
         std::vector<float>(first.begin() + kCount, first.begin() + 2 * kCount)));
}
