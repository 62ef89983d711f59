#include "config/load.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "config/paths.h"
#include "config/rank_rules.h"
#include "config/reader.h"
#include "config/validate.h"
#include "config/yaml.h"
#include "core/error.h"
#include "core/io.h"
#include "core/utf8.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using yaml::Node;
using yaml::Place;

constexpr int64_t kMaxFileBytes = int64_t{1} << 20;
constexpr size_t kMaxChain = 64;  // of files that extend each other

class Loader {
 public:
  explicit Loader(bool resolved = false) : resolved_(resolved) {}

  /// The merged tree of `path` and what it extends. The file itself must exist; missing bases are problems.
  Node load_file(const std::string& path) {
    const fs::path canonical = fs::weakly_canonical(path);
    if (const auto known = merged_.find(canonical); known != merged_.end()) return known->second;
    const int index = static_cast<int>(sources_.size());
    sources_.push_back({path, fs::path(path).parent_path().string(), "", false});
    // One byte more than the limit, so that the parser reports a file that is too large.
    sources_.back().text = io::read_file(path, kMaxFileBytes + 1);
    chain_.push_back(canonical);
    Node tree = yaml::parse(sources_, index, 0, problems_);
    if (tree.kind == Node::Kind::null) tree.kind = Node::Kind::map;  // an empty file states nothing

    Node merged{Node::Kind::map, tree.place, "", false, {}, {}};
    for (const Node& base : take_extends(tree)) {
      if (resolved_) {
        problems_.add(
            base.place,
            "extends: the configuration of a run or a checkpoint states every key itself, and extends no "
            "other file");
        continue;
      }
      if (base.kind != Node::Kind::scalar || base.text.empty()) {
        problems_.add(base.place,
                      fmt::format("extends must be a file name or a list of them, got {}", base.describe()));
        continue;
      }
      const std::string name =
          (fs::path(sources_[static_cast<size_t>(index)].folder) / base.text).lexically_normal();
      if (!io::exists(name) || io::is_directory(name)) {
        problems_.add(
            base.place,
            fmt::format("extends: there is no file {} (names are relative to the file that says so)",
                        yaml::printable(name, 200)));
      } else if (const fs::path other = fs::weakly_canonical(name);
                 std::find(chain_.begin(), chain_.end(), other) != chain_.end()) {
        problems_.add(base.place, fmt::format("extends: {} extends itself{}", name,
                                              chain_.back() == other ? "" : ", through the files between"));
      } else if (chain_.size() >= kMaxChain) {
        problems_.add(base.place,
                      fmt::format("extends: {} is the {}th file of a chain; at most {} may extend each other",
                                  name, kMaxChain + 1, kMaxChain));
      } else {
        yaml::merge(merged, load_file(name));
      }
    }
    // Each file is also checked alone, so that a mistake is reported even if another file overrides it.
    Config scratch;
    Reader(problems_).read(scratch, tree);
    if (tree.kind == Node::Kind::map) yaml::merge(merged, tree);
    chain_.pop_back();
    merged_.emplace(canonical, merged);
    return merged;
  }

  Node load_text(const std::string& text, const std::string& name) {
    sources_.push_back({name, "", text, false});
    return yaml::parse(sources_, 0, 0, problems_);
  }

  void apply_override(Node& root, const std::string& text) {
    const int index = static_cast<int>(sources_.size());
    sources_.push_back({"command line", "", text, true});
    const Place start{index, 1, 1};
    const size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0) {
      problems_.add(start, fmt::format("{} is not key=value", yaml::printable(text, 100)));
      return;
    }
    const std::string key = text.substr(0, equals);
    if (key == "extends") {
      problems_.add(start, "extends is allowed only in a file");
      return;
    }
    // A shell's unset variable must not pass for the default.
    if (text.find_first_not_of(" \t\n", equals + 1) == std::string::npos) {
      problems_.add(start, fmt::format("{0}= has no value; give one, or {0}=null for the default",
                                       yaml::printable(key, 100)));
      return;
    }
    const int64_t before = problems_.size();
    Node value = yaml::parse(sources_, index, equals + 1, problems_);
    if (problems_.size() != before) return;
    if (value.place.line == 0) value.place = {index, 1, static_cast<int>(equals) + 2};
    std::string message;
    if (!yaml::assign(root, key, value, message)) problems_.add(start, message);
  }

  Config finish(const Node& root, const std::string& path, KeyPlaces* places, const LoadPurpose& purpose) {
    Config config;
    Reader reader(problems_);
    reader.read(config, root);

    for_each_path(config, [&](std::string& value, const std::string& key) { resolve(value, key, reader); });
    if (config.name.empty()) config.name = fs::path(path).stem();
    if (find_invalid_utf8(config.name) != std::string::npos)
      problems_.add({0, 0, 0}, fmt::format("the file's name, {}, is not UTF-8 and cannot name the run: give "
                                           "name: in the file, or rename it",
                                           yaml::printable(config.name)));
    if (config.run_dir.empty()) config.run_dir = "runs/" + config.name;

    Combinations combinations(*this, reader);
    check_combinations(config, combinations);
    if (purpose.training) check_training(config, combinations);
    check_rank_rules(config, purpose.ranks, combinations);
    if (!problems_.empty()) {
      std::string message = problems_.render(sources_);
      if (problems_.size() > 1) message += fmt::format("\n{} problems", problems_.size());
      throw Error(ExitCode::usage, message);
    }
    if (places)
      for (const auto& [key, place] : reader.places()) (*places)[key] = yaml::describe(sources_, place);
    return config;
  }

 private:
  /// Adds a position to each problem of a combination, and drops problems that follow from a value that could
  /// not
  /// be read.
  class Combinations : public ProblemSink {
   public:
    Combinations(Loader& loader, const Reader& reader) : loader_(loader), reader_(reader) {}
    void operator()(const std::vector<std::string>& keys, const std::string& message) override {
      for (const std::string& key : keys)
        for (size_t end = key.find('.');; end = key.find('.', end + 1)) {
          if (reader_.bad().count(key.substr(0, end))) return;
          if (end == std::string::npos) break;
        }
      for (const std::string& key : keys) {
        const auto place = reader_.places().find(key);
        if (place != reader_.places().end()) return loader_.problems_.add(place->second, message);
      }
      loader_.problems_.add({0, 0, 0}, message);
    }

   private:
    Loader& loader_;
    const Reader& reader_;
  };

  /// Removes `extends` from a file's tree and returns its elements.
  static std::vector<Node> take_extends(Node& tree) {
    std::vector<Node> out;
    for (size_t i = 0; i < tree.keys.size();) {
      if (tree.keys[i].text != "extends") {
        ++i;
        continue;
      }
      const Node& value = tree.items[i];
      if (value.kind == Node::Kind::list) {
        out.insert(out.end(), value.items.begin(), value.items.end());
      } else if (value.kind != Node::Kind::null) {
        out.push_back(value);
      }
      tree.keys.erase(tree.keys.begin() + static_cast<int64_t>(i));
      tree.items.erase(tree.items.begin() + static_cast<int64_t>(i));
    }
    return out;
  }

  /// Turns a path relative to the file that states it into one relative to the working folder, or into an
  /// absolute path outside that folder.
  void resolve(std::string& path, const std::string& key, const Reader& reader) const {
    const auto place = reader.places().find(key);
    if (path.empty() || place == reader.places().end()) return;
    const std::string& folder = sources_[static_cast<size_t>(place->second.source)].folder;
    const fs::path absolute = fs::absolute(fs::path(folder) / path).lexically_normal();
    const fs::path relative = absolute.lexically_relative(fs::current_path());
    path = relative.empty() || *relative.begin() == ".." ? absolute.string() : relative.string();
  }

  bool resolved_;  // refuse `extends`
  std::deque<yaml::Source> sources_;
  std::vector<fs::path> chain_;
  std::map<fs::path, Node>
      merged_;  // each file that was read, merged with what it extends; several files may extend the same one
  yaml::Problems problems_;
};

/// Joins arguments that belong to one override: "key = value", "key= value" and "key =value" become
/// key=value.
std::vector<std::string> joined(const std::vector<std::string>& arguments) {
  std::vector<std::string> out;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& text = arguments[i];
    const bool begins = text.starts_with('='), open = !out.empty() && out.back().ends_with('=') &&
                                                      out.back().find('=') + 1 == out.back().size();
    if (!out.empty() && ((begins && out.back().find('=') == std::string::npos) ||
                         (open && text.find('=') == std::string::npos)))
      out.back() += text;
    else
      out.push_back(text);
  }
  return out;
}

Config load(Loader loader, const std::string& path, const std::vector<std::string>& overrides,
            KeyPlaces* places, const LoadPurpose& purpose) {
  std::error_code error;
  static_cast<void>(fs::current_path(error));
  if (error)
    fail(ExitCode::no_input,
         "the working folder cannot be found ({}); was it removed? Change to one that exists",
         error.message());
  if (io::is_directory(path) && io::exists(path + "/config.yaml"))
    fail(ExitCode::usage,
         "{} is a run or a checkpoint, but a configuration file is expected; its configuration is "
         "{}/config.yaml",
         path, path);
  Node root = loader.load_file(path);
  for (const std::string& text : joined(overrides)) loader.apply_override(root, text);
  return loader.finish(root, path, places, purpose);
}

}  // namespace

Config load_config(const std::string& path, const std::vector<std::string>& overrides, KeyPlaces* places,
                   const LoadPurpose& purpose) {
  return load(Loader(), path, overrides, places, purpose);
}

Config load_resolved_config(const std::string& path, const std::vector<std::string>& overrides) {
  return load(Loader(/*resolved=*/true), path, overrides, nullptr, {});
}

Config load_resolved_text(const std::string& text, const std::string& name,
                          const std::vector<std::string>& overrides) {
  Loader loader(/*resolved=*/true);
  Node root = loader.load_text(text, name);
  for (const std::string& one : joined(overrides)) loader.apply_override(root, one);
  return loader.finish(root, name, nullptr, {});
}

}  // namespace sluice
