#pragma once
// Tensors as they lie in files: whole or in slices, in one file or in several. Names and shapes are of the
// wholes, so that nothing depends on how many ranks wrote them.
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"

namespace sluice {

/// Bytes [begin, end) of the row-major whole, in one file.
struct StoredPiece {
  int64_t begin = 0, end = 0;
  size_t file = 0;       // of StoredTensors
  int64_t offset = 0;    // bytes, from the start of the file
  std::string xxh3_128;  // empty where none is known
};

struct StoredTensor {
  std::string name, dtype;
  std::vector<int64_t> shape;
  int64_t bytes = 0;                // of the whole
  std::vector<StoredPiece> pieces;  // by begin
  std::string problem;              // why the pieces are not each byte exactly once; empty if they are

  int64_t elements() const;
  /// "(4, 16) F32"
  std::string describe() const;
};

class StoredTensors {
 public:
  enum class Check { size, checksum };
  using Tensors = std::map<std::string, StoredTensor, std::less<>>;

  /// The tensors of one kind (kWeightsKind, kOptimizerKind) of a checkpoint. A file is mapped, and checked so
  /// far, when it is first read.
  StoredTensors(const std::string& folder, const Manifest& manifest, const char* kind, Check check);
  /// Those of a .safetensors file.
  explicit StoredTensors(const std::string& path);
  /// Those of the shards that FOLDER/model.safetensors.index.json names. Error(data) unless index and shards
  /// tell the same.
  static StoredTensors from_index(const std::string& folder);

  const Tensors& tensors() const { return tensors_; }
  /// nullptr when there is none of that name.
  const StoredTensor* find(std::string_view name) const;
  /// Its bytes, all of the piece.
  const unsigned char* data(const StoredPiece& piece);
  const std::string& path(const StoredPiece& piece) const { return files_[piece.file].path; }
  /// Bytes [begin, begin + bytes) of a whole without problem: where they lie, or, when they lie in several
  /// pieces, in buffer.
  const unsigned char* read(const StoredTensor& tensor, int64_t begin, int64_t bytes,
                            std::vector<unsigned char>& buffer);

 private:
  struct File {
    std::string path;
    std::optional<io::MappedFile> mapped;
    FileRecord record;  // without a name where no manifest tells of it
    bool follow_links = false;
  };

  StoredTensors() = default;
  void add(const SafetensorsFile& file, bool follow_links);
  void finish();

  std::string folder_;
  std::optional<Manifest> manifest_;  // where a checksum is asked for
  Check check_ = Check::size;
  std::deque<File> files_;
  Tensors tensors_;
};

/// What is wrong with the tensors of a manifest (missing parts, overlaps, types that differ), one line each.
std::vector<std::string> coverage_problems(const Manifest& manifest);

}  // namespace sluice
