// Who is to blame when ranks hang, from what each wrote about itself.
#include "train/watchdog.h"

#include <catch2/catch.hpp>

using namespace sluice;
using Catch::Contains;

namespace {

constexpr double kNow = 1e9;

Heartbeat rank(int r, const char* operation, int64_t sequence, double idle) {
  Heartbeat h;
  h.rank = r;
  h.step = 40;
  h.phase = "step";
  h.operation = operation;
  h.sequence = sequence;
  h.idle = idle;
  h.limit = 5;
  h.written = kNow - 0.5;
  return h;
}

}  // namespace

TEST_CASE("a rank's line is read back as it was, and nothing else is", "[watchdog]") {
  Heartbeat h = rank(3, "all_gather", 1234567, 2.5);
  h.pid = 4321;
  h.place = 0xdeadbeef;
  const std::string line = h.line();
  CHECK(line.size() == static_cast<size_t>(Heartbeat::kLineBytes));
  CHECK(line.back() == '\n');
  const Heartbeat back = Heartbeat::parse(line);
  CHECK(back.rank == 3);
  CHECK(back.step == 40);
  CHECK(back.phase == "step");
  CHECK(back.operation == "all_gather");
  CHECK(back.sequence == 1234567);
  CHECK(back.idle == 2.5);
  CHECK(back.limit == 5);
  CHECK(back.written == Approx(h.written).margin(1e-3));
  CHECK(back.pid == 4321);
  CHECK(back.place == 0xdeadbeef);
  CHECK(Heartbeat::parse("").rank == -1);
  CHECK(Heartbeat::parse(line.substr(0, 40)).rank == -1);
}

TEST_CASE("the rank that hangs is named", "[watchdog]") {
  // Stopped: its line is old, whatever it says.
  auto stopped = rank(2, "-", 90, 0.1);
  stopped.written = kNow - 8;
  CHECK_THAT(who_hangs({rank(0, "all_gather", 91, 6), rank(1, "all_gather", 91, 6), stopped}, 0, kNow, 5),
             Contains("rank 2 has not been heard of for 8 s (stopped or dead); last at step 40, phase step, in no operation"));
  // Alive and computing for ever.
  CHECK_THAT(who_hangs({rank(0, "all_gather", 91, 6), rank(1, "-", 90, 6)}, 0, kNow, 5), Contains("rank 1 computes without end"));
  // In another operation.
  CHECK_THAT(who_hangs({rank(0, "all_gather", 91, 6), rank(1, "barrier", 90, 6)}, 0, kNow, 5),
             Contains("rank 1 is behind, in another operation than the others: step 40, phase step, operation barrier (number 90)"));
  CHECK_THAT(who_hangs({rank(0, "all_gather", 91, 6), rank(1, "all_gather", 91, 6)}, 0, kNow, 5),
             Contains("all ranks wait for each other"));
}

TEST_CASE("ranks that wait for one that takes its time are not ended", "[watchdog]") {
  // Rank 0 evaluates, which may take longer.
  auto evaluating = rank(0, "-", 90, 60);
  evaluating.phase = "evaluate";
  evaluating.limit = 100;
  CHECK(who_hangs({evaluating, rank(1, "all_gather", 91, 60)}, 1, kNow, 5).empty());
  evaluating.idle = 101;
  CHECK_THAT(who_hangs({evaluating, rank(1, "all_gather", 91, 60)}, 1, kNow, 5), Contains("rank 0 computes without end"));
  // A straggler within its own limit.
  CHECK(who_hangs({rank(0, "-", 90, 4), rank(1, "all_gather", 91, 6)}, 1, kNow, 5).empty());
  // All save, which may take long; but for a rank that has stopped nobody waits longer than elsewhere.
  const auto saving = [](int number, double unheard) {
    auto h = rank(number, "-", 90, 20);
    h.phase = "save", h.limit = 100, h.written = kNow - unheard;
    return h;
  };
  CHECK(who_hangs({saving(0, 0.1), saving(1, 4.5)}, 0, kNow, 5).empty());
  CHECK_THAT(who_hangs({saving(0, 0.1), saving(1, 6)}, 0, kNow, 5), Contains("rank 1 has not been heard of for 6 s (stopped or dead)"));
  CHECK(who_hangs({saving(0, 0.1), saving(1, 2.5)}, 0, kNow, 1).empty());  // lines may be a moment old
}
