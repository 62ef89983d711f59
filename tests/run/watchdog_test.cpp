// Finding the rank responsible for a hang from the heartbeats of all ranks.
#include "run/watchdog.h"

#include <catch2/catch.hpp>

using namespace sluice;
using Catch::Contains;

namespace {

Heartbeat rank(int r, const char* operation, int64_t sequence, double idle) {
  Heartbeat h;
  h.rank = r;
  h.step = 40;
  h.phase = "step";
  h.operation = operation;
  h.sequence = sequence;
  h.idle = idle;
  h.limit = 5;
  h.pid = 4321;
  h.unheard = 0.5;
  return h;
}

}  // namespace

TEST_CASE("a heartbeat line is read back exactly, and other lines are refused", "[watchdog]") {
  Heartbeat h = rank(3, "all_gather", 1234567, 2.5);
  h.beat = 77;
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
  CHECK(back.beat == 77);
  CHECK(back.pid == 4321);
  CHECK(back.place == 0xdeadbeef);
  CHECK(Heartbeat::parse("").rank == -1);
  CHECK(Heartbeat::parse(line.substr(0, 40)).rank == -1);
}

TEST_CASE("the hanging rank is reported", "[watchdog]") {
  // Stopped: its heartbeat is old.
  auto stopped = rank(2, "-", 90, 0.1);
  stopped.unheard = 8;
  CHECK_THAT(who_hangs({rank(0, "all_gather", 91, 6), rank(1, "all_gather", 91, 6), stopped}, 0, 5),
             Contains("rank 2 has not been heard of for 8 s (stopped or dead); last at step 40, phase step, "
                      "in no operation"));
  // Alive and computing forever.
  CHECK_THAT(who_hangs({rank(0, "all_gather", 91, 6), rank(1, "-", 90, 6)}, 0, 5),
             Contains("rank 1 computes without end"));
  // In another operation.
  CHECK_THAT(who_hangs({rank(0, "all_gather", 91, 6), rank(1, "barrier", 90, 6)}, 0, 5),
             Contains("rank 1 is behind, in another operation than the others: step 40, phase step, "
                      "operation barrier (number 90)"));
  CHECK_THAT(who_hangs({rank(0, "all_gather", 91, 6), rank(1, "all_gather", 91, 6)}, 0, 5),
             Contains("all ranks wait for each other"));
}

TEST_CASE("ranks that wait for a slow rank are not ended", "[watchdog]") {
  // Rank 0 evaluates, which may take longer.
  auto evaluating = rank(0, "-", 90, 60);
  evaluating.phase = "evaluate";
  evaluating.limit = 100;
  CHECK(who_hangs({evaluating, rank(1, "all_gather", 91, 60)}, 1, 5).empty());
  evaluating.idle = 101;
  CHECK_THAT(who_hangs({evaluating, rank(1, "all_gather", 91, 60)}, 1, 5),
             Contains("rank 0 computes without end"));
  // A straggler within its own limit.
  CHECK(who_hangs({rank(0, "-", 90, 4), rank(1, "all_gather", 91, 6)}, 1, 5).empty());
  // All save, which may take long; but a stopped rank is not waited for longer than in other phases.
  const auto saving = [](int number, double unheard) {
    auto h = rank(number, "-", 90, 20);
    h.phase = "save", h.limit = 100, h.unheard = unheard;
    return h;
  };
  CHECK(who_hangs({saving(0, 0.1), saving(1, 4.5)}, 0, 5).empty());
  CHECK_THAT(who_hangs({saving(0, 0.1), saving(1, 6)}, 0, 5),
             Contains("rank 1 has not been heard of for 6 s (stopped or dead)"));
  CHECK(who_hangs({saving(0, 0.1), saving(1, 2.5)}, 0, 1).empty());  // heartbeats may be slightly old
}

TEST_CASE("ranks that have ended, or have no watchdog, are not blamed for their silence", "[watchdog]") {
  auto unwatched = rank(0, "-", 90, 0);
  unwatched.pid = 0, unwatched.limit = 1e9, unwatched.unheard = 1000;
  CHECK(who_hangs({unwatched, rank(1, "all_gather", 91, 600)}, 1, 5).empty());
  auto ended = rank(0, "-", 90, 0);
  ended.pid = 0, ended.limit = 0, ended.unheard = 1000;
  CHECK_THAT(who_hangs({ended, rank(1, "-", 91, 600)}, 1, 5), Contains("rank 1 computes without end"));
}

TEST_CASE("heartbeats do not depend on the hosts' clocks", "[watchdog]") {
  // Two hosts with unrelated clocks; each heartbeat is read shortly after it was written.
  struct Host {
    double offset;
    WatchTime time;
    Listener listener;
    int64_t beat = 0;
  };
  const auto watch = [](double jump, double jump_at, double silent_from) {
    Host a{0, {}, {}}, b{1e9, {}, {}};
    double first = 0;
    for (double t = 0; t < 40; t += 0.25) {
      a.offset = t >= jump_at ? jump : 0;
      const double now_a = a.time.look(t + a.offset), now_b = b.time.look(t + b.offset);
      if (t < silent_from) ++b.beat;
      auto line_a = rank(0, "all_gather", 91, 6), line_b = rank(1, "all_gather", 91, 6);
      line_a.beat = ++a.beat;
      line_b.beat = b.beat;
      a.listener.hear(line_b, now_a);
      b.listener.hear(line_a, now_b);
      // Only silence counts here: both are within the limits of a long evaluation.
      line_a.limit = line_b.limit = 1e6;
      if (!who_hangs({line_a, line_b}, 0, 5).empty() && first == 0) first = t;
      line_b.unheard = 0;  // a rank always hears its own heartbeat
      CHECK(who_hangs({line_a, line_b}, 1, 5).empty());
    }
    return first;
  };
  constexpr double kNever = 1e9;
  for (const double jump : {0.0, 3600.0, -3600.0, 10.0, -10.0}) {
    CHECK(watch(jump, 12, kNever) == 0);                 // a healthy run
    CHECK(watch(jump, 12, 10) == Approx(15).margin(1));  // a stopped rank is still found after 5 s
  }
}

TEST_CASE("a rank that has not been heard of since the last progress has been silent since then", "[watchdog]") {
  Listener listener;
  auto line = rank(1, "all_gather", 91, 6);
  line.beat = 7;
  listener.restart(10);
  listener.hear(line, 11.25);  // heartbeats are read once the reader has waited for a second
  CHECK(line.unheard == Approx(1.25));
  listener.hear(line, 13);
  CHECK(line.unheard == Approx(3));
  line.beat = 8;
  listener.hear(line, 14);
  CHECK(line.unheard == 0);
  listener.hear(line, 15);
  CHECK(line.unheard == Approx(1));
}

TEST_CASE("time in which a rank was not running itself does not count against others", "[watchdog]") {
  WatchTime time;
  Listener listener;
  auto line = rank(1, "all_gather", 91, 6);
  line.beat = 1;
  listener.hear(line, time.look(100));
  listener.hear(line, time.look(100.25));
  CHECK(line.unheard == Approx(0.25));
  // Stopped for an hour, like the other.
  listener.hear(line, time.look(3700.25));
  CHECK(line.unheard == Approx(0.25 + WatchTime::kMost));
}
