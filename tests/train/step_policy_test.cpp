#include "train/step_policy.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

namespace sluice {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kEarly = 1.25, kChance = 3;

/// Mean 2, standard deviation 0.1.
double usual(int64_t i) { return i % 2 == 0 ? 1.9 : 2.1; }

SpikeDetector settled(int64_t n) {
  SpikeDetector window(kEarly);
  for (int64_t i = 0; i < n; ++i) window.add(usual(i));
  return window;
}

TrainConfig policies(BadStepPolicy nonfinite, BadStepPolicy spike) {
  TrainConfig config;
  config.on_nonfinite = nonfinite;
  config.on_spike = spike;
  return config;
}

using Action = StepPolicy::Action;

}  // namespace

TEST_CASE("a spike is more than 6 deviations and 2 percent above the window's mean", "[spike]") {
  const SpikeDetector window = settled(128);
  CHECK_FALSE(window.is_spike(2.59));
  CHECK(window.is_spike(2.61));
  SpikeDetector flat(kEarly);
  for (int i = 0; i < 128; ++i) flat.add(2.0);
  CHECK_FALSE(flat.is_spike(2.039));  // with zero deviation, any difference is infinitely many sigmas
  CHECK(flat.is_spike(2.041));
}

TEST_CASE("the first values are compared with the largest so far, with a margin", "[spike]") {
  CHECK_FALSE(SpikeDetector(kEarly).is_spike(1e9));  // nothing to compare with
  SpikeDetector one(kEarly, kChance);
  one.add(2.0);
  CHECK_FALSE(one.is_spike(3.7));  // of guessing, 1.25 times 3
  CHECK(one.is_spike(3.8));
  one.add(5.0);
  CHECK_FALSE(one.is_spike(6.0));  // deviations say little of two values
  CHECK(one.is_spike(1e3));
  CHECK_FALSE(settled(63).is_spike(2.6));  // 1.25 times 2.1
  CHECK(settled(63).is_spike(2.7));
  CHECK(settled(64).is_spike(2.61));
  SpikeDetector nothing(kEarly);
  nothing.add(0.0);
  CHECK_FALSE(nothing.is_spike(1.0));
}

TEST_CASE("the window holds the last 128 values", "[spike]") {
  SpikeDetector window(kEarly);
  for (int i = 0; i < 50; ++i) window.add(1e6);
  for (int i = 0; i < 128; ++i) window.add(usual(i));
  CHECK(window.values().size() == 128);
  CHECK(window.is_spike(3.0));
  SpikeDetector again(kEarly);
  again.restore(window.values());
  CHECK(again.values() == window.values());
}

TEST_CASE("spikes never enter the window, so that one does not hide the next", "[spike]") {
  StepPolicy policy(policies(BadStepPolicy::skip, BadStepPolicy::count), kChance);
  for (int64_t i = 0; i < 100; ++i) policy.decide(i, usual(i), 1.0);
  for (int64_t i = 100; i < 120; ++i) CHECK(policy.decide(i, 50.0, 1.0).spike);
  CHECK(policy.spikes() == 20);
  CHECK(policy.skipped() == 0);
}

TEST_CASE("a spike of the gradient norm counts like one of the loss", "[spike]") {
  StepPolicy policy(policies(BadStepPolicy::skip, BadStepPolicy::skip), kChance);
  for (int64_t i = 0; i < 100; ++i) policy.decide(i, 2.0, usual(i));
  const auto decision = policy.decide(100, 2.0, 9.0);
  CHECK(decision.spike);
  CHECK(decision.action == Action::skip);
  CHECK(policy.skipped() == 1);
}

TEST_CASE("the first losses of trained weights are judged by themselves", "[spike]") {
  // Far below what random weights begin with, ln(vocabulary).
  const auto second_is_spike = [](const char* init_from) {
    TrainConfig config = policies(BadStepPolicy::skip, BadStepPolicy::skip);
    config.init_from = init_from;
    StepPolicy policy(config, kChance);
    CHECK_FALSE(policy.decide(0, kChance / 5, 1).spike);
    return policy.decide(1, kChance / 5 * 1.6, 1).spike;
  };
  CHECK(second_is_spike("runs/before"));
  CHECK_FALSE(second_is_spike(""));
}

TEST_CASE("a non-finite step is skipped or stops the run, and is never applied", "[spike]") {
  CHECK(StepPolicy(policies(BadStepPolicy::skip, BadStepPolicy::count), kChance).decide(0, kNan, 1).action ==
        Action::skip);
  CHECK(StepPolicy(policies(BadStepPolicy::skip, BadStepPolicy::count), kChance)
            .decide(0, 1, INFINITY)
            .action == Action::skip);
  CHECK(StepPolicy(policies(BadStepPolicy::stop, BadStepPolicy::count), kChance).decide(0, kNan, 1).action ==
        Action::stop);
  CHECK(StepPolicy(policies(BadStepPolicy::count, BadStepPolicy::count), kChance).decide(0, kNan, 1).action ==
        Action::skip);
}

TEST_CASE("more than 10 skipped steps in a row stop", "[spike]") {
  StepPolicy policy(policies(BadStepPolicy::skip, BadStepPolicy::count), kChance);
  for (int64_t i = 0; i < 10; ++i) CHECK(policy.decide(i, kNan, 1).action == Action::skip);
  const auto last = policy.decide(10, kNan, 1);
  CHECK(last.action == Action::stop);
  CHECK(last.budget_exhausted);
}

TEST_CASE("skipping more than 1 percent of the last 1000 steps stops the run, fewer do not", "[spike]") {
  // Every 101st step: 10 in any 1000. Every 99th: 11.
  for (const int64_t every : {101, 99}) {
    StepPolicy policy(policies(BadStepPolicy::skip, BadStepPolicy::count), kChance);
    bool stopped = false;
    for (int64_t i = 0; i < 5000 && !stopped; ++i)
      stopped = policy.decide(i, i % every == 0 ? kNan : 2.0, 1.0).action == Action::stop;
    CHECK(stopped == (every == 99));
  }
}

TEST_CASE("a restored policy decides as the one it was saved from", "[spike]") {
  for (const int64_t cut : {30, 70, 200, 1500}) {
    StepPolicy whole(policies(BadStepPolicy::skip, BadStepPolicy::count), kChance);
    StepPolicy first(policies(BadStepPolicy::skip, BadStepPolicy::count), kChance);
    const auto loss = [](int64_t i) {
      return i % 150 == 149 ? kNan : i % 40 == 39 ? 20.0 : 3.0 / (1 + 1e-3 * static_cast<double>(i % 97));
    };
    for (int64_t i = 0; i < cut; ++i) {
      whole.decide(i, loss(i), 1);
      first.decide(i, loss(i), 1);
    }
    StepPolicy second(policies(BadStepPolicy::skip, BadStepPolicy::count), kChance);
    // Through text, as in state.json.
    const nlohmann::json state = nlohmann::json::parse(first.state().dump());
    second.restore(StateReader(state, "state.json", "policy"), cut);
    for (int64_t i = cut; i < cut + 1200; ++i) {
      const auto a = whole.decide(i, loss(i), 1), b = second.decide(i, loss(i), 1);
      REQUIRE(a.action == b.action);
      REQUIRE(a.spike == b.spike);
    }
    CHECK(whole.state() == second.state());
  }
}

}  // namespace sluice
