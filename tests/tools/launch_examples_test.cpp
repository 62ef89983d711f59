// The scripts of configs/launch with a fake scheduler: what they start, and how they react to its exit code.
#include "comm/mpi.h"
#include "tools/tiny_run.h"

namespace sluice {
namespace {

using Catch::Contains;

const std::string kScripts = SLUICE_SOURCE_DIR "/configs/launch/";

/// A folder with programs that shadow the real ones of these names.
struct Fakes {
  test::TemporaryFolder folder;
  std::string log = folder / "log.txt";

  void program(const std::string& name, const std::string& body) const {
    test::write_bytes(folder / name, "#!/bin/bash\n" + body + "\n");
    REQUIRE(std::system(("chmod +x " + folder.path + "/" + name).c_str()) == 0);
  }
  struct Result {
    int code;
    std::string text;
  };
  Result run(const std::string& command, const std::string& environment = "") const {
    const int code = std::system(("cd " + folder.path + " && : >log.txt && PATH=" + folder.path +
                                  ":$PATH SLURM_JOB_ID=42 " + environment + " " + command + " >>log.txt 2>&1")
                                     .c_str());
    return {WEXITSTATUS(code), io::read_file(log)};
  }
};

}  // namespace

TEST_CASE("the launcher scripts are valid shell", "[launch]") {
  const bool shellcheck = std::system("command -v shellcheck >/dev/null") == 0;
  for (const char* name : {"slurm.sbatch", "slurm_mpirun.sbatch", "one_node.sh", "several_nodes.sh"}) {
    INFO(name);
    CHECK(std::system(("bash -n " + kScripts + name).c_str()) == 0);
    if (shellcheck) CHECK(std::system(("shellcheck " + kScripts + name).c_str()) == 0);
  }
}

TEST_CASE("a Slurm job is requeued after a stop or a lost rank, and not after an error", "[launch]") {
  const Fakes fakes;
  fakes.program("srun", "echo srun \"$@\"; exit ${ENDS_WITH:-0}");
  fakes.program("scontrol", "echo scontrol \"$@\"");
  const std::string job = "bash " + kScripts + "slurm.sbatch x.yaml optimizer.lr=1e-3";
  const auto ended = [&](int status, const std::string& more = "") {
    const auto result =
        fakes.run(job, "SLURM_CPUS_PER_TASK=3 ENDS_WITH=" + std::to_string(status) + " " + more);
    CHECK(result.code == status);
    return result.text;
  };
  CHECK_THAT(ended(0), Contains("srun --mpi=pmix --kill-on-bad-exit=1 build/sluice train x.yaml "
                                "train.threads=3 optimizer.lr=1e-3"));
  for (const int status : {0, 64, 65, 70, 71, 74, 78})
    CHECK(ended(status).find("scontrol") == std::string::npos);
  for (const int status : {75, 76, 137}) CHECK_THAT(ended(status), Contains("scontrol requeue 42"));
  // Unlimited restarts after a stop with a save, which Slurm counts like all others; a limited number after
  // lost ranks, counted from the last such stop.
  const std::string much = "SLURM_RESTART_COUNT=9 SLUICE_RESTARTS=2",
                    losses = fakes.folder / "sluice-42.losses";
  for (const int status : {75, 76, 137, 75, 76, 137}) {
    CHECK_THAT(ended(status, much), Contains("scontrol requeue 42"));
    CHECK(io::exists(losses) == (status != 75));
  }
  const std::string last = ended(76, much);
  CHECK_THAT(last, Contains("exit status 76 after 2 restarts without a stop that saved: not again"));
  CHECK(last.find("scontrol") == std::string::npos);
  // Who queues it again by hand has as many restarts as before.
  CHECK_FALSE(io::exists(losses));
  CHECK_THAT(ended(76, much), Contains("scontrol requeue 42"));
  for (const int status : {0, 70}) {
    ended(status);
    CHECK_FALSE(io::exists(losses));
  }
  // What cannot be counted would be restarted forever.
  io::make_directories(losses);
  CHECK_THAT(ended(76), Contains("losses cannot be counted in sluice-42.losses: not again"));
}

TEST_CASE("a Slurm job under mpirun counts losses from its last stop that saved", "[launch]") {
  const Fakes fakes;
  fakes.program("mpirun", "exit $ENDS_WITH");
  fakes.program("scontrol", "echo scontrol \"$@\"");
  const auto ended = [&](int status) {
    const auto result =
        fakes.run("bash " + kScripts + "slurm_mpirun.sbatch x.yaml",
                  fmt::format("SLURM_NTASKS=4 SLURM_RESTART_COUNT=9 SLUICE_RESTARTS=1 ENDS_WITH={}", status));
    CHECK(result.code == status);
    return result.text;
  };
  for (const int status : {76, 75, 137}) CHECK_THAT(ended(status), Contains("scontrol requeue 42"));
  const std::string last = ended(76);
  CHECK_THAT(last, Contains("exit status 76 after 1 restarts without a stop that saved: not again"));
  CHECK(last.find("scontrol") == std::string::npos);
  CHECK(ended(0).find("scontrol") == std::string::npos);
}

TEST_CASE("a Slurm job under mpirun forwards its signal and waits for the save", "[launch]") {
  const Fakes fakes;
  fakes.program("mpirun",
                "trap 'sleep 0.2; echo saved; exit 75' USR1\necho mpirun \"$@\"\nfor i in $(seq 200); do "
                "sleep 0.05; done");
  fakes.program("scontrol", "echo scontrol \"$@\"");
  const auto job = [&](const char* signal) {
    return fakes.run(
        "bash -c 'bash " + kScripts +
            "slurm_mpirun.sbatch x.yaml & job=$!; while ! grep -q mpirun log.txt; do sleep 0.02; done; " +
            "kill -" + signal + " $job; wait $job'",
        "SLURM_NTASKS=4 SLURM_CPUS_PER_TASK=2");
  };
  const auto stopped = job("USR1");
  CHECK(stopped.code == 75);
  CHECK_THAT(stopped.text, Contains("mpirun -n 4 --bind-to none build/sluice train x.yaml train.threads=2") &&
                               Contains("saved") && Contains("scontrol requeue 42"));
  const auto cancelled = job("TERM");
  CHECK(cancelled.code == 75);
  CHECK_THAT(cancelled.text, Contains("saved") && Contains("exit status 75: cancelled"));
  CHECK(cancelled.text.find("scontrol") == std::string::npos);
}

TEST_CASE("the examples for mpirun train on two ranks", "[launch][ranks]") {
  if (!built_with_mpi() ||
      std::system("command -v mpirun >/dev/null && command -v python3 >/dev/null") != 0) {
    WARN("skipped: no MPI, or no Python");
    return;
  }
  const test::TinyRun t;
  const Fakes fakes;
  const std::string program = std::string("SLUICE=") + std::getenv("SLUICE_BINARY");
  const std::string more = " " + t.config + " train.micro_batch_size=1 run_dir=";
  const auto one = fakes.run(kScripts + "one_node.sh 2" + more + (t.folder / "one"), program);
  INFO(one.text);
  CHECK(one.code == 0);
  CHECK_THAT(one.text, Contains("ranks    2 (mpi)"));
  // The same machine named by a host file: comments and a missing count of slots included.
  test::write_bytes(fakes.folder / "hosts", "# two\nlocalhost slots=2  # here\n\n");
  const auto several =
      fakes.run(kScripts + "several_nodes.sh hosts 1" + more + (t.folder / "several"), program);
  INFO(several.text);
  CHECK(several.code == 0);
  CHECK_THAT(several.text, Contains("ranks    2 (mpi)") && Contains("1 thread,"));
  fakes.program("mpirun", "echo mpirun \"$@\"");
  test::write_bytes(fakes.folder / "hosts", "a slots=4\nb\n#c slots=8\n  d slots=2 max_slots=2\n");
  CHECK_THAT(fakes.run(kScripts + "several_nodes.sh hosts 1" + more + (t.folder / "fake"), program).text,
             Contains("--hostfile hosts --map-by slot --bind-to none -n 7"));
}

}  // namespace sluice
