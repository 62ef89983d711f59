#include "core/build_id.h"

#include <fmt/core.h>

#include <cstring>

#if defined(__linux__)
#include <elf.h>
#include <link.h>
#endif

namespace sluice {

#if defined(__linux__)
namespace {

constexpr size_t aligned4(size_t n) { return (n + 3) / 4 * 4; }

/// The build identifier among the notes of a segment; empty if there is none.
std::string find_build_id(const char* notes, size_t bytes) {
  for (size_t at = 0; at + sizeof(ElfW(Nhdr)) <= bytes;) {
    ElfW(Nhdr) note;
    std::memcpy(&note, notes + at, sizeof note);
    const size_t name = at + sizeof note, content = name + aligned4(note.n_namesz);
    at = content + aligned4(note.n_descsz);
    if (at > bytes) break;
    if (note.n_type != NT_GNU_BUILD_ID || note.n_namesz != 4 || std::memcmp(notes + name, "GNU", 4) != 0)
      continue;
    std::string hex;
    for (size_t i = 0; i < note.n_descsz; ++i)
      hex += fmt::format("{:02x}", static_cast<unsigned char>(notes[content + i]));
    return hex;
  }
  return "";
}

int add_code(dl_phdr_info* info, size_t, void* list) {
  const std::string path = info->dlpi_name;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_NOTE) continue;
    const std::string id =
        find_build_id(reinterpret_cast<const char*>(info->dlpi_addr + segment.p_vaddr), segment.p_memsz);
    if (id.empty()) continue;
    static_cast<std::vector<LoadedCode>*>(list)->push_back({path.substr(path.rfind('/') + 1), id});
    break;
  }
  return 0;
}

}  // namespace

std::vector<LoadedCode> loaded_code() {
  std::vector<LoadedCode> code;
  dl_iterate_phdr(add_code, &code);
  return code;
}

#else

std::vector<LoadedCode> loaded_code() { return {}; }

#endif

std::string program_build_id() {
  for (const LoadedCode& code : loaded_code())
    if (code.name.empty()) return code.build_id;
  return "unknown";
}

}  // namespace sluice
