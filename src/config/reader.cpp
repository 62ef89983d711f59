#include "config/reader.h"

#include <algorithm>

#include "config/load.h"

namespace sluice {
namespace {

auto depth(const std::string& key) { return std::count(key.begin(), key.end(), '.'); }

std::string wrapped(const std::vector<std::string>& names) {
  std::string out;
  size_t column = 0;
  for (const std::string& name : names) {
    if (!out.empty()) out += column + name.size() > 88 ? ",\n           " : ", ";
    if (column + name.size() > 88) column = 0;
    out += name;
    column += name.size() + 2;
  }
  return out;
}

}  // namespace

void Reader::unknown_key(const yaml::Key& key) {
  const std::string name = yaml::printable(key.text);
  const std::string path = path_.empty() ? name : path_ + "." + name;
  bad_.insert(path);
  if (problems_.full()) return problems_.add(key.place, "unknown key");
  std::string hint;
  // A known key in the wrong section is a better suggestion than a similar key in this section.
  std::string elsewhere;
  static const std::vector<KeyInfo> keys = config_keys();
  for (const KeyInfo& k : keys) {
    const size_t dot = k.key.rfind('.');
    if (k.key == path)
      hint = fmt::format("; write it as nested sections (dots work on the command line only)");
    // Among keys of that name, the least nested is the most likely.
    if (dot != std::string::npos && k.key.substr(dot + 1) == key.text &&
        (elsewhere.empty() || depth(k.key) < depth(elsewhere)))
      elsewhere = k.key;
  }
  if (hint.empty()) {
    std::string near = yaml::nearest(key.text, known_);
    if (near.empty() || !elsewhere.empty()) near = elsewhere.empty() ? near : elsewhere;
    if (!near.empty()) hint = fmt::format("; did you mean {}?", near);
  }
  std::vector<std::string> names = known_;
  if (path_.empty()) names.insert(names.begin(), "extends");
  problems_.add(key.place, fmt::format("unknown key {}{}", path, hint),
                fmt::format("known{}: {}", path_.empty() ? "" : " in " + path_, wrapped(names)));
}

std::string Reader::article(const std::string& type) {
  if (type.find(" | ") != std::string::npos) return "one of " + type;
  if (type == "integer") return "an integer";
  if (type == "number") return "a number";
  return type;
}

std::string Reader::wrong_word(const std::vector<std::string>& words, const yaml::Node& node,
                               const std::string& key) {
  const std::string near =
      key == "train.device" && node.text == "gpu" ? "cuda" : yaml::nearest(node.text, words);
  return fmt::format("must be one of {}; got {}{}", fmt::join(words, ", "), yaml::printable(node.text),
                     near.empty() ? "" : fmt::format("; did you mean {}?", near));
}

}  // namespace sluice
