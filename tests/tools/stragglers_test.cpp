// A rank under mpirun that is slowed down in every step is reported, without effect on the results.
#include "comm/mpi.h"
#include "tools/tiny_run.h"

namespace sluice {

TEST_CASE("a slow rank is reported on the console, and the results keep their bits", "[ranks][stragglers]") {
  if (!built_with_mpi() || std::system("command -v mpirun >/dev/null") != 0) {
    WARN("skipped: no MPI");
    return;
  }
  using test::Program;
  const test::TinyRun t;
  const auto arguments = [&](const std::string& run) {
    return std::vector<std::string>{"train",
                                    t.config,
                                    "--run-dir",
                                    run,
                                    "train.micro_batch_size=1",
                                    "train.global_batch_size=8",
                                    "train.max_steps=45",
                                    "log.every_steps=5",
                                    "checkpoint.every_steps=0",
                                    "data.validation=[]"};
  };
  const std::string quiet = t.folder / "quiet", slow = t.folder / "slow";
  REQUIRE(Program(t.folder.path, arguments(quiet), {}, 2).wait().code == 0);
  // Much longer than a step takes even on a busy machine.
  const test::Outcome outcome = Program(t.folder.path, arguments(slow), {{"SLUICE_SLOW", "1:60"}}, 2).wait();
  INFO(outcome.out << outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK_THAT(outcome.out + outcome.err, Catch::Contains("rank 1 computes ") &&
                                            Catch::Contains("times as long as the median of 2 ranks"));
  CHECK((outcome.out + outcome.err).find("rank 0 computes") == std::string::npos);
  const test::Outcome same =
      t.sluice({"checkpoint", "diff", quiet + "/ckpt/step_00000045", slow + "/ckpt/step_00000045"});
  INFO(same.out << same.err);
  CHECK(same.code == 0);
  CHECK(t.curve(slow) == t.curve(quiet));
}

}  // namespace sluice
