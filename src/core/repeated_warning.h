#pragma once
#include <cstdint>
#include <mutex>
#include <string>

namespace sluice {

/// A warning that may come again and again, at every save of a full disk for example. Of those in a row that
/// differ in their numbers at most, the 1st, 2nd, 4th, 8th and so on are shown, with how many there were. Any
/// thread may call.
class RepeatedWarning {
 public:
  void warn(const std::string& text);
  /// It went well: the next failure is the first again.
  void over();

 private:
  std::mutex mutex_;
  std::string kind_;  // the text without its numbers
  int64_t count_ = 0;
};

}  // namespace sluice
