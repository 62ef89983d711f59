// A switch over one of our enums has no default, so that adding a value is a compile error at every place
// that must handle it. The compilers of all builds make a missing value an error; this reads the sources for
// defaults, of device code too, which nvcc's own front end does not check.
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

/// The outermost level of the block that opens at or after `begin`, without the contents of inner blocks.
std::string outermost(const std::string& text, size_t begin) {
  std::string level;
  int depth = 0;
  for (size_t i = text.find('{', begin); i < text.size(); ++i) {
    if (text[i] == '}' && --depth == 0) break;
    if (depth == 1) level += text[i];
    if (text[i] == '{') ++depth;
  }
  return level;
}

/// The first text of switches over scoped enumerators that have a default.
std::vector<std::string> switches_with_default(const std::string& text) {
  static const std::regex scoped(R"(\bcase\s+[\w:]*\w::\w+\s*:)"), fallback(R"(\bdefault\s*:)");
  std::vector<std::string> found;
  for (size_t at = text.find("switch ("); at != std::string::npos; at = text.find("switch (", at + 1)) {
    const std::string cases = outermost(text, at);
    if (std::regex_search(cases, scoped) && std::regex_search(cases, fallback))
      found.push_back(text.substr(at, text.find('\n', at) - at));
  }
  return found;
}

}  // namespace

TEST_CASE("no switch over one of Sluice's enums has a default", "[enums]") {
  CHECK(switches_with_default("switch (a) {\n case A::x: { return 1; }\n default: return 2;\n}").size() == 1);
  CHECK(switches_with_default(
            "switch (a) {\n case A::x: switch (n) { case 1: default: f(); }\n case A::y: return 2;\n}")
            .empty());
  CHECK(switches_with_default("switch (n) {\n case SIGTERM: return 1;\n default: return 2;\n}").empty());
  const fs::path root = SLUICE_SOURCE_DIR;
  int files = 0;
  for (const char* top : {"src", "tools", "cuda", "tests"})
    for (const auto& entry : fs::recursive_directory_iterator(root / top)) {
      const std::string extension = entry.path().extension().string();
      if (extension != ".h" && extension != ".cpp" && extension != ".cu" && extension != ".cuh") continue;
      if (entry.path().filename() == "enum_switch_test.cpp") continue;
      ++files;
      std::ostringstream text;
      text << std::ifstream(entry.path()).rdbuf();
      for (const std::string& found : switches_with_default(text.str())) {
        INFO(fs::relative(entry.path(), root).generic_string() << ": " << found);
        CHECK(false);
      }
    }
  CHECK(files > 300);
}
