#pragma once
// TensorBoard event files, written natively: TFRecords (length, masked CRC-32C) of protobuf.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/io.h"

namespace sluice {

/// CRC-32C (Castagnoli) and the masked form event files use.
uint32_t crc32c(std::string_view data);
uint32_t masked_crc32c(std::string_view data);

class EventWriter {
 public:
  /// A new file in `folder` (created if missing). When `first_step` > 0 this run continues another of which
  /// that many steps are kept: a SessionLog START makes TensorBoard drop what an earlier file holds of later
  /// steps. What is known after n steps is written at step n.
  EventWriter(const std::string& folder, int64_t first_step);
  void add(int64_t step, const std::vector<std::pair<std::string, double>>& scalars);
  const std::string& path() const { return path_; }

 private:
  void record(std::string_view event);

  std::string path_;
  std::unique_ptr<io::OutputFile> file_;
};

}  // namespace sluice
