#pragma once
// Visitors over the configuration structs. Code that reads, writes, compares or documents every key uses them
// instead of listing the keys.
#include <concepts>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "config/config.h"

namespace sluice {

template <class E>
std::string_view enum_name(E value) {
  return EnumNames<E>::names[static_cast<size_t>(value)];
}

template <class E>
std::optional<E> enum_from_name(std::string_view name) {
  for (size_t i = 0; i < EnumNames<E>::names.size(); ++i)
    if (EnumNames<E>::names[i] == name) return static_cast<E>(i);
  return std::nullopt;
}

/// A struct with fields(): a section of the YAML.
struct FieldProbe {
  template <class T>
  void operator()(const char*, T&, const char*) {}
};
template <class T>
concept Section = requires(T& t, FieldProbe& f) {
  t.fields(f);
};

template <class T>
struct is_list : std::false_type {};
template <class T>
struct is_list<std::vector<T>> : std::true_type {};
template <class T>
concept List = is_list<T>::value;

/// A list of sections, or of scalars.
template <class T>
concept SectionList = List<T> && Section<typename T::value_type>;

template <class T>
struct is_optional : std::false_type {};
template <class T>
struct is_optional<std::optional<T>> : std::true_type {};
template <class T>
concept Optional = is_optional<T>::value;

/// A scalar as YAML writes it: shortest form that reads back to the same value; text quoted where it must be.
std::string scalar_text(bool value);
std::string scalar_text(int64_t value);
std::string scalar_text(uint64_t value);
std::string scalar_text(double value);
std::string scalar_text(const std::string& value);
template <class E>
requires std::is_enum_v<E> std::string scalar_text(E value) { return std::string(enum_name(value)); }
template <class T>
std::string scalar_text(const std::optional<T>& value) {
  return value ? scalar_text(*value) : "null";
}

/// "[1, 2]".
template <class T>
requires(List<T> && !SectionList<T>) std::string scalar_text(const T& list) {
  std::string text;
  for (const auto& element : list) text += (text.empty() ? "" : ", ") + scalar_text(element);
  return "[" + text + "]";
}

/// The type of a key's values: "integer", "number", "true or false", "text", or the allowed words "a | b".
template <class T>
std::string type_text() {
  if constexpr (Optional<T>) {
    return type_text<typename T::value_type>() + " or null";
  } else if constexpr (std::is_enum_v<T>) {
    std::string words;
    for (const std::string_view name : EnumNames<T>::names)
      words += (words.empty() ? "" : " | ") + std::string(name);
    return words;
  } else if constexpr (std::same_as<T, bool>) {
    return "true or false";
  } else if constexpr (std::integral<T>) {
    return "integer";
  } else if constexpr (std::floating_point<T>) {
    return "number";
  } else if constexpr (SectionList<T>) {
    return "list";
  } else if constexpr (List<T>) {
    return "list of " + type_text<typename T::value_type>() + "s";
  } else {
    return "text";
  }
}

/// Calls leaf(key, value, help) for every scalar, or list of scalars, of a configuration, in order; elements
/// of lists of sections as `key[i].name`.
template <class Leaf>
class LeafWalker {
 public:
  explicit LeafWalker(Leaf leaf, std::string prefix = "")
      : leaf_(std::move(leaf)), prefix_(std::move(prefix)) {}

  template <class T>
  void operator()(const char* name, T& member, const char* help) {
    const std::string key = prefix_.empty() ? name : prefix_ + "." + name;
    if constexpr (Section<T>) {
      descend(key, member);
    } else if constexpr (SectionList<T>) {
      for (size_t i = 0; i < member.size(); ++i) descend(key + "[" + std::to_string(i) + "]", member[i]);
    } else {
      leaf_(key, member, help);
    }
  }

 private:
  template <class T>
  void descend(std::string key, T& section) {
    std::swap(prefix_, key);
    section.fields(*this);
    std::swap(prefix_, key);
  }

  Leaf leaf_;
  std::string prefix_;
};

template <Section T, class Leaf>
void for_each_leaf(T& section, Leaf leaf) {
  LeafWalker<Leaf> walker(std::move(leaf));
  section.fields(walker);
}

}  // namespace sluice
