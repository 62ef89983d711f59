// A .safetensors file as a source of weights: its header, the reading and converting of every tensor,
// comparing, and loading into a model. The mutator changes the header as JSON and mostly keeps its length,
// and the offsets of all tensors, right.
#include "checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "checkpoint/compare.h"
#include "checkpoint/store.h"
#include "checkpoint/stored_tensors.h"
#include "core/strict_json.h"
#include "support/stored.h"

namespace sluice::fuzz {
namespace {

using Json = nlohmann::ordered_json;

std::string changed(const std::string& file, size_t most, Random& random) {
  if (file.size() < 10 || random.one_in(8)) return mutated(file, most);
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  const std::string header = file.substr(8, std::min<uint64_t>(length, file.size() - 8));
  std::string text = mutated_json(header, most / 2, random);
  Json json = Json::parse(text, nullptr, false);
  if (json.is_object() && !random.one_in(6)) {
    for (auto& [name, tensor] : json.items())
      if (tensor.is_object() && tensor.contains("data_offsets") && !random.one_in(20))
        tensor["data_offsets"] = "*";
    const std::string out = safetensors_of(json.dump(-1, ' ', false, Json::error_handler_t::replace));
    if (out.size() <= most) return out;
  }
  length = text.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return (out + text + file.substr(std::min(file.size(), 8 + header.size()))).substr(0, most);
}

/// Tensors that a model would have, if it were of the shapes of the file.
class Model {
 public:
  explicit Model(const std::vector<SafetensorsEntry>& entries, DType dtype) {
    for (const SafetensorsEntry& entry : entries) {
      if (entry.shape.empty() || entry.shape.size() > 4) continue;
      // A model's own names are words.
      if (printable(entry.name, entry.name.size()) != entry.name) continue;
      Tensor tensor;
      tensor.dtype = dtype;
      tensor.rank = static_cast<int>(entry.shape.size());
      std::copy(entry.shape.begin(), entry.shape.end(), tensor.shape.begin());
      memory_.emplace_back(new char[static_cast<size_t>(std::max<int64_t>(tensor.bytes(), 1))]);
      tensor.data = memory_.back().get();
      weights_.push_back({entry.name, tensor});
    }
  }
  const std::vector<NamedTensor>& weights() const { return weights_; }

 private:
  std::vector<std::unique_ptr<char[]>> memory_;
  std::vector<NamedTensor> weights_;
};

/// What our own writer makes of the same tensors is read back as them.
void check_written(std::vector<SafetensorsEntry> entries) {
  if (std::any_of(entries.begin(), entries.end(),
                  [](const auto& e) { return safetensors_bits(e.dtype) < 8; }))
    return;
  std::vector<SafetensorsEntry> sorted = entries;
  std::string file = make_safetensors_header(sorted);
  expect(file.size() % 64 == 0, "the data of a written file are not aligned");
  for (const SafetensorsEntry& entry : sorted)
    file.resize(file.size() + static_cast<size_t>(entry.end - entry.begin));
  std::vector<SafetensorsEntry> again;
  must("a file that was written is refused", [&] {
    again =
        parse_safetensors(reinterpret_cast<const unsigned char*>(file.data()), std::ssize(file), "written")
            .entries;
  });
  expect(again.size() == entries.size(), "tensors are lost in writing");
  const auto by_name = [](const auto& a, const auto& b) { return a.name < b.name; };
  std::sort(again.begin(), again.end(), by_name);
  std::sort(entries.begin(), entries.end(), by_name);
  for (size_t i = 0; i < again.size(); ++i)
    expect(again[i].name == entries[i].name && again[i].dtype == entries[i].dtype &&
               again[i].shape == entries[i].shape,
           "a tensor changes in writing");
}

}  // namespace
}  // namespace sluice::fuzz

using namespace sluice;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<SafetensorsEntry> entries;
  const bool accepted = fuzz::attempt(
      [&] { entries = parse_safetensors(data, static_cast<int64_t>(size), "model.safetensors").entries; });
  fuzz::write("model.safetensors", fuzz::text_of(data, size));
  const bool mapped = fuzz::attempt([&] {
    StoredTensors stored("model.safetensors");
    std::vector<unsigned char> buffer;
    static volatile unsigned sum;  // so that every byte is read
    for (const auto& [name, tensor] : stored.tensors()) {
      fuzz::expect(tensor.problem.empty(), "a tensor of an accepted file is incomplete: " + tensor.problem);
      if (tensor.bytes == 0) continue;
      const unsigned char* bytes = stored.read(tensor, 0, tensor.bytes, buffer);
      for (int64_t i = 0; i < tensor.bytes; ++i) sum = sum + bytes[i];
    }
  });
  fuzz::expect(mapped == accepted, "a file in memory and the same file mapped are read differently");
  if (!accepted) return 0;
  fuzz::attempt([&] { fuzz::check_written(entries); });
  fuzz::attempt([&] {
    const Comparison same = compare_checkpoints("model.safetensors", "model.safetensors");
    fuzz::expect(same.differences.empty(), "a file differs from itself");
  });
  // Every element has at least a bit in the file, so a model of its shapes is at most 64 times as large.
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64, DType::u8})
    fuzz::attempt([&] {
      const fuzz::Model model(entries, dtype);
      load_weights("model.safetensors", model.weights());
    });
  return 0;
}

SLUICE_FUZZ_MUTATOR(::sluice::fuzz::changed(text, most, random))
