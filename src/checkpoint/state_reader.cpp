#include "checkpoint/state_reader.h"

#include <cmath>

#include "core/error.h"
#include "core/strict_json.h"

namespace sluice {
namespace {

/// Whether it is an integer within the bounds.
bool is_integer(const nlohmann::json& value, int64_t least, int64_t most) {
  if (!value.is_number_integer()) return false;
  if (value.is_number_unsigned() &&
      value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    return false;
  return value.get<int64_t>() >= least && value.get<int64_t>() <= most;
}

bool is_number(const nlohmann::json& value, double least) {
  return value.is_number() && std::isfinite(value.get<double>()) && value.get<double>() >= least;
}

std::string bounds(const std::string& kind, int64_t least, int64_t most) {
  return most == std::numeric_limits<int64_t>::max() ? fmt::format("{} of at least {}", kind, least)
                                                     : fmt::format("{} from {} to {}", kind, least, most);
}

std::string bounds(double least) {
  return least == std::numeric_limits<double>::lowest()
             ? "a finite number"
             : fmt::format("a finite number of at least {}", least);
}

}  // namespace

StateReader::StateReader(const nlohmann::json& object, std::string file, std::string field)
    : object_(object), file_(std::move(file)), field_(std::move(field)) {
  if (!object_.is_object())
    fail(ExitCode::data, "{}: {} must be a JSON object", file_, field_.empty() ? "the whole" : field_);
}

void StateReader::refuse(const std::string& key, const std::string& expected) const {
  fail(ExitCode::data, "{}: {} must be {}, got {}", file_, name(key), expected,
       printable(at(key).dump(-1, ' ', true), 60));
}

const nlohmann::json& StateReader::at(const std::string& key) const {
  const auto found = object_.find(key);
  if (found == object_.end()) fail(ExitCode::data, "{}: {} is missing", file_, name(key));
  return *found;
}

StateReader StateReader::object(const std::string& key) const {
  return StateReader(at(key), file_, name(key));
}

std::vector<StateReader> StateReader::objects(const std::string& key) const {
  const nlohmann::json& all = list(key, kAnyCount);
  std::vector<StateReader> readers;
  for (size_t i = 0; i < all.size(); ++i)
    readers.emplace_back(all[i], file_, fmt::format("{}[{}]", name(key), i));
  return readers;
}

int64_t StateReader::integer(const std::string& key, int64_t least, int64_t most) const {
  if (!is_integer(at(key), least, most)) refuse(key, bounds("a whole number", least, most));
  return at(key).get<int64_t>();
}

double StateReader::number(const std::string& key, double least) const {
  if (!is_number(at(key), least)) refuse(key, bounds(least));
  return at(key).get<double>();
}

bool StateReader::boolean(const std::string& key) const {
  if (!at(key).is_boolean()) refuse(key, "true or false");
  return at(key).get<bool>();
}

std::string StateReader::text(const std::string& key) const {
  if (!at(key).is_string()) refuse(key, "a text");
  return at(key).get<std::string>();
}

const nlohmann::json& StateReader::list(const std::string& key, int64_t count) const {
  const nlohmann::json& all = at(key);
  if (!all.is_array()) refuse(key, "a list");
  if (count != kAnyCount && std::ssize(all) != count)
    fail(ExitCode::data, "{}: {} must be a list of {}, got {}", file_, name(key), count, all.size());
  return all;
}

std::vector<int64_t> StateReader::integers(const std::string& key, int64_t count, int64_t least,
                                           int64_t most) const {
  std::vector<int64_t> values;
  for (const nlohmann::json& value : list(key, count)) {
    if (!is_integer(value, least, most)) refuse(key, bounds("a list of whole numbers", least, most));
    values.push_back(value.get<int64_t>());
  }
  return values;
}

std::vector<double> StateReader::numbers(const std::string& key, int64_t count, double least) const {
  std::vector<double> values;
  for (const nlohmann::json& value : list(key, count)) {
    if (!is_number(value, least)) refuse(key, "a list, each " + bounds(least));
    values.push_back(value.get<double>());
  }
  return values;
}

}  // namespace sluice
