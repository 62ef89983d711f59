// A slow rank is reported soon and once; noise is not.
#include "run/stragglers.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <cmath>
#include <mutex>
#include <random>
#include <thread>

#include "comm/threads.h"
#include "core/parallel_for.h"
#include "support/tiny_training.h"

using namespace sluice;
using namespace sluice::test;
using Catch::Contains;

namespace {

/// Realistic step times: a log-normal spread of 10 %, and occasionally a step that takes five times as long.
struct Noise {
  std::mt19937_64 random;
  double operator()(double seconds) {
    const double x = seconds * std::exp(0.1 * std::normal_distribution<double>()(random));
    return random() % 100 == 0 ? 5 * x : x;
  }
  std::vector<double> step(int ranks, int slow, double factor) {
    std::vector<double> all;
    for (int r = 0; r < ranks; ++r) all.push_back((*this)(r == slow ? factor : 1.0));
    return all;
  }
};

}  // namespace

TEST_CASE("a rank that is 30 % slower is reported within 50 steps, from the start or later", "[stragglers]") {
  int named = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Noise noise{std::mt19937_64(seed)};
    const int ranks = 2 + static_cast<int>(seed % 7), slow = static_cast<int>(seed) % ranks;
    const int quiet = seed % 2 ? 200 : 0;
    Stragglers stragglers(ranks);
    std::vector<std::string> said;
    for (int step = 0; step < quiet; ++step) REQUIRE(stragglers.add(noise.step(ranks, slow, 1)).empty());
    for (int step = 0; step < 50; ++step)
      for (const std::string& message : stragglers.add(noise.step(ranks, slow, 1.3))) said.push_back(message);
    INFO("seed " << seed);
    REQUIRE(said.size() == 1);
    CHECK_THAT(said[0], Contains(fmt::format("rank {} computes 1.", slow)) &&
                            Contains(fmt::format("median of {} ranks", ranks)));
    named += !said.empty();
  }
  CHECK(named == 20);
}

TEST_CASE("noise causes no report in ten thousand steps", "[stragglers]") {
  for (const int ranks : {2, 3, 8}) {
    Noise noise{std::mt19937_64(static_cast<uint64_t>(ranks))};
    Stragglers stragglers(ranks);
    int said = 0;
    for (int step = 0; step < 10000; ++step)
      said += static_cast<int>(stragglers.add(noise.step(ranks, -1, 1)).size());
    CHECK(said == 0);
  }
  // Nor do all ranks together, as with a larger batch; nor a single rank.
  Stragglers both(2), alone(1);
  for (int step = 0; step < 500; ++step) {
    const double seconds = step < 100 ? 1 : 3;
    CHECK(both.add({seconds, seconds}).empty());
    CHECK(alone.add({seconds}).empty());
  }
}

TEST_CASE("a report is repeated only if it changes", "[stragglers]") {
  Stragglers stragglers(4);
  std::vector<std::string> said;
  const auto run = [&](int steps, double factor) {
    said.clear();
    for (int i = 0; i < steps; ++i)
      for (const std::string& message : stragglers.add({1, 1, factor, 1})) said.push_back(message);
  };
  run(2000, 1.4);
  REQUIRE(said.size() == 1);
  CHECK_THAT(said[0], Contains("rank 2 computes 1.40 times"));
  run(1000, 1.5);  // too small a change to report
  CHECK(said.empty());
  run(1000, 2.5);
  REQUIRE(!said.empty());
  CHECK(said.size() <= 3);  // while the average approaches it
  CHECK_THAT(said.back(), Contains("rank 2 computes 2."));
  run(1000, 1.1);
  CHECK(said.back() == "rank 2 keeps up again");
  run(1000, 1.4);
  REQUIRE(said.size() == 1);
  CHECK_THAT(said[0], Contains("rank 2 computes 1."));
  CHECK_THROWS_WITH(stragglers.add({1, 1}), Contains("times of 2 ranks, not 4"));
}

TEST_CASE("a rank's own time excludes waiting", "[stragglers][ranks]") {
  using Seconds = std::chrono::duration<double>;
  TinyTraining t;
  t.config.train.micro_batch_size = 1;
  t.config.data.validation.clear();
  std::vector<std::string> said;
  std::vector<double> own(4, 0);
  double slept = 0;
  run_thread_ranks(4, [&](Communicator& c) {
    set_num_threads(1);
    const Blend data = t.blend();
    Trainer trainer(t.config, data, &c);
    trainer.initialize();
    Stragglers stragglers(c.size());
    for (int step = 0; step < 45; ++step) {
      const auto start = std::chrono::steady_clock::now();
      const int64_t waited = trainer.communication().waited_ns();
      trainer.step();
      // As long as a step, so that it is slow on a busy machine as well.
      const Seconds pause = std::max(Seconds(std::chrono::steady_clock::now() - start), Seconds(0.015));
      if (c.rank() == 2) {
        std::this_thread::sleep_for(pause);
        slept += pause.count();
      }
      trainer.ranks().barrier();  // the others wait for it here
      const double mine = Seconds(std::chrono::steady_clock::now() - start).count() -
                          1e-9 * static_cast<double>(trainer.communication().waited_ns() - waited);
      std::vector<double> seconds(4);
      trainer.ranks().all_gather(seconds.data(), &mine, sizeof mine);
      const std::vector<std::string> messages = stragglers.add(seconds);
      if (c.rank() != 0) continue;
      said.insert(said.end(), messages.begin(), messages.end());
      for (size_t r = 0; r < own.size(); ++r) own[r] += seconds[r];
    }
  });
  // With the time that they wait all would have the same. A busy machine may slow down others, too.
  for (const size_t r : {0, 1, 3}) CHECK(own[2] - own[r] > 0.4 * slept);
  CHECK_THAT(fmt::format("{}", fmt::join(said, "\n")), Contains("rank 2 computes"));
}
