#pragma once
// Arrays in NumPy's NPY format 1.0, little-endian, C order.
#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

/// Replaces `path` atomically. The number of values is the product of `shape`; written as <f4, <f8 or <i4.
void write_npy(const std::string& path, const std::vector<int64_t>& shape, const std::vector<float>& values);
void write_npy(const std::string& path, const std::vector<int64_t>& shape, const std::vector<double>& values);
void write_npy(const std::string& path, const std::vector<int64_t>& shape,
               const std::vector<int32_t>& values);
/// Whether a path is a file that begins as NumPy's arrays do.
bool is_npy(const std::string& path);

}  // namespace sluice
