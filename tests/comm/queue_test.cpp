// Communication that overlaps computation, or alternates with it if no thread can be started.
#include "comm/queue.h"

#include <catch2/catch.hpp>
#include <cstdlib>

using namespace sluice;

TEST_CASE("a queue without a thread does the same work in the same order", "[queue]") {
  const bool threadless = GENERATE(false, true);
  if (threadless) setenv("SLUICE_THREADFAIL", "1", 1);
  CommQueue queue;
  unsetenv("SLUICE_THREADFAIL");
  CHECK(queue.problem().empty() != threadless);
  const auto alone = make_local_communicator();
  const auto queued = queue.queued(*alone);
  std::vector<int> order;
  CHECK_FALSE(queue.serving());
  const auto first = queue.post([&] {
    order.push_back(1);
    CHECK(queue.serving());
    queued->barrier();  // called from work in the queue
    order.push_back(2);
  });
  const auto second = queue.post([&] { order.push_back(3); });
  queue.wait(second);
  queue.wait(first);
  queued->barrier();
  CHECK(order == std::vector<int>{1, 2, 3});
  queue.post([] { fail(ExitCode::data, "broken"); });
  queue.post([&] { order.push_back(4); });
  CHECK_THROWS_WITH(queue.wait_all(), "broken");
  CHECK(order.size() == 3);
}
