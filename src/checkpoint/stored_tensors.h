#pragma once
// Tensors as stored in files: whole or sliced, in one file or several. Names and shapes refer to whole
// tensors, so that the number of ranks that wrote them does not matter.
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"

namespace sluice {

/// Bytes [begin, end) of the row-major whole tensor, in one file.
struct StoredPiece {
  int64_t begin = 0, end = 0;
  size_t file = 0;       // index into StoredTensors' files
  int64_t offset = 0;    // bytes, from the start of the file
  std::string xxh3_128;  // empty if unknown
};

struct StoredTensor {
  std::string name, dtype;
  std::vector<int64_t> shape;
  int64_t bytes = 0;                // of the whole tensor
  std::vector<StoredPiece> pieces;  // sorted by begin
  std::string problem;              // why the pieces do not cover each byte exactly once; empty if they do

  int64_t elements() const;
  /// "(4, 16) F32"
  std::string describe() const;
};

class StoredTensors {
 public:
  enum class Check { size, checksum };
  using Tensors = std::map<std::string, StoredTensor, std::less<>>;

  /// The tensors of one kind (kWeightsKind, kOptimizerKind) in a checkpoint. Each file is mapped and checked
  /// on its first use.
  StoredTensors(const std::string& folder, const Manifest& manifest, const char* kind, Check check);
  /// The tensors of a .safetensors file.
  explicit StoredTensors(const std::string& path);
  /// The tensors of the shards that FOLDER/model.safetensors.index.json names. Error(data) unless index and
  /// shards agree.
  static StoredTensors from_index(const std::string& folder);

  const Tensors& tensors() const { return tensors_; }
  /// nullptr if there is no tensor of that name.
  const StoredTensor* find(std::string_view name) const;
  /// All bytes of the piece.
  const unsigned char* data(const StoredPiece& piece);
  const std::string& path(const StoredPiece& piece) const { return files_[piece.file].path; }
  /// Bytes [begin, begin + bytes) of a whole tensor without problem: a pointer into the file, or, if they
  /// span several pieces, into buffer.
  const unsigned char* read(const StoredTensor& tensor, int64_t begin, int64_t bytes,
                            std::vector<unsigned char>& buffer);

 private:
  struct File {
    std::string path;
    std::optional<io::MappedFile> mapped;
    FileRecord record;  // without a name if no manifest lists it
    bool follow_links = false;
  };

  StoredTensors() = default;
  void add(const SafetensorsFile& file, bool follow_links);
  void finish();

  std::string folder_;
  std::optional<Manifest> manifest_;  // if checksums are to be verified
  Check check_ = Check::size;
  std::deque<File> files_;
  Tensors tensors_;
};

/// Problems of the tensors of a manifest (missing parts, overlaps, differing types), one line each.
std::vector<std::string> coverage_problems(const Manifest& manifest);

}  // namespace sluice
