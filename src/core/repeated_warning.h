#pragma once
#include <cstdint>
#include <mutex>
#include <string>

namespace sluice {

/// A warning that may recur, for example at every save to a full disk. Of consecutive warnings that differ
/// only in their numbers, the 1st, 2nd, 4th, 8th and so on are shown, with their count. Any thread may call.
class RepeatedWarning {
 public:
  void warn(const std::string& text);
  /// Resets the count after a success.
  void over();

 private:
  std::mutex mutex_;
  std::string kind_;  // the text without its numbers
  int64_t count_ = 0;
};

}  // namespace sluice
