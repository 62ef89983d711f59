// Runs the Python tests in this folder, each as one case.
#include <cstdlib>

#include "core/io.h"
#include "data/temporary.h"

namespace sluice {
namespace {

void run_python_test(const std::string& name) {
  if (std::system("command -v python3 >/dev/null") != 0) {
    WARN("skipped: no Python");
    return;
  }
  test::TemporaryFolder folder;
  const std::string command =
      fmt::format("python3 {}/tests/tools/{} > {} 2>&1", SLUICE_SOURCE_DIR, name, folder / "out");
  const int code = WEXITSTATUS(std::system(command.c_str()));
  INFO(io::read_file(folder / "out"));
  CHECK(code == 0);
}

}  // namespace

// Spread over seeds, differences, rank correlation, spikes, rows of the papers.
TEST_CASE("the numbers of a report are right on synthetic runs", "[report]") {
  run_python_test("report_numbers_test.py");
}

// Texts of equal names, options that take values, sweep files that would write commands.
TEST_CASE("scripts withstand hostile and unusual input", "[scripts]") { run_python_test("scripts_test.py"); }

// Mutations of every file that a report and a sweep read.
TEST_CASE("scripts report damage by file and line", "[scripts]") { run_python_test("damage_test.py"); }

// Outcomes, tables and resumption of scripts/faults gates; the explorer of crash states.
TEST_CASE("release gates never count what failed or was not run as kept", "[gates]") {
  run_python_test("gates_test.py");
}

// Links, headings and source files that documents name; the length of the front page.
TEST_CASE("documents name what exists", "[documents]") { run_python_test("documents_test.py"); }

}  // namespace sluice
