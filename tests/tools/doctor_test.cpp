// sluice doctor on several ranks, and its advice when they cannot see each other.
#include "core/device.h"
#include "support/no_mpi.h"
#include "tools/tiny_run.h"

namespace sluice {
namespace {

using Catch::Contains;
using test::count_of;
using test::no_mpi;
using test::Outcome;
using test::Program;

}  // namespace

TEST_CASE("doctor under mpirun checks all ranks and reports once", "[doctor][ranks]") {
  if (no_mpi()) return;
  const test::TemporaryFolder folder;
  const std::string runs = folder / "runs";
  const Outcome outcome =
      Program(folder.path, {"doctor", "--run-dir", runs}, {{"OMP_NUM_THREADS", "1"}}, 2).wait();
  INFO(outcome.out << outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK(count_of(outcome.out, "\nranks\n") == 1);
  CHECK(count_of(outcome.out, "\nprocessor\n") == 1);
  CHECK_THAT(outcome.out,
             Contains("mpirun of Open MPI") && Contains("(OMPI_COMM_WORLD_SIZE=2); mpi sees 2 ranks"));
  CHECK_THAT(outcome.out, Contains("OMPI_COMM_WORLD_RANK=0") && Contains("OMP_NUM_THREADS=1"));
  CHECK_THAT(outcome.out, Contains("ranks 0-1, 2 threads, "));
  CHECK_THAT(outcome.out, Contains("program") && Contains(" on all"));
  CHECK_THAT(outcome.out, Contains("clocks") && Contains("of rank 0's"));
  CHECK_THAT(outcome.out, Contains(runs + ": shared: all ranks see files written by rank 0"));
  CHECK(io::list_directory(runs).empty());           // nothing is left behind
  const int times = cuda_devices().empty() ? 2 : 4;  // from GPU to GPU once more
  CHECK(count_of(outcome.out, "64 KiB") == times);
  CHECK(count_of(outcome.out, "4 MiB") == times);
}

TEST_CASE("doctor reports ranks that do not share the folder, and ranks bound to one core",
          "[doctor][ranks]") {
  if (no_mpi()) return;
  const test::TemporaryFolder folder;
  // Each rank has its own working folder, and all are bound to the first core.
  const std::string script = folder / "rank";
  test::write_bytes(script, "mkdir -p " + folder.path + "/$OMPI_COMM_WORLD_RANK && cd " + folder.path +
                                "/$OMPI_COMM_WORLD_RANK && exec taskset -c 0 " +
                                std::getenv("SLUICE_BINARY") + " doctor --run-dir here\n");
  const std::string out = folder / "out.txt";
  const int code = std::system(
      ("OMP_NUM_THREADS=1 " SLUICE_SOURCE_DIR "/tests/support/mpirun 2 sh " + script + " >" + out + " 2>&1")
          .c_str());
  INFO(io::read_file(out));
  REQUIRE(code == 0);
  CHECK_THAT(io::read_file(out), Contains("warning: ranks 1 do not see files written by rank 0"));
  CHECK_THAT(io::read_file(out),
             Contains("warning: ranks are bound to the same core (mpirun --bind-to none)"));
}

TEST_CASE("doctor in processes that Slurm started without PMIx gives advice, once", "[doctor]") {
  if (!built_with_mpi()) return;
  const test::TemporaryFolder folder;
  const auto process = [&](const char* number) {
    return Program(folder.path, {"doctor"},
                   {{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", number}, {"SLURM_STEP_ID", "0"}})
        .wait();
  };
  const Outcome first = process("0"), second = process("1");
  CHECK(first.code == 64);
  CHECK_THAT(first.out,
             Contains("srun (SLURM_NTASKS=4)") && Contains("SLURM_PROCID=0") && Contains("processor"));
  CHECK_THAT(first.err, Contains("srun started 4 processes without PMIx") && Contains("srun --mpi=pmix") &&
                            Contains("mpirun inside sbatch"));
  CHECK(second.code == 64);
  CHECK(second.out + second.err == "");
  // A process of the batch script itself also has Slurm's variables, and is a single rank.
  const Outcome batch =
      Program(folder.path, {"doctor"}, {{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}}).wait();
  CHECK(batch.code == 0);
  CHECK_THAT(batch.out, !Contains("srun (SLURM"));
  // A single process does not need PMIx.
  CHECK(
      Program(folder.path, {"doctor"}, {{"SLURM_NTASKS", "1"}, {"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", "0"}})
          .wait()
          .code == 0);
}

}  // namespace sluice
