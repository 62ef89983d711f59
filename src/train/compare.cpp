#include "train/compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "core/io.h"
#include "train/safetensors.h"
#include "train/strict_json.h"

namespace sluice {
namespace {

constexpr int64_t kChunk = 1 << 16;

/// Values of a floating-point entry as f64; nothing for other types.
bool read_values(const unsigned char* from, const SafetensorsEntry& entry, int64_t size, int64_t count,
                 std::vector<double>& values) {
  if (!convertible(entry, DType::f64)) return false;
  values.resize(static_cast<size_t>(count));
  const SafetensorsEntry part{entry.name, entry.dtype, {count}, 0, count * size};
  convert_values(from, part, Tensor(values.data(), DType::f64, {count}));
  return true;
}

void compare_values(const SafetensorsFile& file_a, const SafetensorsEntry& a, const SafetensorsFile& file_b,
                    const SafetensorsEntry& b, TensorDifference& d) {
  d.elements = 1;
  for (const int64_t dim : a.shape) d.elements *= dim;
  const int64_t bytes = a.end - a.begin;
  if (bytes == 0 || std::memcmp(file_a.bytes(a), file_b.bytes(b), static_cast<size_t>(bytes)) == 0) return;
  // Types below a byte are compared byte by byte.
  const int64_t size = std::max<int64_t>(bytes / d.elements, 1), count = bytes / size;
  std::vector<double> x, y;
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t n = std::min(kChunk, count - begin);
    const unsigned char *p = file_a.bytes(a) + begin * size, *q = file_b.bytes(b) + begin * size;
    if (std::memcmp(p, q, static_cast<size_t>(n * size)) == 0) continue;
    const bool numbers = read_values(p, a, size, n, x) && read_values(q, b, size, n, y);
    for (int64_t i = 0; i < n; ++i) {
      if (std::memcmp(p + i * size, q + i * size, static_cast<size_t>(size)) == 0) continue;
      const auto at = static_cast<size_t>(i);
      if (d.differing++ == 0) {
        d.first = begin + i;
        if (numbers) d.value_a = x[at], d.value_b = y[at];
      }
      if (numbers) d.largest = std::max(d.largest, std::abs(x[at] - y[at]));
    }
  }
}

void compare_files(const std::string& path_a, const std::string& path_b, Comparison& all) {
  const SafetensorsFile a(path_a), b(path_b);
  std::set<std::string_view> names;
  for (const SafetensorsEntry& entry : a.entries()) names.insert(entry.name);
  for (const SafetensorsEntry& entry : b.entries()) names.insert(entry.name);
  for (const std::string_view name : names) {
    const SafetensorsEntry *x = a.find(name), *y = b.find(name);
    TensorDifference d;
    d.name = printable(name);
    if (!x || !y) {
      d.problem = fmt::format("only in {}", x ? path_a : path_b);
    } else if (x->dtype != y->dtype || x->shape != y->shape) {
      d.problem = fmt::format("{} and {}", describe(*x), describe(*y));
    } else {
      compare_values(a, *x, b, *y, d);
      ++all.tensors;
      all.elements += d.elements;
    }
    if (!d.problem.empty() || d.differing) all.differences.push_back(std::move(d));
  }
}

std::string file_in(const std::string& path, const char* name) {
  return io::is_directory(path) ? path + "/" + name : path;
}

}  // namespace

int64_t Comparison::differing_elements() const {
  int64_t sum = 0;
  for (const TensorDifference& d : differences) sum += d.differing;
  return sum;
}

Comparison compare_checkpoints(const std::string& a, const std::string& b) {
  Comparison all;
  compare_files(file_in(a, "model.safetensors"), file_in(b, "model.safetensors"), all);
  const std::string optim_a = a + "/optim.safetensors", optim_b = b + "/optim.safetensors";
  if (io::exists(optim_a) && io::exists(optim_b)) compare_files(optim_a, optim_b, all);
  return all;
}

}  // namespace sluice
