// The table of planted bugs: each is caught, and this says by what. The bug-free kernels are clean in every
// variant.
#include "planted_bugs.h"

#include <sys/wait.h>

#include <catch2/catch.hpp>
#include <cstdio>
#include <cstdlib>

namespace sluice::cuda {
namespace {

struct Finding {
  int status;
  std::string output;
};

/// What the variant's program says about the bug; environment: "NAME=VALUE ".
Finding run(const std::string& variant, Bug bug, int seed, const std::string& environment = "") {
  const std::string program = variant == "plain"  ? SLUICE_PLANTED_plain
                              : variant == "asan" ? SLUICE_PLANTED_asan
                                                  : SLUICE_PLANTED_tsan;
  const std::string command =
      environment + "SLUICE_EMULATION_THREADS=1 SLUICE_EMULATION_SEED=" + std::to_string(seed) +
      " ASAN_OPTIONS=detect_leaks=0:exitcode=66 TSAN_OPTIONS=halt_on_error=1:exitcode=66 " +
      (variant == "tsan" ? SLUICE_RUN_TSAN " " : "") + program + " " + kBugNames[static_cast<size_t>(bug)] +
      " 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe);
  Finding f{};
  char buffer[512];
  while (std::fgets(buffer, sizeof buffer, pipe)) f.output += buffer;
  const int status = pclose(pipe);
  f.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  REQUIRE(f.status != 3);
  REQUIRE(f.status != 127);
  return f;
}

constexpr int kSeeds = 4;

bool plain_catches(Bug bug) {
  for (int seed = 0; seed < kSeeds; ++seed)
    if (run("plain", bug, seed).status != 0) return true;
  return false;
}

/// The variant must catch the bug, and its output must contain the text.
void check_caught(const std::string& variant, Bug bug, const std::string& text) {
  INFO(kBugNames[static_cast<size_t>(bug)] << " in the " << variant << " build");
  const Finding f = run(variant, bug, 0);
  INFO(f.output);
  CHECK(f.status != 0);
  CHECK(f.output.find(text) != std::string::npos);
}

TEST_CASE("Kernels without a bug are clean in every variant and schedule", "[planted]") {
  for (int seed = 0; seed < kSeeds; ++seed)
    for (const char* variant : {"plain", "asan", "tsan"}) {
      const Finding f = run(variant, Bug::none, seed);
      INFO(variant << ", seed " << seed << ": " << f.output);
      CHECK(f.status == 0);
    }
}

TEST_CASE("planted logic bugs are caught by a plain build, in order or in some schedule", "[planted]") {
  for (const Bug bug :
       {Bug::missing_barrier, Bug::missing_second_barrier, Bug::missing_syncwarp, Bug::shared_out_of_bounds,
        Bug::cp_async_wait_off_by_one, Bug::missing_refill_barrier, Bug::early_release, Bug::wrong_phase,
        Bug::wrong_byte_count, Bug::skipped_empty_wait}) {
    INFO(kBugNames[static_cast<size_t>(bug)]);
    CHECK(plain_catches(bug));
  }
  check_caught("plain", Bug::global_out_of_bounds, "outside of every allocation");
  check_caught("plain", Bug::wrong_byte_count, "deadlock");
  check_caught("plain", Bug::shared_out_of_bounds, "past the end of a static shared variable");
}

TEST_CASE("planted out-of-bounds and misaligned accesses are caught by AddressSanitizer and UBSan",
          "[planted]") {
  check_caught("asan", Bug::global_out_of_bounds, "heap-buffer-overflow");
  check_caught("asan", Bug::shared_out_of_bounds, "out of bounds");
  check_caught("asan", Bug::misaligned_vector, "misaligned address");
  check_caught("asan", Bug::less_aligned_shared, "misaligned address");
}

TEST_CASE("Planted races are caught by ThreadSanitizer in the very first schedule", "[planted]") {
  for (const Bug bug :
       {Bug::missing_barrier, Bug::missing_second_barrier, Bug::missing_syncwarp, Bug::missing_refill_barrier,
        Bug::early_release, Bug::missing_proxy_fence, Bug::non_atomic_add})
    check_caught("tsan", bug, "ThreadSanitizer: data race");
}

TEST_CASE("a planted read of another stream's work is caught where streams are late", "[planted]") {
  const std::string late = "SLUICE_EMULATION_STREAMS=late ";
  CHECK(run("plain", Bug::none, 0, late).status == 0);
  CHECK(run("plain", Bug::missing_stream_wait, 0, late).status == 1);
  CHECK(run("plain", Bug::missing_stream_wait, 0).status == 0);  // done at once, it is there
}

}  // namespace
}  // namespace sluice::cuda
