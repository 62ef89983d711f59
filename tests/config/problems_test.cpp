#include "config/problems.h"

#include <catch2/catch.hpp>

namespace sluice {
namespace {

const KeyPlaces kPlaces = {{"a.b", "x.yaml:3:5"}, {"a", "x.yaml:2:1"}};

/// The message of the ConfigError that f throws.
template <class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const ConfigError& error) {
    CHECK(error.code() == ExitCode::usage);
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("each problem is a line behind the place of its first key that was given", "[config][problems]") {
  ProblemList problems;
  CHECK_NOTHROW(problems.raise(kPlaces));
  problems({"a.b", "a"}, "one");
  problems({"a.c", "a"}, "two");
  problems({"d"}, "three");
  CHECK(message_of([&] { problems.raise(kPlaces); }) == "x.yaml:3:5: one\nx.yaml:2:1: two\nthree");
  CHECK(message_of([&] { problems.raise(); }) == "one\ntwo\nthree");
}

TEST_CASE("places are added to a problem that was found without them, and once", "[config][problems]") {
  const auto placed = [] { with_places(kPlaces, [] { refuse({"a.b"}, "one"); }); };
  CHECK(message_of([&] { placed(); }) == "x.yaml:3:5: one");
  CHECK(message_of([&] { with_places(kPlaces, placed); }) == "x.yaml:3:5: one");
  // Other errors pass as they are.
  CHECK_THROWS_WITH(with_places(kPlaces, [] { fail(ExitCode::data, "bad data"); }), "bad data");
  ProblemList all;
  all({"d"}, "zero");
  try {
    placed();
  } catch (const ConfigError& error) {
    all.add(error);
  }
  CHECK(message_of([&] { all.raise(kPlaces); }) == "zero\nx.yaml:3:5: one");
}

}  // namespace sluice
