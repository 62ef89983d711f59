// Communicators of one process: alone, and ranks as threads.
#include <catch2/catch.hpp>
#include <thread>

#include "comm/conformance.h"
#include "comm/threads.h"

using namespace sluice;
using namespace sluice::test;
using Catch::Contains;

TEST_CASE("a single rank", "[comm]") {
  const auto c = make_local_communicator();
  CHECK(c->size() == 1);
  check_communicator(*c);
}

TEST_CASE("ranks as threads pass the communicator conformance tests", "[comm]") {
  const int ranks = GENERATE(1, 2, 3, 4, 5, 8);
  INFO(ranks << " ranks");
  run_thread_ranks(ranks, [](Communicator& c) { check_communicator(c); });
}

TEST_CASE("a failing rank releases the others and is the one reported", "[comm]") {
  std::atomic<int> lost{0};
  CHECK_THROWS_WITH(
      run_thread_ranks(4,
                       [&](Communicator& c) {
                         c.barrier();
                         if (c.rank() == 2) throw std::runtime_error("rank 2 has a cold");
                         try {
                           c.barrier();
                         } catch (const Error& error) {
                           lost += error.code() == ExitCode::hang &&
                                   std::string(error.what()).find("lost rank 2: rank 2 has a cold") !=
                                       std::string::npos;
                           throw;
                         }
                       }),
      "rank 2 has a cold");
  CHECK(lost == 3);
}

TEST_CASE("waiting for a missing rank ends at the time limit", "[comm]") {
  CHECK_THROWS_WITH(run_thread_ranks(2,
                                     [](Communicator& c) {
                                       if (c.rank() == 1)
                                         std::this_thread::sleep_for(std::chrono::milliseconds(300));
                                       else
                                         c.barrier();
                                     },
                                     {.timeout_seconds = 0.05}),
                    Contains("rank 0 waited 0.05 s in barrier"));
}

TEST_CASE("mismatched operations are reported by name", "[comm]") {
  CHECK_THROWS_WITH(run_thread_ranks(2,
                                     [](Communicator& c) {
                                       int32_t x[2] = {}, y = 0;
                                       if (c.rank() == 0)
                                         c.barrier();
                                       else
                                         c.all_gather(x, &y, 4);
                                       c.barrier();
                                     }),
                    Contains("is in all_gather where rank") || Contains("is in barrier where rank"));
  CHECK_THROWS_WITH(run_thread_ranks(2,
                                     [](Communicator& c) {
                                       std::vector<char> x(64);
                                       c.broadcast(x.data(), 8 + c.rank(), 0);
                                     }),
                    Contains("broadcast: ranks") && Contains("disagree on sizes"));
}

TEST_CASE("impossible sizes and ranks are refused", "[comm]") {
  const auto c = make_local_communicator();
  char x[4];
  CHECK_THROWS_WITH(c->broadcast(x, -1, 0), "broadcast: -1 bytes");
  CHECK_THROWS_WITH(c->broadcast(x, 1, 1), "broadcast: rank 1 of 1");
  CHECK_THROWS_WITH(c->send(x, 1, 0), "send: to itself");
}

TEST_CASE("a mesh axis contains the ranks that differ only on it", "[comm]") {
  run_thread_ranks(12, [](Communicator& c) {
    for (const auto& [stride, size] : {std::pair{1, 1}, {1, 4}, {2, 3}, {4, 3}, {1, 12}, {6, 2}}) {
      const auto axis = c.axis(stride, size);
      std::vector<int> members(static_cast<size_t>(size)), expected;
      const int rank = c.rank();
      axis->all_gather(members.data(), &rank, sizeof rank);
      const int place = rank / stride % size;
      for (int i = 0; i < size; ++i) expected.push_back(rank + (i - place) * stride);
      // A dry communicator knows this without communication.
      const auto planned = make_dry_communicator(rank, 12)->axis(stride, size);
      if (members != expected || axis->rank() != place || planned->rank() != place || planned->size() != size)
        throw std::runtime_error(fmt::format("rank {}: axis of {}, {} apart", rank, size, stride));
    }
  });
  CHECK_THROWS_WITH(make_local_communicator()->axis(1, 2), "axis: 2 ranks, 1 apart, of 1");
}

TEST_CASE("dry communicators move nothing", "[comm]") {
  const auto c = make_dry_communicator(2, 4);
  CHECK(c->rank() == 2);
  CHECK(c->size() == 4);
  CHECK(c->name() == "dry");
  char x[16] = {};
  CHECK_THROWS_WITH(c->barrier(), "barrier: rank 2 of 4 does not exist; a dry run moves nothing");
  CHECK_THROWS_WITH(c->all_gather(x, x, 4), Contains("all_gather"));
  CHECK_THROWS_WITH(c->all_to_all(x, x, 4), Contains("does not exist"));
  CHECK_THROWS_WITH(c->broadcast(x, 4, 0), Contains("broadcast"));
  CHECK_THROWS_WITH(c->send(x, 4, 0), Contains("send"));
  CHECK_THROWS_WITH(c->receive(x, 4, 0), Contains("receive"));
  CHECK_THROWS_WITH(c->split(0, 0), Contains("split"));
  CHECK_THROWS_WITH(make_dry_communicator(4, 4), Contains("rank 4 of 4"));
}

TEST_CASE("a communicator counts its rank's waiting time, including communicators split from it", "[comm]") {
  run_thread_ranks(2, [](Communicator& c) {
    const auto part = c.axis(1, 2);
    const int64_t before = c.progress().total_ns;
    constexpr auto kLate = std::chrono::milliseconds(60);
    if (c.rank() == 1) std::this_thread::sleep_for(kLate);
    c.barrier();
    const int64_t waited = c.progress().total_ns - before;
    if (c.rank() == 1) std::this_thread::sleep_for(kLate);
    part->barrier();
    const int64_t twice = c.progress().total_ns - before;
    // The punctual rank waits for the late one, which does not wait.
    const int64_t late = std::chrono::nanoseconds(kLate).count();
    const bool right =
        c.rank() == 0 ? waited > late / 2 && twice > late + late / 2 && part->progress().total_ns > late / 2
                      : waited < late / 2 && twice < late;
    if (!right) throw std::runtime_error(fmt::format("rank {} waited {} and {} ns", c.rank(), waited, twice));
  });
}
