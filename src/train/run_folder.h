#pragma once
// RUN/: one training on disk (UX 5). One process at a time owns it.
#include <nlohmann/json.hpp>
#include <string>

namespace sluice {

class RunFolder {
 public:
  /// Creates the folder if it is missing and takes its lock; Error(cannot_create) names the owner when
  /// another process has it. The lock ends with the process, however that ends.
  explicit RunFolder(std::string path);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

  /// Replaces a file as a whole.
  void write(const std::string& name, const std::string& content) const;
  /// status.json: {state, step, tokens, ...} plus pid, host and heartbeat. A failure is a warning.
  void write_status(nlohmann::ordered_json status) const;

 private:
  std::string path_;
  int lock_ = -1;
};

std::string host_name();
/// "2026-01-31T23:59:59Z"
std::string utc_now();

}  // namespace sluice
