#include "checkpoint/compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string_view>

#include "checkpoint/stored_tensors.h"
#include "core/io.h"
#include "core/strict_json.h"

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

void compare_values(StoredTensors& stored_a, const StoredTensor& a, StoredTensors& stored_b,
                    const StoredTensor& b, TensorDifference& d) {
  d.elements = a.elements();
  if (a.bytes == 0) return;
  // Types below a byte are compared byte by byte.
  const int64_t size = std::max<int64_t>(a.bytes / d.elements, 1), count = a.bytes / size;
  const SafetensorsEntry entry{a.name, a.dtype, a.shape, 0, 0};
  std::vector<double> x, y;
  std::vector<unsigned char> joined_a, joined_b;  // for a chunk that spans several slices
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t n = std::min(kChunk, count - begin);
    const unsigned char* p = stored_a.read(a, begin * size, n * size, joined_a);
    const unsigned char* q = stored_b.read(b, begin * size, n * size, joined_b);
    if (std::memcmp(p, q, static_cast<size_t>(n * size)) == 0) continue;
    const bool numbers = read_values(p, entry, size, n, x) && read_values(q, entry, size, n, y);
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

/// The rank of a part of a name in the order of computation. Unknown parts follow in alphabetical order.
int order_of(std::string_view word) {
  constexpr std::string_view words[] = {"embed_tokens",
                                        "layers",
                                        "input_layernorm",
                                        "self_attn",
                                        "mlp_norm",
                                        "post_attention_layernorm",
                                        "pre_feedforward_layernorm",
                                        "mlp",
                                        "q_proj",
                                        "k_proj",
                                        "v_proj",
                                        "k_switch",
                                        "v_switch",
                                        "q_norm",
                                        "k_norm",
                                        "gate",
                                        "gate_proj",
                                        "shared_expert_gate",
                                        "shared_expert",
                                        "experts",
                                        "up_proj",
                                        "o_proj",
                                        "down_proj",
                                        "norm",
                                        "lm_head"};
  const auto found = std::find(std::begin(words), std::end(words), word);
  return static_cast<int>(found - std::begin(words));
}

/// Splits "model.layers.12.mlp" at its points.
std::vector<std::string_view> words_of(std::string_view name) {
  std::vector<std::string_view> words;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    words.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  if (words.size() > 1 && words[0] == "model") words.erase(words.begin());
  return words;
}

bool is_number(std::string_view word) {
  return !word.empty() && word.size() < 10 &&
         std::all_of(word.begin(), word.end(), [](char c) { return c >= '0' && c <= '9'; });
}

/// The tensors at a path, and its optimizer state if it has one.
struct Opened {
  StoredTensors weights;
  std::optional<StoredTensors> optimizer;
};

Opened open(const std::string& path) {
  if (!io::is_directory(path)) return {StoredTensors(path), {}};
  if (io::exists(path + "/" + kManifestName)) {
    const Manifest manifest = read_manifest(path);
    const auto of = [&](const char* kind) {
      return StoredTensors(path, manifest, kind, StoredTensors::Check::size);
    };
    return {of(kWeightsKind), of(kOptimizerKind)};
  }
  const std::string optimizer = path + "/" + shard_name(kOptimizerKind, 0, 1),
                    model = path + "/" + shard_name(kWeightsKind, 0, 1);
  Opened opened{io::exists(model) || !io::exists(path + "/" + kWeightsIndex)
                    ? StoredTensors(model)
                    : StoredTensors::from_index(path),
                {}};
  if (io::exists(optimizer)) opened.optimizer.emplace(optimizer);
  return opened;
}

void compare_all(const std::string& path_a, StoredTensors& a, const std::string& path_b, StoredTensors& b,
                 Comparison& all) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : a.tensors()) names.push_back(name);
  for (const auto& [name, tensor] : b.tensors())
    if (!a.find(name)) names.push_back(name);
  std::sort(names.begin(), names.end(), before_in_model);
  for (const std::string& name : names) {
    const StoredTensor *x = a.find(name), *y = b.find(name);
    TensorDifference d;
    d.name = printable(name);
    if (!x || !y) {
      d.problem = fmt::format("only in {}", x ? path_a : path_b);
    } else if (x->dtype != y->dtype || x->shape != y->shape) {
      d.problem = fmt::format("{} and {}", x->describe(), y->describe());
    } else if (!x->problem.empty() || !y->problem.empty()) {
      d.problem = fmt::format("in {}: {}", x->problem.empty() ? path_b : path_a,
                              x->problem.empty() ? y->problem : x->problem);
    } else {
      compare_values(a, *x, b, *y, d);
      ++all.tensors;
      all.elements += d.elements;
    }
    if (!d.problem.empty() || d.differing) all.differences.push_back(std::move(d));
  }
}

}  // namespace

int64_t Comparison::differing_elements() const {
  int64_t sum = 0;
  for (const TensorDifference& d : differences) sum += d.differing;
  return sum;
}

bool before_in_model(const std::string& a, const std::string& b) {
  const std::vector<std::string_view> x = words_of(a), y = words_of(b);
  for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
    if (x[i] == y[i]) continue;
    if (is_number(x[i]) && is_number(y[i])) {
      const int m = std::stoi(std::string(x[i])), n = std::stoi(std::string(y[i]));
      if (m != n) return m < n;
    }
    const int m = order_of(x[i]), n = order_of(y[i]);
    return m != n ? m < n : x[i] < y[i];
  }
  return x.size() != y.size() ? x.size() < y.size() : a < b;
}

Comparison compare_checkpoints(const std::string& a, const std::string& b) {
  Comparison all;
  Opened x = open(a), y = open(b);
  compare_all(a, x.weights, b, y.weights, all);
  if (x.optimizer && y.optimizer) compare_all(a, *x.optimizer, b, *y.optimizer, all);
  return all;
}

}  // namespace sluice
