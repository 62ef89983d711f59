// A rank under mpirun that is held back again and again is named, and the training does not notice.
#include <atomic>

#include "comm/mpi.h"
#include "tools/tiny_run.h"

namespace sluice {

TEST_CASE("a slow rank is named on the console, and the training's bits are what they were", "[ranks][stragglers]") {
  if (!built_with_mpi() || std::system("command -v mpirun >/dev/null") != 0) {
    WARN("skipped: no MPI");
    return;
  }
  using test::Program;
  const test::TinyRun t;
  const auto arguments = [&](const std::string& run) {
    return std::vector<std::string>{"train", t.config, "--run-dir", run, "train.micro_batch_size=1", "train.global_batch_size=8",
                                    "model.hidden_size=96", "model.intermediate_size=256", "data.seq_len=64", "train.max_steps=70",
                                    "log.every_steps=10", "checkpoint.every_steps=0", "data.validation=[]"};
  };
  const std::string quiet = t.folder / "quiet", slow = t.folder / "slow";
  REQUIRE(Program(t.folder.path, arguments(quiet), {}, 2).wait().code == 0);

  Program started(t.folder.path, arguments(slow), {}, 2);
  REQUIRE(test::wait_until([&] { return io::exists(slow + "/status.json"); }));
  const auto pid = nlohmann::json::parse(io::read_file(slow + "/status.json")).at("pid").get<pid_t>();
  std::atomic<bool> over{false};
  // Rank 0 is stopped half of the time.
  std::thread brake([&] {
    while (!over) {
      kill(pid, SIGSTOP);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      kill(pid, SIGCONT);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  const test::Outcome outcome = started.wait();
  over = true;
  brake.join();
  INFO(outcome.out << outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK_THAT(outcome.out + outcome.err, Catch::Contains("rank 0 computes ") && Catch::Contains("times as long as the median of 2 ranks"));
  CHECK(t.bits(slow, 70) == t.bits(quiet, 70));
  CHECK(t.curve(slow) == t.curve(quiet));
}

}  // namespace sluice
