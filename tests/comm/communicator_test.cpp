// Communicators of one process: alone, and ranks as threads.
#include <catch2/catch.hpp>
#include <thread>

#include "comm/conformance.h"
#include "comm/threads.h"

using namespace sluice;
using namespace sluice::test;
using Catch::Contains;

TEST_CASE("One rank alone", "[comm]") {
  const auto c = make_local_communicator();
  CHECK(c->size() == 1);
  check_communicator(*c);
}

TEST_CASE("Ranks as threads do what every communicator must", "[comm]") {
  const int ranks = GENERATE(1, 2, 3, 4, 5, 8);
  INFO(ranks << " ranks");
  run_thread_ranks(ranks, [](Communicator& c) { check_communicator(c); });
}

TEST_CASE("A rank that fails releases the others, and is the one reported", "[comm]") {
  std::atomic<int> lost{0};
  CHECK_THROWS_WITH(run_thread_ranks(4,
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

TEST_CASE("A rank that never comes is waited for no longer than agreed", "[comm]") {
  CHECK_THROWS_WITH(run_thread_ranks(
                        2,
                        [](Communicator& c) {
                          if (c.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
                          else c.barrier();
                        },
                        {.timeout_seconds = 0.05}),
                    Contains("rank 0 waited 0.05 s in barrier"));
}

TEST_CASE("Operations that do not match are told apart by name", "[comm]") {
  CHECK_THROWS_WITH(run_thread_ranks(2,
                                     [](Communicator& c) {
                                       int32_t x[2] = {}, y = 0;
                                       if (c.rank() == 0) c.barrier();
                                       else c.all_gather(x, &y, 4);
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

TEST_CASE("Sizes and ranks that cannot be are refused", "[comm]") {
  const auto c = make_local_communicator();
  char x[4];
  CHECK_THROWS_WITH(c->broadcast(x, -1, 0), "broadcast: -1 bytes");
  CHECK_THROWS_WITH(c->broadcast(x, 1, 1), "broadcast: rank 1 of 1");
  CHECK_THROWS_WITH(c->send(x, 1, 0), "send: to itself");
}
