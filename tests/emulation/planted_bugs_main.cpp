// planted_bugs_VARIANT BUG: runs one planted bug under SLUICE_EMULATION_SEED. Exit status: 0 nothing noticed,
// 1 wrong results, 2 reported by the emulator, 3 usage; a sanitizer report ends the program with another
// status.
#include <algorithm>
#include <cstdio>

#include "planted_bugs.h"
#include "seam.h"

int main(int argc, char** argv) {
  using namespace sluice::cuda;
  const auto found =
      argc == 2 ? std::find(kBugNames.begin(), kBugNames.end(), std::string(argv[1])) : kBugNames.end();
  if (found == kBugNames.end()) return 3;
  try {
    const bool right = results_are_right(static_cast<Bug>(found - kBugNames.begin()));
    std::puts(right ? "nothing noticed" : "wrong results");
    return right ? 0 : 1;
  } catch (const emu::LaunchError& e) {
    std::puts(e.what());
    return 2;
  }
}
