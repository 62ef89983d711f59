#pragma once
// Arrays that the program writes, read back.
#include <cstring>
#include <string>
#include <vector>

#include "core/io.h"

namespace sluice::test {

/// The values of a .npy file of f32.
inline std::vector<float> npy(const std::string& path) {
  const std::string bytes = io::read_file(path);
  const size_t begin =
      10 + static_cast<unsigned char>(bytes.at(8)) + 256 * static_cast<unsigned char>(bytes.at(9));
  std::vector<float> values((bytes.size() - begin) / sizeof(float));
  std::memcpy(values.data(), bytes.data() + begin, values.size() * sizeof(float));
  return values;
}

}  // namespace sluice::test
