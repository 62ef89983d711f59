// The second law of the house: a folder includes only folders on lower floors. Every #include of src/ and
// tools/ is read.
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

const std::map<std::string, int> kFloors = {{"core", 0},   {"config", 1},   {"comm", 1}, {"ops", 1},
                                            {"params", 2}, {"data", 2},     {"nn", 3},   {"optim", 3},
                                            {"train", 4},  {"analysis", 4}, {"tools", 5}};

/// May a file of room `from` include one of room `to`?
bool allowed(const std::string& from, const std::string& to) {
  if (from == to) return true;
  if (from == "train" && to == "analysis") return true;  // the trainer reports what analysis measures
  const auto a = kFloors.find(from), b = kFloors.find(to);
  return a != kFloors.end() && b != kFloors.end() && b->second < a->second;
}

/// What a line includes in quotes, or nothing.
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
  std::string file, room, target;
};

std::vector<Include> all_includes() {
  const fs::path root = SLUICE_SOURCE_DIR;
  std::vector<Include> list;
  for (const char* top : {"src", "tools"}) {
    if (!fs::exists(root / top)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / top)) {
      const std::string extension = entry.path().extension().string();
      if (extension != ".h" && extension != ".cpp") continue;
      const std::string file = fs::relative(entry.path(), root).generic_string();
      const std::string room = first_folder(file) == "tools" ? "tools" : first_folder(file.substr(4));
      std::ifstream stream(entry.path());
      for (std::string line; std::getline(stream, line);)
        if (const std::string target = included(line); !target.empty()) list.push_back({file, room, target});
    }
  }
  return list;
}

}  // namespace

TEST_CASE("a room includes only rooms on lower floors", "[floors]") {
  for (const Include& i : all_includes()) {
    INFO(i.file << " includes \"" << i.target << "\"");
    // A bare name is a neighbour: only tools, which are no room, have those.
    const std::string to = i.target.find('/') == std::string::npos ? i.room : first_folder(i.target);
    const bool fine = allowed(i.room, to);
    CHECK(fine);
  }
}

TEST_CASE("every folder of src has a floor, and every quoted include names a file from src", "[floors]") {
  const fs::path root = SLUICE_SOURCE_DIR;
  for (const auto& entry : fs::directory_iterator(root / "src")) {
    INFO(entry.path().filename());
    CHECK((!entry.is_directory() || kFloors.count(entry.path().filename().string()) == 1));
  }
  const auto includes = all_includes();
  CHECK(includes.size() > 50);
  for (const Include& i : includes) {
    INFO(i.file << " includes \"" << i.target << "\"");
    const bool exists = fs::exists(root / "src" / i.target) ||
                        (i.room == "tools" && fs::exists(root / "tools" / fs::path(i.target).filename()));
    CHECK(exists);
  }
}

TEST_CASE("the floors are those of the design", "[floors]") {
  CHECK(allowed("ops", "core"));
  CHECK(allowed("data", "config"));
  CHECK(allowed("train", "nn"));
  CHECK(allowed("train", "analysis"));
  CHECK(allowed("tools", "train"));
  CHECK_FALSE(allowed("core", "ops"));
  CHECK_FALSE(allowed("ops", "config"));
  CHECK_FALSE(allowed("config", "ops"));
  CHECK_FALSE(allowed("params", "data"));
  CHECK_FALSE(allowed("nn", "optim"));
  CHECK_FALSE(allowed("optim", "nn"));
  CHECK_FALSE(allowed("analysis", "train"));
  CHECK_FALSE(allowed("train", "tools"));
  CHECK_FALSE(allowed("train", "cuda"));
  CHECK(included("#include \"ops/gate.h\"") == "ops/gate.h");
  CHECK(included("  #  include \"ops/gate.h\"  // why") == "ops/gate.h");
  CHECK(included("#include <vector>").empty());
  CHECK(included("// #include \"ops/gate.h\"").empty());
  CHECK(included("const char* s = \"#include\";").empty());
}

TEST_CASE("operations do not reach for configuration, whatever the include looks like", "[floors]") {
  for (const Include& i : all_includes())
    if (i.room == "ops") {
      INFO(i.file << " includes \"" << i.target << "\"");
      const std::string to = first_folder(i.target);
      CHECK((to == "core" || to == "ops"));
    }
}
