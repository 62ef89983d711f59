#include "optim/schedule.h"

#include <catch2/catch.hpp>

#include "support/enums.h"

namespace sluice {
namespace {

OptimizerConfig with(Schedule schedule) {
  OptimizerConfig c;
  c.schedule = schedule;
  c.lr = 1.0;
  c.min_lr = 0.1;
  c.warmup_steps = 10;
  return c;
}

}  // namespace

TEST_CASE("every schedule warms up linearly from 0 and reaches lr at warmup_steps", "[schedule]") {
  for (size_t i = 0; i < EnumNames<Schedule>::names.size(); ++i) {
    const OptimizerConfig c = with(static_cast<Schedule>(i));
    INFO(EnumNames<Schedule>::names[i]);
    CHECK(learning_rate(c, 0, 100) == 0.0);
    CHECK(learning_rate(c, 5, 100) == 0.5);
    CHECK(learning_rate(c, 9, 100) == Approx(0.9));
    CHECK(learning_rate(c, 10, 100) == 1.0);
  }
}

TEST_CASE("schedules end at their stated value", "[schedule]") {
  CHECK(learning_rate(with(Schedule::constant), 100, 100) == 1.0);
  test::for_each_value<Schedule>([&](Schedule schedule) {
    if (schedule == Schedule::constant) return;
    CHECK(learning_rate(with(schedule), 100, 100) == Approx(0.1));
    CHECK(learning_rate(with(schedule), 1000, 100) == Approx(0.1));  // and stay there
    for (int64_t step = 10; step < 110; ++step)
      CHECK(learning_rate(with(schedule), step + 1, 100) <= learning_rate(with(schedule), step, 100));
  });
}

TEST_CASE("cosine and linear pass the mean of their end values halfway", "[schedule]") {
  CHECK(learning_rate(with(Schedule::cosine), 55, 100) == Approx(0.55));
  CHECK(learning_rate(with(Schedule::linear), 55, 100) == Approx(0.55));
  // A quarter of the way: 0.1 + 0.9 (1 + cos(pi / 4)) / 2.
  OptimizerConfig c = with(Schedule::cosine);
  c.warmup_steps = 0;
  CHECK(learning_rate(c, 25, 100) == Approx(0.1 + 0.9 * 0.8535533905932737));
  CHECK(learning_rate(c, 0, 100) == 1.0);
}

TEST_CASE("wsd holds lr, then decays over decay_steps, a fifth of the run by default", "[schedule]") {
  OptimizerConfig c = with(Schedule::wsd);
  CHECK(learning_rate(c, 80, 100) == 1.0);
  CHECK(learning_rate(c, 90, 100) == Approx(0.55));
  c.decay_steps = 50;
  CHECK(learning_rate(c, 50, 100) == 1.0);
  CHECK(learning_rate(c, 75, 100) == Approx(0.55));
  c.decay_steps = 1000;  // longer than the run: the fall begins when the warm-up ends
  CHECK(learning_rate(c, 10, 100) == 1.0);
  CHECK(learning_rate(c, 55, 100) == Approx(0.55));
}

TEST_CASE("runs shorter than their warm-up, of one step, and of zero steps", "[schedule]") {
  for (size_t i = 0; i < EnumNames<Schedule>::names.size(); ++i) {
    OptimizerConfig c = with(static_cast<Schedule>(i));
    INFO(EnumNames<Schedule>::names[i]);
    CHECK(learning_rate(c, 4, 5) == Approx(0.4));
    c.warmup_steps = 0;
    CHECK(learning_rate(c, 0, 1) == 1.0);
    CHECK(std::isfinite(learning_rate(c, 0, 0)));
  }
}

}  // namespace sluice
