#include "config/json.h"

#include <spdlog/fmt/fmt.h>

#include <nlohmann/json.hpp>

#include "config/fields.h"
#include "config/paths.h"
#include "config/scalars.h"
#include "config/yaml.h"
#include "core/error.h"
#include "core/io.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMaxFileBytes = int64_t{1} << 20;

/// On one line. Paths below a working folder whose name is not UTF-8 are shown with replacement characters.
std::string one_line(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

class JsonWriter {
 public:
  Json object = Json::object();

  template <class T>
  void operator()(const char* name, T& member, const char*) {
    object[name] = value_of(member);
  }

 private:
  template <class T>
  static Json value_of(T& member) {
    if constexpr (Section<T>) {
      JsonWriter section;
      member.fields(section);
      return section.object;
    } else if constexpr (List<T>) {
      Json list = Json::array();
      for (auto& element : member) list.push_back(value_of(element));
      return list;
    } else if constexpr (Optional<T>) {
      return member ? value_of(*member) : Json();
    } else if constexpr (std::is_enum_v<T>) {
      return enum_name(member);
    } else {
      return member;
    }
  }
};

/// A scalar that is not in quotes.
Json typed(const std::string& text) {
  bool truth = false;
  if (parse_boolean(text, truth).empty()) return truth;
  double number = 0;
  if (!parse_number(text, number).empty()) return text;
  int64_t whole = 0;
  if (text.find_first_of(".eE") == std::string::npos && parse_integer(text, whole).empty()) return whole;
  return number;
}

Json plain(const yaml::Node& node) {
  switch (node.kind) {
    case yaml::Node::Kind::null:
      return {};
    case yaml::Node::Kind::scalar:
      return node.quoted ? Json(node.text) : typed(node.text);
    case yaml::Node::Kind::list: {
      Json list = Json::array();
      for (const yaml::Node& item : node.items) list.push_back(plain(item));
      return list;
    }
    case yaml::Node::Kind::map:
      break;
  }
  Json map = Json::object();
  for (size_t i = 0; i < node.items.size(); ++i) map[node.keys[i].text] = plain(node.items[i]);
  return map;
}

Json with_places(const yaml::Node& node) {
  constexpr const char* kKinds[] = {"null", "scalar", "list", "map"};
  Json out = {{"kind", kKinds[static_cast<size_t>(node.kind)]},
              {"line", std::max(1, node.place.line)},
              {"column", std::max(1, node.place.column)}};
  if (node.kind == yaml::Node::Kind::scalar) {
    out["text"] = node.text;
    out["quoted"] = node.quoted;
  }
  if (node.kind == yaml::Node::Kind::map) {
    out["keys"] = Json::array();
    for (const yaml::Key& key : node.keys) out["keys"].push_back(key.text);
  }
  if (node.kind == yaml::Node::Kind::map || node.kind == yaml::Node::Kind::list) {
    out["items"] = Json::array();
    for (const yaml::Node& item : node.items) out["items"].push_back(with_places(item));
  }
  return out;
}

/// {optimizer.lr 1} is YAML for a key with a space and no value.
void find_missing_colons(const yaml::Node& node, yaml::Problems& problems) {
  for (size_t i = 0; i < node.keys.size(); ++i)
    if (node.items[i].kind == yaml::Node::Kind::null && node.keys[i].text.find(' ') != std::string::npos)
      problems.add(node.keys[i].place,
                   fmt::format("{} has no value; is a colon missing?", yaml::printable(node.keys[i].text)));
  for (const yaml::Node& item : node.items) find_missing_colons(item, problems);
}

}  // namespace

std::string to_json(const Config& config) {
  Config copy = config;
  make_paths_absolute(copy);
  JsonWriter writer;
  copy.fields(writer);
  return one_line(writer.object);
}

std::string yaml_file_to_json(const std::string& path, bool places) {
  std::deque<yaml::Source> sources;
  // One byte more, so that the guard of the parser says what is wrong.
  sources.push_back({path, "", io::read_file(path, kMaxFileBytes + 1), false});
  yaml::Problems problems;
  const yaml::Node root = yaml::parse(sources, 0, 0, problems);
  find_missing_colons(root, problems);
  if (!problems.empty()) throw Error(ExitCode::usage, problems.render(sources));
  return one_line(places ? with_places(root) : plain(root));
}

}  // namespace sluice
