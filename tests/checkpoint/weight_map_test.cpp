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

TEST_CASE("transposed and interleaved tensors are gathered, whole and in slices", "[weight_map]") {
  const TemporaryFolder folder;
  const std::string path = write_file(folder);
  // packed (4, 2) is {0, 1; 2, 3; 4, 5; 6, 7}: its transpose without the first row, and its second column.
  WeightAdoption a;
  a.map.ignored = {"mtp.", "norm"};
  a.map.sources["t"] = {"packed", {4, 2}, {}, 0, WeightSource::Strides{2, 3, 1, 2}};
  a.map.sources["odd"] = {"packed", {4, 2}, {}, 0, WeightSource::Strides{1, 1, 2, 0}};
  std::vector<float> t(6), odd(4), part(3);
  load_weights(path,
               {{"t", Tensor(t.data(), DType::f32, {2, 3})}, {"odd", Tensor(odd.data(), DType::f32, {4})}},
               nullptr, nullptr, a);
  CHECK(t == std::vector<float>{2, 4, 6, 3, 5, 7});
  CHECK(odd == std::vector<float>{1, 3, 5, 7});
  const std::vector<TensorShape> whole = {{"t", {2, 3}, DType::f32}, {"odd", {4}, DType::f32}};
  for (int64_t begin = 0; begin <= 3; ++begin) {
    load_weights(path, {{"t", Tensor(part.data(), DType::f32, {3}), {2, 3}, begin}}, nullptr, &whole, a);
    CHECK(part == std::vector<float>(t.begin() + begin, t.begin() + begin + 3));
  }
}

TEST_CASE("matrices in MXFP4 are read row by row, whole and in slices", "[weight_map]") {
  const TemporaryFolder folder;
  // Two rows of 64 values: 16 different ones, low half of a byte first, with scales of 1, 2, 1/4 and 2^-126.
  std::vector<SafetensorsEntry> entries = {{"w_blocks", "U8", {2, 2, 16}}, {"w_scales", "U8", {2, 2}}};
  std::string bytes = make_safetensors_header(entries);
  for (int i = 0; i < 64; ++i) bytes.push_back(static_cast<char>(i % 8 * 2 % 16 + (i % 8 * 2 + 1) * 16));
  for (const int scale : {127, 128, 125, 1}) bytes.push_back(static_cast<char>(scale));
  const std::string path = folder / "model.safetensors";
  write_bytes(path, bytes);
  const std::vector<float> values = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6, 0, -0.5F, -1, -1.5F, -2, -3, -4, -6};
  const float scales[] = {1, 2, 0.25F, 0x1p-126F};
  WeightAdoption a;  // ours has the rows one by one
  for (const int64_t row : {0, 1})
    a.map.sources[row == 0 ? "first" : "second"] = {
        "w", {64, 2}, {}, 0, WeightSource::Strides{row, 64, 1, 2}, WeightSource::Mxfp4{{2, 2}, row, 2, 64}};
  std::vector<float> rows(128);
  const auto target = [&](const char* name, int64_t row) {
    return NamedTensor{name, Tensor(rows.data() + row * 64, DType::f32, {1, 64})};
  };
  const WeightReport report =
      load_weights(path, {target("first", 0), target("second", 1)}, nullptr, nullptr, a);
  CHECK(report.loaded == 2);
  for (size_t i = 0; i < 128; ++i) CHECK(rows[i] == values[i % 16] * scales[i / 32]);
  std::vector<float> part(40);
  const std::vector<TensorShape> whole = {{"first", {1, 64}, DType::f32}, {"second", {1, 64}, DType::f32}};
  load_weights(path, {{"second", Tensor(part.data(), DType::f32, {40}), {1, 64}, 11}}, nullptr, &whole, a);
  CHECK(part == std::vector<float>(rows.begin() + 75, rows.begin() + 115));

  a.map.sources["first"].mxfp4->scales = a.map.sources["second"].mxfp4->scales = {2, 3};
  CHECK_THROWS_WITH(load_weights(path, {target("first", 0), target("second", 1)}, nullptr, nullptr, a),
                    Catch::Contains("w_blocks"));
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
