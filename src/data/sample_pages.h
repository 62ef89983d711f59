#pragma once
// The part of a large file that enters a fingerprint.
#include <cstdint>
#include <string>

namespace sluice {

/// The whole file if it is small; otherwise 64 evenly spaced pages, including the first and the last.
inline std::string sample_pages(const void* data, int64_t bytes) {
  constexpr int64_t kPage = 4096, kPages = 64;
  const char* begin = static_cast<const char*>(data);
  if (bytes <= kPage * kPages) return std::string(begin, static_cast<size_t>(bytes));
  std::string sample;
  for (int64_t i = 0; i < kPages - 1; ++i) sample.append(begin + (bytes - kPage) / (kPages - 1) * i, kPage);
  return sample.append(begin + bytes - kPage, kPage);
}

}  // namespace sluice
