#pragma once
// A log file of a run, one JSON object per line.
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "core/io.h"
#include "core/repeated_warning.h"

namespace sluice {

/// A file of JSON lines, each with a "step". A failing write is a warning and does not end the training.
class JsonLines {
 public:
  /// Removes lines past `last_step` and lines that are no JSON object with a step, by rewriting the file
  /// atomically. Memory does not depend on the file's size.
  JsonLines(std::string path, int64_t last_step);
  void append(const nlohmann::ordered_json& line);
  /// The largest step in the file, or whose line could not be written; -1 when there is none.
  int64_t last_step() const { return last_step_; }

 private:
  std::string path_;
  std::unique_ptr<io::OutputFile> file_;
  int64_t last_step_ = -1;
  bool failing_ = false;
  RepeatedWarning warning_;
};

}  // namespace sluice
