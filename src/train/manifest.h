#pragma once
// MANIFEST.json: what a checkpoint consists of, with a checksum (XXH3-128, for integrity, not authenticity)
// of every byte of every file. Its last line holds the checksum of all bytes before that line.
#include <string>
#include <string_view>
#include <vector>

#include "core/io.h"

struct XXH3_state_s;

namespace sluice {

/// XXH3-128 of bytes given piece by piece, in hex.
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
  std::string name;  // a plain name in the checkpoint's folder
  int64_t bytes = 0;
  std::string xxh3_128;
};

struct TensorRecord {
  std::string name, dtype;
  std::vector<int64_t> shape;
  std::string file;
  int64_t offset = 0;  // bytes, from the start of the file
  std::string xxh3_128;
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

/// A name that a file may give for another one in its folder: [A-Za-z0-9._-]{1,128}, no leading dot.
bool is_plain_name(std::string_view name);

/// Maps a file of a checkpoint after checking size and checksum. Throws Error(data); a damaged tensor is
/// named.
io::MappedFile open_verified(const std::string& folder, const Manifest& manifest, const FileRecord& record);

}  // namespace sluice
