// Tensors that another program names and orders differently, loaded whole and in slices.
#include "checkpoint/weight_map.h"

#include <catch2/catch.hpp>

#include "checkpoint/safetensors.h"
#include "checkpoint/store.h"
#include "core/error.h"
#include "core/io.h"
#include "data/temporary.h"

using namespace sluice;
using namespace sluice::test;

namespace {

/// A file with packed (4, 2) = 0..7 in bf16, norm (2) = -0.5, 0.25 and mtp.x (1).
std::string write_file(const TemporaryFolder& folder) {
  std::vector<SafetensorsEntry> entries = {
      {"packed", "BF16", {4, 2}}, {"norm", "F32", {2}}, {"mtp.x", "F32", {1}}};
  std::string bytes = make_safetensors_header(entries);
  for (const SafetensorsEntry& entry : entries) {
    if (entry.name == "packed") {
      for (int i = 0; i < 8; ++i) {
        const bf16 value(static_cast<float>(i));
        bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
      }
      continue;
    }
    for (const float value : entry.name == "norm" ? std::vector<float>{-0.5F, 0.25F} : std::vector<float>{9})
      bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  const std::string path = folder / "model.safetensors";
  write_bytes(path, bytes);
  return path;
}

WeightAdoption adoption() {
  WeightAdoption a;
  a.map.ignored = {"mtp."};
  // Rows 0 and 2 are ours, rows 1 and 3 another tensor's.
  a.map.sources["q"] = {"packed", {4, 2}, {{0, 2}, {4, 2}}, 0};
  a.map.sources["g"] = {"packed", {4, 2}, {{2, 2}, {6, 2}}, 0};
  a.map.sources["norm"] = {"norm", {2}, {}, 1.0};
  return a;
}

}  // namespace

TEST_CASE("packed tensors are taken apart, and norms shifted", "[weight_map]") {
  const TemporaryFolder folder;
  const std::string path = write_file(folder);
  std::vector<float> q(4), g(4), norm(2);
  const auto tensor = [](std::vector<float>& values, std::initializer_list<int64_t> shape) {
    return Tensor(values.data(), DType::f32, shape);
  };
  const std::vector<NamedTensor> all = {
      {"q", tensor(q, {2, 2})}, {"g", tensor(g, {2, 2})}, {"norm", tensor(norm, {2})}};
  const WeightReport report = load_weights(path, all, nullptr, nullptr, adoption());
  CHECK(q == std::vector<float>{0, 1, 4, 5});
  CHECK(g == std::vector<float>{2, 3, 6, 7});
  CHECK(norm == std::vector<float>{0.5F, 1.25F});
  CHECK(report.loaded == 3);
  CHECK(report.ignored == std::vector<std::string>{"mtp.x"});

  // A slice that crosses the pieces.
  std::vector<float> part(2);
  const std::vector<TensorShape> whole = {
      {"q", {2, 2}, DType::f32}, {"g", {2, 2}, DType::f32}, {"norm", {2}, DType::f32}};
  load_weights(path, {{"q", tensor(part, {2}), {2, 2}, 1}}, nullptr, &whole, adoption());
  CHECK(part == std::vector<float>{1, 4});
}

TEST_CASE("what may be missing keeps its values, and anything else is an error", "[weight_map]") {
  const TemporaryFolder folder;
  const std::string path = write_file(folder);
  std::vector<TensorShape> whole = {{"q", {2, 2}, DType::f32},
                                    {"g", {2, 2}, DType::f32},
                                    {"norm", {2}, DType::f32},
                                    {"new", {1}, DType::f32}};
  WeightAdoption a = adoption();
  CHECK_THROWS_WITH(compare_weights(path, whole, a), Catch::Contains("missing: new"));
  a.may_be_missing = [](const std::string& name) { return name == "new"; };
  CHECK(compare_weights(path, whole, a).missing == std::vector<std::string>{"new"});
  std::vector<float> kept = {3};
  load_weights(path, {{"new", Tensor(kept.data(), DType::f32, {1})}}, nullptr, &whole, a);
  CHECK(kept[0] == 3);
  a.map.ignored.clear();
  CHECK_THROWS_WITH(compare_weights(path, whole, a), Catch::Contains("unexpected: mtp.x"));
  a = adoption();
  a.map.sources["q"].shape = {6, 2};
  whole.pop_back();
  CHECK_THROWS_WITH(compare_weights(path, whole, a), Catch::Contains("packed"));
}
