#pragma once
// Fields of a checkpoint's state.json. The checksum detects damage but not wrong content, so every field is
// checked for type and range, and Error(data) names file and field.
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace sluice {

class StateReader {
 public:
  static constexpr int64_t kAnyCount = -1;

  /// object: state.json, or its field `field`; file: for messages. Both must outlive the reader.
  StateReader(const nlohmann::json& object, std::string file, std::string field = "");

  bool has(const std::string& key) const { return object_.contains(key); }
  bool is_list(const std::string& key) const { return at(key).is_array(); }
  StateReader object(const std::string& key) const;
  std::vector<StateReader> objects(const std::string& key) const;
  int64_t integer(const std::string& key, int64_t least,
                  int64_t most = std::numeric_limits<int64_t>::max()) const;
  /// Finite.
  double number(const std::string& key, double least = std::numeric_limits<double>::lowest()) const;
  bool boolean(const std::string& key) const;
  std::string text(const std::string& key) const;
  std::vector<int64_t> integers(const std::string& key, int64_t count, int64_t least,
                                int64_t most = std::numeric_limits<int64_t>::max()) const;
  /// Finite.
  std::vector<double> numbers(const std::string& key, int64_t count,
                              double least = std::numeric_limits<double>::lowest()) const;

  /// Error(data): "FILE: KEY is VALUE, which ... ".
  [[noreturn]] void refuse(const std::string& key, const std::string& expected) const;

 private:
  const nlohmann::json& at(const std::string& key) const;
  const nlohmann::json& list(const std::string& key, int64_t count) const;
  std::string name(const std::string& key) const { return field_.empty() ? key : field_ + "." + key; }

  const nlohmann::json& object_;
  std::string file_, field_;
};

}  // namespace sluice
