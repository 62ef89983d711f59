#include "checkpoint/compare.h"

#include <catch2/catch.hpp>
#include <fstream>

#include "checkpoint/safetensors.h"
#include "support/temp_folder.h"

using namespace sluice;
using Catch::Matchers::Contains;

namespace {

void write_floats(const std::string& path, const std::string& name, const std::vector<float>& values) {
  std::vector<SafetensorsEntry> entries = {{name, "F32", {std::ssize(values)}}};
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << make_safetensors_header(entries);
  file.write(reinterpret_cast<const char*>(values.data()), std::ssize(values) * 4);
}

}  // namespace

TEST_CASE("checkpoints are compared bit by bit", "[compare]") {
  const TempFolder folder;
  std::vector<float> values(200000, 1.0f);
  values[5] = 0.0f;
  io::make_directories(folder / "a");
  io::make_directories(folder / "b");
  const std::string a = folder / "a/model.safetensors", b = folder / "b/model.safetensors";
  write_floats(a, "w", values);
  write_floats(b, "w", values);
  Comparison c = compare_checkpoints(folder / "a", folder / "b");
  CHECK(c.differences.empty());
  CHECK(c.tensors == 1);
  CHECK(c.elements == 200000);

  values[5] = -0.0f;  // an equal number with other bits
  values[150000] = 1.5f;
  values[199999] = 0.75f;
  write_floats(b, "w", values);
  c = compare_checkpoints(a, folder / "b");
  REQUIRE(c.differences.size() == 1);
  CHECK(c.differences[0].name == "w");
  CHECK(c.differences[0].first == 5);
  CHECK(c.differences[0].largest == 0.5);
  CHECK(c.differing_elements() == 3);

  write_floats(b, "v", values);
  c = compare_checkpoints(a, b);
  REQUIRE(c.differences.size() == 2);
  CHECK_THAT(c.differences[0].problem, Contains("only in " + b));
  CHECK_THAT(c.differences[1].problem, Contains("only in " + a));
  write_floats(b, "w", {1, 2});
  c = compare_checkpoints(a, b);
  REQUIRE(c.differences.size() == 1);
  CHECK(c.differences[0].problem == "(200000) F32 and (2) F32");

  write_floats(b, "w", std::vector<float>(200000, 1.0f));
  write_floats(folder / "a/optim.safetensors", "w.m", {1, 2, 3});
  CHECK(compare_checkpoints(folder / "a", folder / "b").differences.size() == 1);
  write_floats(folder / "b/optim.safetensors", "w.m", {1, 2, 4});
  CHECK(compare_checkpoints(folder / "a", folder / "b").differences.size() == 2);
}
