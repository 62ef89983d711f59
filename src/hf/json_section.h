#pragma once
#include <spdlog/fmt/fmt.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/fields.h"
#include "core/error.h"
#include "core/strict_json.h"

namespace sluice {

/// For a message: at most 80 printable characters.
inline std::string shown_json(const nlohmann::json& value) { return printable(value.dump(), 80); }

/// One object of a file of JSON, whose values are read by key: what is missing or null has a default, and
/// what has another type is Error(data) with file and key. The object and the path outlive it.
class JsonSection {
 public:
  JsonSection(const nlohmann::json& object, const std::string& path, std::string prefix = "")
      : object_(object), path_(path), prefix_(std::move(prefix)) {}

  std::string name(const std::string& key) const { return prefix_ + key; }
  const nlohmann::json& object() const { return object_; }
  /// nullptr if the key is absent or null.
  const nlohmann::json* find(const std::string& key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  [[noreturn]] void refuse(const std::string& key, const std::string& wanted) const {
    const nlohmann::json* value = find(key);
    fail(ExitCode::data, "{}: {} must be {}, got {}", path_, name(key), wanted,
         value ? shown_json(*value) : "nothing");
  }
  int64_t integer(const std::string& key, int64_t otherwise, int64_t low = 1) const {
    const nlohmann::json* value = find(key);
    return value ? integer_of(key, *value, low) : otherwise;
  }
  double number(const std::string& key, double otherwise) const {
    const nlohmann::json* value = find(key);
    if (!value) return otherwise;
    if (!value->is_number() || !std::isfinite(value->get<double>())) refuse(key, "a finite number");
    return value->get<double>();
  }
  double positive(const std::string& key, double otherwise) const {
    const double value = number(key, otherwise);
    if (!(value > 0)) refuse(key, "greater than 0");
    return value;
  }
  bool boolean(const std::string& key, bool otherwise) const {
    const nlohmann::json* value = find(key);
    if (!value) return otherwise;
    if (!value->is_boolean()) refuse(key, "true or false");
    return value->get<bool>();
  }
  std::string text(const std::string& key, const std::string& otherwise) const {
    const nlohmann::json* value = find(key);
    if (!value) return otherwise;
    if (!value->is_string()) refuse(key, "text");
    return value->get<std::string>();
  }
  std::vector<int64_t> integers(const std::string& key) const {
    std::vector<int64_t> all;
    for (const nlohmann::json& value : list(key)) all.push_back(integer_of(key, value, 0));
    return all;
  }
  template <class E>
  E word(const std::string& key, E otherwise) const {
    if (!find(key)) return otherwise;
    const auto value = enum_from_name<E>(text(key, ""));
    if (!value) refuse(key, "one of " + type_text<E>());
    return *value;
  }
  std::optional<double> optional_number(const std::string& key) const {
    return find(key) ? std::optional(number(key, 0)) : std::nullopt;
  }
  /// Empty if there is none.
  const nlohmann::json& list(const std::string& key) const {
    static const nlohmann::json none = nlohmann::json::array();
    const nlohmann::json* value = find(key);
    if (value && !value->is_array()) refuse(key, "a list");
    return value ? *value : none;
  }
  std::optional<JsonSection> section(const std::string& key) const {
    const nlohmann::json* value = find(key);
    if (!value) return std::nullopt;
    if (!value->is_object()) refuse(key, "an object");
    return JsonSection(*value, path_, name(key) + ".");
  }
  void no_other_keys(std::initializer_list<std::string_view> known) const {
    no_other_keys(std::set<std::string, std::less<>>(known.begin(), known.end()));
  }
  void no_other_keys(const std::set<std::string, std::less<>>& known) const {
    for (const auto& [key, value] : object_.items())
      if (!known.contains(key)) fail(ExitCode::data, "{}: unknown key {}", path_, printable(name(key)));
  }

 private:
  static constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();

  int64_t integer_of(const std::string& key, const nlohmann::json& value, int64_t low) const {
    const bool fits = value.is_number_integer() && value >= low && value <= kLargest;
    if (!fits)
      fail(ExitCode::data, "{}: {} must be a whole number from {} to {}, got {}", path_, name(key), low,
           kLargest, shown_json(value));
    return value.get<int64_t>();
  }

  const nlohmann::json& object_;
  const std::string& path_;
  std::string prefix_;
};

}  // namespace sluice
