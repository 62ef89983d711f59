#pragma once
// The safetensors format: u64 N (little-endian), N bytes of JSON header, data. It contains no code, and every
// byte of data belongs to exactly one tensor.
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/io.h"
#include "core/tensor.h"

namespace sluice {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;           // as in the file: F32, BF16, F16, F64, ...
  std::vector<int64_t> shape;  // any rank; empty: a scalar
  int64_t begin = 0, end = 0;  // bytes, from the start of the data
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
  int64_t data_begin = 0;  // 8 + N
};

/// Parses and checks the header of a file in memory. Throws Error(data), with path and reason, unless N <= 16
/// MiB; the header is valid UTF-8 and JSON with exactly the keys of the format; there are at most 10^6
/// tensors, with distinct names; sizes agree with dtype and shape without overflow; and the tensors tile the
/// data exactly.
SafetensorsHeader parse_safetensors(const unsigned char* file, int64_t bytes, const std::string& path);

/// A file mapped and checked.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path, bool follow_links = true);

  const std::string& path() const { return file_.path(); }
  const io::MappedFile& file() const { return file_; }
  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  /// nullptr if there is no tensor of that name.
  const SafetensorsEntry* find(std::string_view name) const;
  const unsigned char* bytes(const SafetensorsEntry& entry) const {
    return file_.data() + header_.data_begin + entry.begin;
  }

 private:
  io::MappedFile file_;
  SafetensorsHeader header_;
  std::map<std::string_view, size_t> by_name_;
};

/// The header of a file to be written, including its 8 bytes of length, padded so that the data begins at a
/// multiple of 64. Takes names, dtypes and shapes; sorts the entries by descending element size, then name,
/// and sets begin and end. The metadata is {"format": "pt"}, which Hugging Face readers require.
std::string make_safetensors_header(std::vector<SafetensorsEntry>& entries);

/// Bits per element of a dtype in the file's spelling; 0 if it is unknown.
int64_t safetensors_bits(std::string_view dtype);
/// Bytes of a tensor in a file; nothing if the type is unknown, the bits do not fill whole bytes, or the
/// shape overflows.
std::optional<int64_t> safetensors_bytes(std::string_view dtype, const std::vector<int64_t>& shape);
/// F32, BF16, F64, I32 or U8.
const char* safetensors_dtype(DType dtype);
/// The entry for a tensor.
SafetensorsEntry safetensors_entry(const std::string& name, const Tensor& tensor);

/// True if `entry` can be read into a tensor of `dtype`: equal types, or any of F64, F32, BF16, F16 into f64,
/// f32, bf16.
bool convertible(const SafetensorsEntry& entry, DType dtype);
/// Copies an entry's values into `tensor` (same element count) with conversion; narrowing rounds to nearest
/// even.
void convert_values(const unsigned char* from, const SafetensorsEntry& entry, const Tensor& tensor);

/// "(4, 16) F32"
std::string describe(const SafetensorsEntry& entry);

}  // namespace sluice
