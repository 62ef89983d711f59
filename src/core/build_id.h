#pragma once
// Which build of the program and of its libraries this process runs.
#include <string>
#include <vector>

namespace sluice {

/// A file of code in memory, and the identifier that the linker derived from its contents
/// (.note.gnu.build-id), in hex.
struct LoadedCode {
  std::string name;  // of the file, without its folder; empty: the program itself
  std::string build_id;
};

/// The program first, then its shared libraries in the order they were loaded; those without an identifier
/// are left out.
std::vector<LoadedCode> loaded_code();
/// Of the program; "unknown" where the linker was not asked for one.
std::string program_build_id();

}  // namespace sluice
