#pragma once
// The visitor that fills a Config from a YAML tree and reports unknown keys, wrong types and wrong words.
#include <spdlog/fmt/fmt.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "config/fields.h"
#include "config/scalars.h"
#include "config/yaml.h"

namespace sluice {

class Reader {
 public:
  explicit Reader(yaml::Problems& problems) : problems_(problems) {}

  /// Reads a whole file's tree. Absent and null keys keep their defaults.
  template <Section T>
  void read(T& out, const yaml::Node& root) {
    read_section(out, root, "", root.place);
  }

  /// The place of each key that was given ("model.attention.gates[0].position").
  const std::map<std::string, yaml::Place>& places() const { return places_; }
  /// Keys whose value could not be read.
  const std::set<std::string>& bad() const { return bad_; }

  template <class T>
  void operator()(const char* name, T& member, const char*) {
    known_.push_back(name);
    const yaml::Node* value = node_->find(name);
    if (!value) return;
    const std::string key = path_.empty() ? name : path_ + "." + name;
    yaml::Place key_place = value->place;
    for (const yaml::Key& k : node_->keys)
      if (k.text == name) {
        key_place = k.place;
        break;
      }
    places_[key] = key_place;
    if (value->kind == yaml::Node::Kind::null) return;
    if constexpr (Section<T>) {
      read_section(member, *value, key, key_place);
    } else if constexpr (SectionList<T>) {
      read_list(member, *value, key);
    } else if constexpr (List<T>) {
      read_scalars(member, *value, key);
    } else if constexpr (Optional<T>) {
      typename T::value_type inner{};
      if (read_scalar(inner, *value, key)) member = inner;
    } else {
      read_scalar(member, *value, key);
    }
  }

 private:
  template <Section T>
  void read_section(T& out, const yaml::Node& node, const std::string& path, yaml::Place place) {
    if (node.kind == yaml::Node::Kind::null) return;
    if (node.kind != yaml::Node::Kind::map) {
      report(path, place,
             fmt::format("{} must be a section (key: value lines), got {}", path.empty() ? "the file" : path,
                         node.describe()));
      return;
    }
    const yaml::Node* outer_node = std::exchange(node_, &node);
    const std::string outer_path = std::exchange(path_, path);
    const std::vector<std::string> outer_known = std::exchange(known_, {});
    out.fields(*this);
    for (const yaml::Key& key : node.keys) {
      bool found = false;
      for (const std::string& name : known_) found |= name == key.text;
      if (!found) unknown_key(key);
    }
    node_ = outer_node;
    path_ = outer_path;
    known_ = outer_known;
  }

  template <Section T>
  void read_list(std::vector<T>& out, const yaml::Node& node, const std::string& key) {
    if (node.kind != yaml::Node::Kind::list) {
      report(key, node.place, fmt::format("{} must be a list of sections, got {}", key, node.describe()));
      return;
    }
    out.clear();
    for (size_t i = 0; i < node.items.size(); ++i) {
      const std::string element = fmt::format("{}[{}]", key, i);
      places_[element] = node.items[i].place;
      out.emplace_back();
      read_section(out.back(), node.items[i], element, node.items[i].place);
    }
  }

  template <class T>
  void read_scalars(std::vector<T>& out, const yaml::Node& node, const std::string& key) {
    if (node.kind != yaml::Node::Kind::list) {
      report(key, node.place,
             fmt::format("{} must be a {}, got {}", key, type_text<std::vector<T>>(), node.describe()));
      return;
    }
    out.clear();
    for (size_t i = 0; i < node.items.size(); ++i) {
      T element{};
      if (read_scalar(element, node.items[i], fmt::format("{}[{}]", key, i))) out.push_back(element);
    }
  }

  template <class T>
  bool read_scalar(T& out, const yaml::Node& node, const std::string& key) {
    std::string reason;
    if (node.kind != yaml::Node::Kind::scalar) {
      reason = fmt::format("must be {}, got {}", article(type_text<T>()), node.describe());
    } else if constexpr (std::is_enum_v<T>) {
      if (const auto value = enum_from_name<T>(node.text)) {
        out = *value;
      } else {
        reason = wrong_word({EnumNames<T>::names.begin(), EnumNames<T>::names.end()}, node, key);
      }
    } else if constexpr (std::same_as<T, std::string>) {
      out = node.text;
    } else if (node.quoted) {
      reason = fmt::format("must be {}, got {}; remove the quotes", article(type_text<T>()), node.describe());
    } else if constexpr (std::same_as<T, bool>) {
      reason = parse_boolean(node.text, out);
    } else if constexpr (std::integral<T>) {
      reason = parse_integer(node.text, out);
    } else {
      reason = parse_number(node.text, out);
    }
    if (reason.empty()) return true;
    report(key, node.place, key + " " + reason);
    return false;
  }

  void report(const std::string& key, yaml::Place place, std::string message) {
    bad_.insert(key);
    problems_.add(place, std::move(message));
  }
  void unknown_key(const yaml::Key& key);
  static std::string article(const std::string& type);
  static std::string wrong_word(const std::vector<std::string>& words, const yaml::Node& node,
                                const std::string& key);

  yaml::Problems& problems_;
  const yaml::Node* node_ = nullptr;
  std::string path_;
  std::vector<std::string> known_;
  std::map<std::string, yaml::Place> places_;
  std::set<std::string> bad_;
};

}  // namespace sluice
