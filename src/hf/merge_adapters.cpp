#include "hf/merge_adapters.h"

#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/stored_tensors.h"
#include "core/io.h"
#include "core/parallel_for.h"
#include "eval/portable.h"
#include "eval/trained_model.h"
#include "hf/config.h"
#include "hf/export.h"

namespace sluice {
namespace {

constexpr std::string_view kWeight = ".weight", kA = ".lora_A.weight", kB = ".lora_B.weight";

/// A stored tensor as f64.
std::vector<double> values_of(StoredTensors& stored, const StoredTensor& t) {
  std::vector<unsigned char> buffer;
  const unsigned char* bytes = stored.read(t, 0, t.bytes, buffer);
  std::vector<double> values(static_cast<size_t>(t.elements()));
  convert_values(bytes, {t.name, t.dtype, t.shape, 0, t.bytes},
                 Tensor(values.data(), DType::f64, {t.elements()}));
  return values;
}

DType dtype_of_name(const std::string& name) {
  return name == "BF16" ? DType::bf16 : name == "F64" ? DType::f64 : DType::f32;
}

/// W + scale B A, in the stored type.
std::vector<unsigned char> merged(StoredTensors& stored, const StoredTensor& w, const StoredTensor& a,
                                  const StoredTensor& b, double scale) {
  if (w.shape.size() != 2 || a.shape.size() != 2 || b.shape.size() != 2 || a.shape[1] != w.shape[1] ||
      b.shape[0] != w.shape[0] || a.shape[0] != b.shape[1])
    fail(ExitCode::data, "{} {}: its adapter is {} and {}", w.name, w.describe(), a.describe(), b.describe());
  std::vector<double> sum = values_of(stored, w);
  const std::vector<double> down = values_of(stored, a), up = values_of(stored, b);
  const int64_t rank = a.shape[0], width = w.shape[1];
  parallel_for(w.shape[0], 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t r = 0; r < rank; ++r) {
        const double factor = scale * up[static_cast<size_t>(row * rank + r)];
        const double* from = down.data() + r * width;
        double* to = sum.data() + row * width;
        for (int64_t i = 0; i < width; ++i) to[i] += factor * from[i];
      }
  });
  std::vector<unsigned char> out(static_cast<size_t>(w.bytes));
  convert_values(reinterpret_cast<const unsigned char*>(sum.data()),
                 {w.name, "F64", w.shape, 0, w.elements() * 8},
                 Tensor(out.data(), dtype_of_name(w.dtype), {w.elements()}));
  return out;
}

}  // namespace

int64_t merge_adapters(const CheckpointInfo& checkpoint, const std::string& folder,
                       const std::string& chosen_tokenizer) {
  Config config = checkpoint_config(checkpoint, "auto");
  if (config.lora.rank == 0)
    fail(ExitCode::usage, "{} has no adapters (lora.rank = 0); sluice checkpoint export writes its weights",
         checkpoint.path);
  const double scale = config.lora.alpha / static_cast<double>(config.lora.rank);
  const Manifest manifest = read_manifest(checkpoint.path);
  StoredTensors stored(checkpoint.path, manifest, kWeightsKind, StoredTensors::Check::checksum);
  const std::string weights = shard_name(kWeightsKind, 0, 1);
  const auto tokenizer = checkpoint_tokenizer(checkpoint, config.data.tokenizer, chosen_tokenizer);
  NewFolderContent content(folder, {weights, "config.json", tokenizer_file(tokenizer->model())});

  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, t] : stored.tensors())
    if (!name.ends_with(kA) && !name.ends_with(kB)) entries.push_back({name, t.dtype, t.shape});
  const std::string header = make_safetensors_header(entries);
  io::NewFile& file = content.add(weights);
  file.write(header.data(), std::ssize(header));
  int64_t count = 0;
  for (const SafetensorsEntry& entry : entries) {
    const StoredTensor& w = *stored.find(entry.name);
    const StoredTensor *a = nullptr, *b = nullptr;
    if (entry.name.ends_with(kWeight)) {  // a module's bias is not adapted
      const std::string module = entry.name.substr(0, entry.name.size() - kWeight.size());
      a = stored.find(module + std::string(kA));
      b = stored.find(module + std::string(kB));
    }
    if (a && b) {
      const std::vector<unsigned char> bytes = merged(stored, w, *a, *b, scale);
      file.write(bytes.data(), std::ssize(bytes));
      ++count;
    } else {
      std::vector<unsigned char> buffer;
      file.write(stored.read(w, 0, w.bytes, buffer), w.bytes);
    }
  }
  config.lora = {};
  content.add("config.json", hf_config(config, tokenizer->end_of_document()).dump(2) + "\n");
  if (!tokenizer->model().empty()) content.add(tokenizer_file(tokenizer->model()), tokenizer->model());
  content.publish();
  return count;
}

}  // namespace sluice
