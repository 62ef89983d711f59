// How uneven the heads of a layer are.
#include "nn/head_balance.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

using namespace sluice;

TEST_CASE("A layer's imbalance is standard deviation over mean, for either divisor", "[heads]") {
  const std::vector<double> importance = {0.2, 0.4, 0.9};  // mean 0.5, squares 0.26
  CHECK(*imbalance_of(importance, 1) == Approx(std::sqrt(0.26 / 2) / 0.5));
  CHECK(*imbalance_of(importance, 0) == Approx(std::sqrt(0.26 / 3) / 0.5));
  CHECK(*imbalance_of({0.3, 0.3}, 1) == 0);
}

TEST_CASE("heads that are all closed, too few, or without tokens have no imbalance", "[heads]") {
  for (const int64_t ddof : {0, 1}) {
    CHECK_FALSE(imbalance_of({0, 0}, ddof));
    // What little such heads take is rounding, not importance.
    CHECK_FALSE(imbalance_of({0, 0.9 * kLeastImportance}, ddof));
    CHECK(imbalance_of({0, 4 * kLeastImportance}, ddof));
    CHECK_FALSE(imbalance_of({}, ddof));
    CHECK_FALSE(imbalance_of({std::numeric_limits<double>::quiet_NaN(), 0.5}, ddof));
  }
  CHECK_FALSE(imbalance_of({0.5}, 1));
  CHECK(*imbalance_of({0.5}, 0) == 0);
}
