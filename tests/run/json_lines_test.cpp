#include "run/json_lines.h"

#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>

#include "data/temporary.h"

namespace sluice {
namespace {

nlohmann::ordered_json line(int64_t step) {
  return {{"schema", 1}, {"step", step}, {"loss", 0.1 * static_cast<double>(step)}};
}

}  // namespace

TEST_CASE("metrics are appended, and cut at the step a run resumes from", "[metrics]") {
  test::TemporaryFolder folder;
  const std::string path = folder / "metrics.jsonl";
  {
    JsonLines lines(path, 0);
    CHECK(lines.last_step() == -1);
    for (const int64_t step : {10, 20, 30}) lines.append(line(step));
    CHECK(lines.last_step() == 30);
  }
  const std::string all = io::read_file(path);
  {
    JsonLines lines(path, 30);
    CHECK(io::read_file(path) == all);
  }
  JsonLines lines(path, 20);
  CHECK(lines.last_step() == 20);
  lines.append(line(25));
  CHECK(io::read_file(path) == line(10).dump() + "\n" + line(20).dump() + "\n" + line(25).dump() + "\n");
}

TEST_CASE("a torn last line disappears", "[metrics]") {
  test::TemporaryFolder folder;
  const std::string path = folder / "metrics.jsonl";
  test::write_bytes(path, line(10).dump() + "\n" + line(20).dump().substr(0, 15));
  JsonLines lines(path, 100);
  CHECK(io::read_file(path) == line(10).dump() + "\n");
}

TEST_CASE("a full disk costs lines, not the training, and later lines are whole", "[metrics]") {
  test::TemporaryFolder folder;
  const std::string path = folder / "metrics.jsonl";
  JsonLines lines(path, 0);
  lines.append(line(1));
  setenv("SLUICE_IOFAIL", "1:ENOSPC", 1);
  lines.append(line(2));
  unsetenv("SLUICE_IOFAIL");
  lines.append(line(3));
  const JsonLines again(path, 100);
  CHECK(io::read_file(path) == line(1).dump() + "\n" + line(3).dump() + "\n");
}

TEST_CASE("lines that are no record of a step are removed, whatever they hold", "[metrics]") {
  test::TemporaryFolder folder;
  const std::string path = folder / "metrics.jsonl", whole = line(10).dump() + "\n";
  for (const std::string wrong :
       {"null\n", "[1]\n", "{\"step\":\"10\"}\n", "{\"layers\":[{\"step\":3}]}\n", "{\"step\":3,\n", "\n"}) {
    test::write_bytes(path, wrong + whole + wrong);
    const JsonLines lines(path, 100);
    CHECK(io::read_file(path) == whole);
    CHECK(lines.last_step() == 10);
  }
  test::write_bytes(path, whole + line(20).dump());  // only the end of the line is missing
  const JsonLines lines(path, 100);
  CHECK(io::read_file(path) == whole + line(20).dump() + "\n");
}

TEST_CASE("a log file above 1 GiB can be continued", "[metrics]") {
  test::TemporaryFolder folder;
  const std::string path = folder / "metrics.jsonl";
  test::write_bytes(path, line(10).dump() + "\n");
  std::filesystem::resize_file(path, (uintmax_t{1} << 30) + 4096);  // with zeros that take no space
  {
    std::ofstream file(path, std::ios::app);
    file << "\n" << line(20).dump() << "\n";
  }
  const JsonLines lines(path, 100);
  CHECK(lines.last_step() == 20);
  CHECK(io::read_file(path) == line(10).dump() + "\n" + line(20).dump() + "\n");
}

}  // namespace sluice
