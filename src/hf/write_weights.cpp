#include "hf/write_weights.h"

#include <map>
#include <vector>

#include "checkpoint/safetensors.h"
#include "checkpoint/stored_tensors.h"

namespace sluice {
namespace {

/// The tensors of a checkpoint that make up one tensor of the file.
struct Parts {
  std::vector<const StoredTensor*> tensors;
  std::vector<const WeightSource*> sources;  // nullptr: the whole tensor as it is
};

DType dtype_of(const std::string& name) {
  return name == "BF16" ? DType::bf16 : name == "F64" ? DType::f64 : DType::f32;
}

/// Puts the values of one part where the file wants them.
void place(const unsigned char* values, const StoredTensor& from, const WeightSource* source,
           const std::string& dtype, std::vector<unsigned char>& out) {
  const int64_t size = safetensors_bits(from.dtype) / 8, out_size = safetensors_bits(dtype) / 8;
  const auto convert = [&](const unsigned char* data, const std::string& type, int64_t at, int64_t count) {
    const int64_t bytes = count * safetensors_bits(type) / 8;
    convert_values(data, {from.name, type, {count}, 0, bytes},
                   Tensor(out.data() + at * out_size, dtype_of(dtype), {count}));
  };
  const auto put = [&](int64_t first, int64_t at, int64_t count) {
    if (!source || source->plus == 0) return convert(values + first * size, from.dtype, at, count);
    std::vector<double> changed(static_cast<size_t>(count));
    convert_values(values + first * size, {from.name, from.dtype, {count}, 0, count * size},
                   Tensor(changed.data(), DType::f64, {count}));
    for (double& x : changed) x -= source->plus;
    convert(reinterpret_cast<const unsigned char*>(changed.data()), "F64", at, count);
  };
  if (source && source->strides) {
    std::vector<unsigned char> converted(static_cast<size_t>(from.elements() * out_size));
    convert_values(values, {from.name, from.dtype, {from.elements()}, 0, from.elements() * size},
                   Tensor(converted.data(), dtype_of(dtype), {from.elements()}));
    source->strides->for_each(0, from.elements(), [&](int64_t i, int64_t at) {
      copy_element(out.data() + at * out_size, converted.data() + i * out_size, out_size);
    });
    return;
  }
  if (!source || source->runs.empty()) return put(0, 0, from.elements());
  int64_t first = 0;
  for (const WeightSource::Run& run : source->runs) {
    put(first, run.begin, run.count);
    first += run.count;
  }
}

}  // namespace

void write_weights(const std::string& checkpoint, const Manifest& manifest, const WeightMap& map,
                   const std::string& dtype, io::NewFile& file) {
  StoredTensors stored(checkpoint, manifest, kWeightsKind, StoredTensors::Check::checksum);
  std::map<std::string, Parts> parts;
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, tensor] : stored.tensors()) {
    const WeightSource* source = map.find(name);
    const std::string& target = source ? source->name : name;
    Parts& all = parts[target];
    if (all.tensors.empty())
      entries.push_back(
          {target, dtype.empty() ? tensor.dtype : dtype, source ? source->shape : tensor.shape});
    all.tensors.push_back(&tensor);
    all.sources.push_back(source);
  }
  const std::string header = make_safetensors_header(entries);
  file.write(header.data(), std::ssize(header));
  std::vector<unsigned char> buffer, out;
  for (const SafetensorsEntry& entry : entries) {
    const Parts& all = parts.at(entry.name);
    const StoredTensor& first = *all.tensors[0];
    if (!all.sources[0] && first.dtype == entry.dtype) {
      file.write(stored.read(first, 0, first.bytes, buffer), first.bytes);
      continue;
    }
    out.assign(static_cast<size_t>(entry.end - entry.begin), 0);
    for (size_t i = 0; i < all.tensors.size(); ++i) {
      const StoredTensor& from = *all.tensors[i];
      place(stored.read(from, 0, from.bytes, buffer), from, all.sources[i], entry.dtype, out);
    }
    file.write(out.data(), std::ssize(out));
  }
}

}  // namespace sluice
