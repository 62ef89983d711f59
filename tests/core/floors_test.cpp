// A folder includes only folders on lower floors. Every #include of src/, tools/ and cuda/ is read.
#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

// cuda/ contains the GPU side of ops, comm and core and is reached only through the linker: it is above them,
// and nothing is above it.
const std::map<std::string, int> kFloors = {
    {"core", 0},       {"config", 1}, {"comm", 1}, {"ops", 1},   {"params", 2},   {"data", 2},
    {"checkpoint", 2}, {"cuda", 2},   {"nn", 3},   {"optim", 3}, {"analysis", 4}, {"train", 5},
    {"eval", 5},       {"plan", 6},   {"hf", 6},   {"run", 7},   {"tools", 8}};

/// Whether a file in folder `from` may include one in folder `to`.
bool allowed(const std::string& from, const std::string& to) {
  if (from == to) return true;
  if (to == "cuda") return false;
  if (from == "cuda") return to == "ops" || to == "comm" || to == "core";
  const auto a = kFloors.find(from), b = kFloors.find(to);
  return a != kFloors.end() && b != kFloors.end() && b->second < a->second;
}

/// The quoted include of a line, or nothing.
std::string included(const std::string& line) {
  size_t at = line.find_first_not_of(" \t");
  if (at == std::string::npos || line[at] != '#') return "";
  at = line.find_first_not_of(" \t", at + 1);
  if (at == std::string::npos || line.compare(at, 7, "include") != 0) return "";
  const size_t open = line.find('"', at), close = open == std::string::npos ? open : line.find('"', open + 1);
  return close == std::string::npos ? "" : line.substr(open + 1, close - open - 1);
}

std::string first_folder(const std::string& path) { return path.substr(0, path.find('/')); }

struct Include {
  std::string file, folder, target;
  std::string found;  // the included file, from the root; empty if it does not exist
  /// The folder that it lies in: src/nn/moe.h is of nn.
  std::string target_folder() const {
    return first_folder(found.starts_with("src/") ? found.substr(4) : found);
  }
};

/// Includes are rooted at src/; files of tools/ and cuda/ see their own folder as well.
std::string find_include(const fs::path& root, const std::string& folder, const std::string& target) {
  if (fs::exists(root / "src" / target)) return "src/" + target;
  if ((folder == "tools" || folder == "cuda") && fs::exists(root / folder / target))
    return folder + "/" + target;
  return "";
}

std::vector<Include> all_includes() {
  const fs::path root = SLUICE_SOURCE_DIR;
  const std::set<std::string> kSources = {".h", ".cpp", ".cu", ".cuh"};
  std::vector<Include> list;
  for (const char* top : {"src", "tools", "cuda"})
    for (const auto& entry : fs::recursive_directory_iterator(root / top)) {
      if (kSources.count(entry.path().extension().string()) == 0) continue;
      const std::string file = fs::relative(entry.path(), root).generic_string();
      const std::string folder = first_folder(file.starts_with("src/") ? file.substr(4) : file);
      std::ifstream stream(entry.path());
      for (std::string line; std::getline(stream, line);)
        if (const std::string target = included(line); !target.empty())
          list.push_back({file, folder, target, find_include(root, folder, target)});
    }
  return list;
}

}  // namespace

TEST_CASE("a folder includes only folders on lower floors", "[floors]") {
  for (const Include& i : all_includes()) {
    if (i.target == "emulation.h") continue;  // the emulator replaces the CUDA toolkit's headers
    INFO(i.file << " includes \"" << i.target << "\"");
    const bool fine = allowed(i.folder, i.target_folder());
    CHECK(fine);
  }
}

TEST_CASE("every folder of src has a floor, and every quoted include names a file of the repository",
          "[floors]") {
  const fs::path root = SLUICE_SOURCE_DIR;
  for (const auto& entry : fs::directory_iterator(root / "src")) {
    INFO(entry.path().filename());
    CHECK((!entry.is_directory() || kFloors.count(entry.path().filename().string()) == 1));
  }
  const auto includes = all_includes();
  CHECK(includes.size() > 50);
  for (const Include& i : includes) {
    if (i.target == "emulation.h") continue;
    INFO(i.file << " includes \"" << i.target << "\"");
    CHECK_FALSE(i.found.empty());
  }
}

TEST_CASE("the floors are those of the design", "[floors]") {
  CHECK(allowed("ops", "core"));
  CHECK(allowed("data", "config"));
  CHECK(allowed("train", "nn"));
  CHECK(allowed("train", "analysis"));
  CHECK(allowed("train", "checkpoint"));
  CHECK(allowed("hf", "eval"));
  CHECK(allowed("run", "plan"));
  CHECK(allowed("tools", "run"));
  CHECK(allowed("cuda", "ops"));
  CHECK_FALSE(allowed("core", "ops"));
  CHECK_FALSE(allowed("ops", "config"));
  CHECK_FALSE(allowed("config", "ops"));
  CHECK_FALSE(allowed("params", "data"));
  CHECK_FALSE(allowed("checkpoint", "data"));
  CHECK_FALSE(allowed("nn", "optim"));
  CHECK_FALSE(allowed("optim", "nn"));
  CHECK_FALSE(allowed("analysis", "train"));
  CHECK_FALSE(allowed("train", "eval"));
  CHECK_FALSE(allowed("eval", "train"));
  CHECK_FALSE(allowed("plan", "hf"));
  CHECK_FALSE(allowed("eval", "run"));
  CHECK_FALSE(allowed("train", "tools"));
  CHECK_FALSE(allowed("train", "cuda"));
  CHECK_FALSE(allowed("tools", "cuda"));
  CHECK_FALSE(allowed("cuda", "config"));
  CHECK(included("#include \"ops/gate.h\"") == "ops/gate.h");
  CHECK(included("  #  include \"ops/gate.h\"  // why") == "ops/gate.h");
  CHECK(included("#include <vector>").empty());
  CHECK(included("// #include \"ops/gate.h\"").empty());
  CHECK(included("const char* s = \"#include\";").empty());
}

TEST_CASE("ops include core and ops alone", "[floors]") {
  for (const Include& i : all_includes())
    if (i.folder == "ops") {
      INFO(i.file << " includes \"" << i.target << "\"");
      const std::string to = first_folder(i.target);
      CHECK((to == "core" || to == "ops"));
    }
}
