// A sample of the nightly scripts/faults: kills, full disks, damage, signals, deaths, hangs, healing,
// layouts. Also checks that its planted bugs still fit the sources.
#include <sys/wait.h>

#include "comm/mpi.h"
#include "tools/program.h"

using namespace sluice;

TEST_CASE("faults of every kind cost training on several ranks only time", "[faults]") {
  if (!built_with_mpi() ||
      std::system("command -v mpirun >/dev/null && command -v python3 >/dev/null") != 0) {
    WARN("skipped: no MPI, or no Python");
    return;
  }
  const test::TemporaryFolder folder;
  const std::string log = folder / "log";
  // Time limits assume an idle machine; here builds may run at the same time.
  const int status =
      std::system((SLUICE_SOURCE_DIR "/scripts/faults mutants --quick >" + log +
                   " 2>&1 && " SLUICE_SOURCE_DIR "/scripts/faults --quick --slack 10 >>" + log + " 2>&1")
                      .c_str());
  INFO(io::read_file(log));
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}
