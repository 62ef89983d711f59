#pragma once
// MANIFEST.json lists the files and tensors of a checkpoint, with checksums (XXH3-128, for integrity, not
// authenticity) that cover every byte of every file. Its last line is the checksum of all bytes before that
// line.
#include <string>
#include <string_view>
#include <vector>

#include "core/io.h"

struct XXH3_state_s;

namespace sluice {

/// Incremental XXH3-128, in hex.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;
  void update(const void* data, int64_t bytes);
  std::string hex() const;

 private:
  XXH3_state_s* state_;
};
std::string checksum(const void* data, int64_t bytes);
inline std::string checksum(std::string_view text) { return checksum(text.data(), std::ssize(text)); }

struct FileRecord {
  std::string name;  // a plain file name in the checkpoint's folder
  int64_t bytes = 0;
  std::string xxh3_128;
};

/// A tensor, or a slice of one: elements [begin, end) of the row-major whole tensor.
struct TensorRecord {
  std::string name, dtype;
  std::vector<int64_t> shape;  // of the whole tensor
  std::string file;
  int64_t offset = 0;  // bytes, from the start of the file
  std::string xxh3_128;
  int64_t begin = 0, end = -1;  // of a slice; end -1: the whole tensor

  bool is_slice() const { return end >= 0; }
  /// Its name in the file: NAME for a whole tensor, NAME@begin for a slice, which is stored with rank 1.
  std::string entry_name() const { return is_slice() ? fmt::format("{}@{}", name, begin) : name; }
  std::vector<int64_t> entry_shape() const { return is_slice() ? std::vector<int64_t>{end - begin} : shape; }
};

struct Manifest {
  int64_t step = 0;
  std::string build;        // version of the program that wrote it
  std::string config_hash;  // checksum of config.yaml
  std::vector<FileRecord> files;
  std::vector<TensorRecord> tensors;

  std::string text() const;
  /// nullptr if the manifest names no such file.
  const FileRecord* file(std::string_view name) const;
};

constexpr const char* kManifestName = "MANIFEST.json";

/// Reads FOLDER/MANIFEST.json. Throws Error(data) if it is absent, damaged, or names anything but plain
/// files.
Manifest read_manifest(const std::string& folder);
/// Reads any file in this format, such as the part of one rank.
Manifest read_manifest_file(const std::string& path);

/// Whether a name that a file refers to is safe, that is, a plain file in the same folder:
/// [A-Za-z0-9._-]{1,128}, no leading dot.
bool is_plain_name(std::string_view name);

/// File names of weights and of optimizer state, as in Hugging Face: "model.safetensors" if there is one
/// file; of several, "model-00001-of-00004.safetensors" for i = 0.
std::string shard_name(const char* kind, int i, int count);
constexpr const char* kWeightsKind = "model";
constexpr const char* kOptimizerKind = "optim";
// Hugging Face's names of a SentencePiece model and of a tokenizer with byte-level BPE.
constexpr const char* kTokenizerFile = "tokenizer.model";
constexpr const char* kBpeTokenizerFile = "tokenizer.json";
/// The name under which a copy of a tokenizer's file is kept; told by its content: a tokenizer.json begins
/// with a brace, a SentencePiece model never does.
inline const char* tokenizer_file(std::string_view model) {
  const size_t first = model.find_first_not_of(" \t\r\n");
  return first != model.npos && model[first] == '{' ? kBpeTokenizerFile : kTokenizerFile;
}
constexpr const char* kWeightsIndex = "model.safetensors.index.json";
/// Whether a file name is of that kind.
bool is_shard_of(std::string_view file, std::string_view kind);
/// Empty if the names are either the single file of a kind or all of its shards; otherwise what is wrong with
/// them.
std::string shards_problem(const Manifest& manifest, const char* kind);

/// Maps a file of a checkpoint after checking its size. Throws Error(data).
io::MappedFile open_recorded(const std::string& folder, const FileRecord& record);
/// Maps a file of a checkpoint after checking its size and checksum. Throws Error(data), which names the
/// damaged tensor if it can.
io::MappedFile open_verified(const std::string& folder, const Manifest& manifest, const FileRecord& record);

}  // namespace sluice
