#pragma once
// The enums of the configuration, walked by their names: a new value is tested unasked.
#include <string_view>

#include "config/config.h"

namespace sluice::test {

template <class E>
constexpr int kCount = static_cast<int>(EnumNames<E>::names.size());

template <class E>
std::string_view name_of(E e) {
  return EnumNames<E>::names[static_cast<size_t>(e)];
}

/// Calls body with every value.
template <class E, class Body>
void for_each_value(Body&& body) {
  for (int i = 0; i < kCount<E>; ++i) body(static_cast<E>(i));
}

}  // namespace sluice::test
