#include "run/divergence.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <functional>

#include "core/error.h"

using namespace sluice;
using Catch::Contains;

namespace {

constexpr double kChance = 5.55;

/// The messages of a run, each prefixed with its step.
std::vector<std::string> messages(Divergence& watched, int64_t steps,
                                  const std::function<double(int64_t)>& loss, int64_t from = 1) {
  std::vector<std::string> all;
  for (int64_t step = from; step < from + steps; ++step)
    if (const std::string text = watched.add(step, loss(step)); !text.empty()) all.push_back(text);
  return all;
}

/// A healthy run: from the loss of a uniform guess down to 2, with noise.
double healthy(int64_t step) {
  return 2 + 3.6 * std::exp(-static_cast<double>(step) / 60) + 0.2 * std::sin(static_cast<double>(step * 7));
}

}  // namespace

TEST_CASE("a healthy loss does not diverge, for any first steps", "[divergence]") {
  for (const double factor : {0.0, 1.5, 3.0}) {
    Divergence d(factor, kChance, 10);
    CHECK(messages(d, 2000, healthy).empty());
    CHECK_FALSE(d.since());
  }
  // Slightly above a uniform guess for a long time, at a tiny learning rate; noise at a loss near 0; the low
  // start of a pretrained model.
  Divergence slow(1.5, kChance, 0), small(1.5, kChance, 0), pretrained(1.5, kChance, 0);
  CHECK(messages(slow, 500, [](int64_t) { return kChance + 0.05; }).empty());
  CHECK(messages(small, 500, [](int64_t step) { return step % 3 ? 0.01 : 0.09; }).empty());
  CHECK(messages(pretrained, 500, [](int64_t step) { return step % 2 ? 0.6 : 1.4; }).empty());
}

TEST_CASE("a loss that explodes in the first steps has diverged", "[divergence]") {
  Divergence d(1.5, kChance, 0);
  const auto found = messages(d, 60, [](int64_t step) { return step == 1 ? kChance : 22.9; });
  REQUIRE(found.size() == 1);
  CHECK_THAT(found[0], Contains("the training has diverged") &&
                           Contains("the loss of a uniform guess, ln(vocabulary), is 5.55"));
  CHECK(d.since() == 2);
  CHECK_THAT(d.describe(), Contains("the smoothed loss is 22"));
}

TEST_CASE("a loss that rises by the factor has diverged, at any step, and may recover", "[divergence]") {
  const auto rises = [](int64_t step) {
    return step < 1000 ? healthy(step) : step < 1300 ? 3.5 : healthy(step);
  };
  Divergence d(1.5, kChance, 10), never(0, kChance, 10);
  const auto found = messages(d, 2000, rises);
  REQUIRE(found.size() == 2);
  CHECK_THAT(found[0], Contains("step 10"));
  CHECK_THAT(found[1], Contains("has recovered"));
  CHECK_FALSE(d.since());
  CHECK(messages(never, 2000, rises).empty());
}

TEST_CASE("a loss above that of a uniform guess after warm-up has diverged, with any factor",
          "[divergence]") {
  const auto high = [](int64_t) { return kChance + 0.5; };
  Divergence d(0, kChance, 100);
  CHECK(messages(d, 163, high).empty());
  CHECK(messages(d, 1, high, 164).size() == 1);
  CHECK(messages(d, 1000, high, 165).empty());  // reported once
}

TEST_CASE("a resumed run detects divergence at the same step as an uninterrupted one", "[divergence]") {
  const auto loss = [](int64_t step) {
    return step < 300 ? healthy(step) : healthy(step) + 0.01 * static_cast<double>(step - 300);
  };
  for (const int64_t cut : {1, 5, 15, 16, 100, 350, 500}) {
    Divergence whole(1.5, kChance, 10), first(1.5, kChance, 10), second(1.5, kChance, 10);
    for (int64_t step = 1; step <= cut; ++step) {
      whole.add(step, loss(step));
      first.add(step, loss(step));
    }
    const nlohmann::json state = nlohmann::json::parse(first.state().dump());
    second.restore(StateReader(state, "state.json", "divergence"));
    for (int64_t step = cut + 1; step < 800; ++step)
      REQUIRE(whole.add(step, loss(step)) == second.add(step, loss(step)));
    CHECK(whole.state() == second.state());
    CHECK(whole.since());
  }
}

TEST_CASE("a state of more steps than can be counted on is refused", "[divergence][state]") {
  Divergence divergence(1.5, 5.5, 10);
  divergence.add(1, 2.5);
  nlohmann::json state = divergence.state();
  for (const char* key : {"count", "since"}) {
    nlohmann::json damaged = state;
    damaged[key] = std::numeric_limits<int64_t>::max();
    const StateReader reader(damaged, "state.json", "divergence");
    CHECK_THROWS_WITH(divergence.restore(reader),
                      Contains(fmt::format("divergence.{} must be a whole number", key)));
  }
}

TEST_CASE("fields of the state are checked for type and range, and errors name them", "[divergence][state]") {
  const nlohmann::json state = {{"count", 3},
                                {"half", 0.5},
                                {"text", "x"},
                                {"list", {1, 2, 3}},
                                {"huge", 18446744073709551615u},
                                {"inner", {{"a", -1}}},
                                {"numbers", {0.5, nullptr}},
                                {"objects", {1}}};
  const StateReader reader(state, "ckpt/state.json");
  CHECK(reader.integer("count", 0) == 3);
  CHECK(reader.number("half") == 0.5);
  CHECK(reader.integers("list", 3, 1) == std::vector<int64_t>{1, 2, 3});
  CHECK_THROWS_WITH(reader.integer("count", 4),
                    "ckpt/state.json: count must be a whole number of at least 4, got 3");
  CHECK_THROWS_WITH(reader.integer("half", 0, 9),
                    "ckpt/state.json: half must be a whole number from 0 to 9, got 0.5");
  CHECK_THROWS_WITH(reader.integer("huge", 0), Contains("huge must be a whole number"));
  CHECK_THROWS_WITH(reader.integer("absent", 0), "ckpt/state.json: absent is missing");
  CHECK_THROWS_WITH(reader.number("text"), Contains("text must be a finite number, got \"x\""));
  CHECK_THROWS_WITH(reader.text("count"), Contains("count must be a text"));
  CHECK_THROWS_WITH(reader.integers("list", 2, 0), Contains("list must be a list of 2, got 3"));
  CHECK_THROWS_WITH(reader.numbers("numbers", 2), Contains("numbers must be a list, each a finite number"));
  CHECK_THROWS_WITH(reader.object("inner").integer("a", 0),
                    Contains("inner.a must be a whole number of at least 0, got -1"));
  CHECK_THROWS_WITH(reader.object("list"), Contains("list must be a JSON object"));
  CHECK_THROWS_WITH(reader.objects("objects"), Contains("objects[0] must be a JSON object"));
  try {
    reader.text("count");
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::data);
  }
}
