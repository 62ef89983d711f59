#pragma once
// Targets of tokens (i32) from which nothing is predicted. Operations treat both alike: loss and gradient 0.
#include <cstdint>

namespace sluice {

constexpr int32_t kNoTarget = -1;  // a token with nothing behind it: its document's last
constexpr int32_t kPadding = -2;   // no token of any text: fills a sample or a batch

}  // namespace sluice
