#include "analysis/npy.h"

#include <bit>
#include <string_view>

#include "core/error.h"
#include "core/io.h"

namespace sluice {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
static_assert(std::endian::native == std::endian::little, "elements are written as they lie in memory");

template <class T>
void write(const std::string& path, const char* type, const std::vector<int64_t>& shape,
           const std::vector<T>& values) {
  std::string dims;
  int64_t count = 1;
  for (const int64_t n : shape) {
    dims += fmt::format("{}, ", n);
    count *= n;
  }
  SLUICE_CHECK(count == std::ssize(values), "write_npy: {} has {} elements, its shape {}", path,
               values.size(), count);
  std::string header = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}", type, dims);
  // Magic, version and length are 10 bytes; the data begins at a multiple of 64, behind a new line.
  header.append(63 - (10 + header.size()) % 64, ' ');
  header += '\n';
  SLUICE_CHECK(header.size() < 65536, "write_npy: a header of {} bytes", header.size());
  std::string bytes(kMagic);
  bytes.append("\x01\x00", 2);
  bytes += static_cast<char>(header.size() % 256);
  bytes += static_cast<char>(header.size() / 256);
  bytes += header;
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  io::write_file_atomic(path, bytes);
}

}  // namespace

void write_npy(const std::string& path, const std::vector<int64_t>& shape, const std::vector<float>& values) {
  write(path, "<f4", shape, values);
}
void write_npy(const std::string& path, const std::vector<int64_t>& shape,
               const std::vector<double>& values) {
  write(path, "<f8", shape, values);
}
void write_npy(const std::string& path, const std::vector<int64_t>& shape,
               const std::vector<int32_t>& values) {
  write(path, "<i4", shape, values);
}

bool is_npy(const std::string& path) {
  if (io::is_directory(path)) return false;
  const io::MappedFile file(path);
  const std::string_view bytes(reinterpret_cast<const char*>(file.data()), static_cast<size_t>(file.size()));
  return bytes.starts_with(kMagic);
}

}  // namespace sluice
