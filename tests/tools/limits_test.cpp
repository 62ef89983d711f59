// Runs that do not fit into the machine are refused before they start, with real limits of memory and disk.
#include <sys/mount.h>
#include <sys/stat.h>

#include <fstream>

#include "tools/tiny_run.h"

namespace sluice {
namespace {

using Catch::Contains;
using test::Outcome;
using test::TinyRun;

/// The program under `ulimit -v`.
Outcome with_address_space(const TinyRun& t, int64_t mib, const std::vector<std::string>& arguments) {
  std::string command = fmt::format("ulimit -v {}; exec '{}'", mib << 10, std::getenv("SLUICE_BINARY"));
  for (const std::string& a : arguments) command += " '" + a + "'";
  const int status = std::system(
      ("(" + command + ") >" + t.folder / "limited.out" + " 2>" + t.folder / "limited.err").c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
          io::read_file(t.folder / "limited.out"), io::read_file(t.folder / "limited.err")};
}

const std::vector<std::string> kLarge = {"model.hidden_size=1024", "model.num_hidden_layers=6",
                                         "model.intermediate_size=4096", "train.max_steps=1",
                                         "eval.every_steps=0"};

}  // namespace

TEST_CASE("a run that exceeds ulimit is refused with remedies", "[limits]") {
  const TinyRun t;
  const Outcome refused = with_address_space(t, 900, t.train_arguments(kLarge));
  INFO(refused.out << refused.err);
  CHECK(refused.code == 71);
  CHECK_THAT(refused.err, Contains("of memory") && Contains("ulimit -v of 900.0 MiB") &&
                              Contains("optimizer") && Contains("saves") &&
                              Contains("train.micro_batch_size=") && Contains("train.check_limits=false"));
  CHECK_FALSE(io::exists(t.run));
  // As a warning; the allocation itself fails then, with the same code. (Where all but a little fits, it is a
  // library's own memory that is missing, and libraries end in their own ways.)
  std::vector<std::string> anyway = kLarge;
  anyway.push_back("train.check_limits=false");
  const Outcome warned = with_address_space(t, 900, t.train_arguments(anyway));
  INFO(warned.out << warned.err);
  CHECK_THAT(warned.out + warned.err, Contains("ulimit -v of 900.0 MiB"));
  CHECK(warned.code == 71);
  // A run that fits is not refused.
  CHECK(with_address_space(t, 900, t.train_arguments({"run_dir=" + t.folder / "fits"})).code == 0);
  const Outcome planned = with_address_space(t, 900, [&] {
    std::vector<std::string> plan = {"plan", t.config};
    plan.insert(plan.end(), kLarge.begin(), kLarge.end());
    return plan;
  }());
  CHECK(planned.code == 0);
  CHECK_THAT(planned.out, Contains("DOES NOT FIT") && Contains("ulimit -v of 900.0 MiB"));
}

TEST_CASE("a control group's limit is detected before the kernel kills the process", "[limits]") {
  // The process's own group of version 1 or 2, in which a new one is created.
  std::string own;
  for (const char* controller : {"/sys/fs/cgroup/memory", "/sys/fs/cgroup"}) {
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; own.empty() && std::getline(groups, line);) {
      const bool v1 =
          line.find(":memory:") != std::string::npos && controller == std::string("/sys/fs/cgroup/memory");
      const bool v2 = line.rfind("0::", 0) == 0 && controller == std::string("/sys/fs/cgroup");
      if (v1 || v2) own = controller + line.substr(line.rfind(':') + 1);
    }
    if (!own.empty()) break;
  }
  const std::string group = own + "/sluice_test_" + std::to_string(getpid());
  const bool made = !own.empty() && ::mkdir(group.c_str(), 0755) == 0;
  const std::string limit =
      io::exists(group + "/memory.max") ? group + "/memory.max" : group + "/memory.limit_in_bytes";
  if (made) std::ofstream(limit) << (int64_t{300} << 20) << "\n";
  int64_t set = 0;
  if (made) std::ifstream(limit) >> set;
  if (set != int64_t{300} << 20) {
    if (made) ::rmdir(group.c_str());
    WARN(
        "skipped: no control group with a memory limit can be made here (root and a writable hierarchy are "
        "needed)");
    return;
  }
  const TinyRun t;
  std::string command =
      "echo $$ >" + group + "/cgroup.procs; exec '" + std::string(std::getenv("SLUICE_BINARY")) + "'";
  std::vector<std::string> arguments = t.train_arguments(kLarge);
  for (const std::string& a : arguments) command += " '" + a + "'";
  test::write_bytes(t.folder / "in_group.sh", command + "\n");
  const int status = std::system(("sh " + t.folder / "in_group.sh >" + t.folder / "out" + " 2>&1").c_str());
  ::rmdir(group.c_str());
  const std::string out = io::read_file(t.folder / "out");
  INFO(out);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 71);
  CHECK_THAT(out, Contains("control group's limit of 300.0 MiB") && Contains("saves"));
}

TEST_CASE("insufficient disk space for checkpoints is reported before step 0", "[limits]") {
  const TinyRun t;
  const std::string disk = t.folder / "disk";
  io::make_directories(disk);
  if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=4m") != 0) {
    WARN("skipped: a small file system cannot be mounted here (root is needed)");
    return;
  }
  const auto train = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = {"--run-dir", disk + "/runs/a", "model.hidden_size=64",
                                    "model.intermediate_size=256"};
    all.insert(all.end(), more.begin(), more.end());
    return t.train(all);
  };
  const Outcome refused = train({"checkpoint.keep_last=3"});
  const bool left = io::exists(disk + "/runs");
  const Outcome fits = t.train({"--run-dir", disk + "/runs/b"});
  const Outcome anyway = train({"checkpoint.keep_last=3", "train.check_limits=false"});
  ::umount(disk.c_str());
  INFO(refused.out << refused.err << anyway.err << fits.err);
  CHECK(refused.code == 73);
  CHECK_THAT(refused.err, Contains("of disk space") && Contains("3 checkpoints kept") &&
                              Contains("checkpoint.keep_last=1") && Contains("quota"));
  CHECK_FALSE(left);
  CHECK_THAT(anyway.out + anyway.err, Contains("of disk space"));
  CHECK(fits.code == 0);
}

}  // namespace sluice
