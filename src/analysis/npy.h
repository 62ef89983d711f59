#pragma once
// Arrays as NumPy reads them: NPY format 1.0, little-endian, C order.
#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

/// Replaces `path` as a whole. values: the product of `shape` many; written as <f4, <f8 or <i4.
void write_npy(const std::string& path, const std::vector<int64_t>& shape, const std::vector<float>& values);
void write_npy(const std::string& path, const std::vector<int64_t>& shape, const std::vector<double>& values);
void write_npy(const std::string& path, const std::vector<int64_t>& shape,
               const std::vector<int32_t>& values);

}  // namespace sluice
