#pragma once
// The spellings of an enumeration's values in YAML, in messages and in JSON.
#include <array>
#include <cstdint>
#include <string_view>

namespace sluice {

/// Spellings of an enum, in the order of its enumerators; specialised beside each enum.
template <class E>
struct EnumNames;

#define SLUICE_ENUM_NAMES(E, ...)                                                 \
  template <>                                                                     \
  struct EnumNames<E> {                                                           \
    static constexpr auto names = std::to_array<std::string_view>({__VA_ARGS__}); \
  }

}  // namespace sluice
