// model.safetensors.index.json and the shards that it names, as other programs write them. The mutator changes
// mostly the index, and sometimes a shard (support/stored.h).
#include <set>

#include <nlohmann/json.hpp>

#include "checkpoint/compare.h"
#include "checkpoint/manifest.h"
#include "checkpoint/store.h"
#include "checkpoint/stored_tensors.h"
#include "support/stored.h"

namespace sluice::fuzz {
namespace {

constexpr const char* kFolder = "weights";

std::string changed(const std::string& archive, size_t most, Random& random) {
  Files files = split(archive);
  if (random.one_in(4)) return mutated_archive(archive, most, random);
  for (auto& [name, content] : files)
    if (name == kWeightsIndex) content = mutated_json(content, most / 2, random);
  const std::string out = join(files);
  return out.size() <= most ? out : archive;
}

/// What the reader accepted is what the index says, and lies in the folder.
void check_accepted(StoredTensors& stored) {
  std::set<std::string> named, found;
  const nlohmann::json index = nlohmann::json::parse(read(std::string(kFolder) + "/" + kWeightsIndex));
  for (const auto& [name, file] : index["weight_map"].items()) named.insert(name);
  std::vector<unsigned char> buffer;
  static volatile unsigned sum;  // so that every byte is read
  for (const auto& [name, tensor] : stored.tensors()) {
    found.insert(name);
    expect(tensor.problem.empty(), "a tensor of accepted shards is incomplete: " + tensor.problem);
    for (const StoredPiece& piece : tensor.pieces) {
      const std::string& path = stored.path(piece);
      expect(path.rfind('/') == std::string(kFolder).size(), "a shard lies elsewhere: " + path);
    }
    if (tensor.bytes == 0) continue;
    const unsigned char* bytes = stored.read(tensor, 0, tensor.bytes, buffer);
    for (int64_t i = 0; i < tensor.bytes; ++i) sum = sum + bytes[i];
  }
  expect(named == found, "the index names other tensors than were read");
}

}  // namespace
}  // namespace sluice::fuzz

using namespace sluice;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::clear();
  fuzz::write_all(fuzz::completed(fuzz::split(fuzz::text_of(data, size))), fuzz::kFolder);
  const bool accepted = fuzz::attempt([&] {
    StoredTensors stored = StoredTensors::from_index(fuzz::kFolder);
    fuzz::check_accepted(stored);
  });
  if (!accepted) return 0;
  fuzz::attempt([&] {
    float values[6 * 4];
    load_weights(fuzz::kFolder, {{"model.embed_tokens.weight", Tensor(values, DType::f32, {6, 4})}});
  });
  fuzz::attempt([&] {
    const Comparison same = compare_checkpoints(fuzz::kFolder, fuzz::kFolder);
    fuzz::expect(same.differences.empty(), "a folder of shards differs from itself");
  });
  return 0;
}

SLUICE_FUZZ_MUTATOR(::sluice::fuzz::changed(text, most, random))
