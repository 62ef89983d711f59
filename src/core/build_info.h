#pragma once
// What this program was built from, and with.

namespace sluice {

struct BuildInfo {
  const char* version;     // "0.2.0"
  const char* commit;      // twelve digits, "-dirty" behind them where files differed; "unknown" without git
  const char* compiler;    // "GNU 12.2.0"
  const char* build_type;  // "Release"
  const char* instruction_sets;  // that the CPU kernels are compiled for: "baseline, avx2, avx512"
  const char* cuda;              // "off", "emulated on the CPU", "toolkit 13.0, architectures 80, 90a-real"
};
const BuildInfo& build_info();

}  // namespace sluice
