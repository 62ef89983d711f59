#include "core/repeated_warning.h"

#include <spdlog/spdlog.h>

#include <algorithm>

namespace sluice {

void RepeatedWarning::warn(const std::string& text) {
  std::string kind = text;
  kind.erase(
      std::remove_if(kind.begin(), kind.end(), [](char c) { return (c >= '0' && c <= '9') || c == '.'; }),
      kind.end());
  int64_t count = 0;
  {
    const std::lock_guard lock(mutex_);
    count_ = kind == kind_ ? count_ + 1 : 1;
    kind_ = kind;
    count = count_;
  }
  if ((count & (count - 1)) != 0) return;
  if (count < 2)
    spdlog::warn("{}", text);
  else
    spdlog::warn("{} (failure {} in a row; failure {} is reported next)", text, count, 2 * count);
}

void RepeatedWarning::over() {
  const std::lock_guard lock(mutex_);
  kind_.clear();
  count_ = 0;
}

}  // namespace sluice
