#pragma once
// Identifies the build of the program and of its libraries that this process runs.
#include <string>
#include <vector>

namespace sluice {

/// A loaded executable or library and the identifier that the linker derived from its contents
/// (.note.gnu.build-id), in hex.
struct LoadedCode {
  std::string name;  // file name without its folder; empty for the program itself
  std::string build_id;
};

/// The program, then its shared libraries in the order they were loaded. Those without an identifier are left
/// out.
std::vector<LoadedCode> loaded_code();
/// The identifier of the program; "unknown" if it was linked without one.
std::string program_build_id();

}  // namespace sluice
