#pragma once
// A guarded YAML subset: yaml-cpp finds the tokens, this file keeps marks and refuses what surprises. No
// anchors, aliases, tags or merge keys; depth <= 32, size <= 1 MiB; duplicate keys are problems.
#include <deque>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace sluice::yaml {

/// A text that values come from: a file, or one command-line override.
struct Source {
  std::string path;    // as shown to the user
  std::string folder;  // what its relative paths are relative to; "" is the working folder
  std::string text;
  bool command_line = false;
};

/// Where something is written. Lines and columns count from 1; line 0 stands for the source as a whole.
struct Place {
  int source = -1;
  int line = 0, column = 0;
  bool operator==(const Place&) const = default;
};

struct Key {
  std::string text;
  Place place;
};

struct Node {
  enum class Kind { null, scalar, list, map } kind = Kind::null;
  Place place;
  std::string text;         // of a scalar
  bool quoted = false;      // a quoted scalar is text, never a number or a boolean
  std::vector<Key> keys;    // of a map, parallel to items
  std::vector<Node> items;  // of a map or list

  const Node* find(std::string_view key) const;
  /// "a list", "a section", or the scalar itself in quotes, shortened: for messages.
  std::string describe() const;
};

/// Everything wrong with a configuration, told at once.
class Problems {
 public:
  /// message: one line. detail: further lines, may be empty. The same problem is kept once.
  void add(Place place, std::string message, std::string detail = "");
  bool empty() const { return problems_.empty(); }
  int64_t size() const { return static_cast<int64_t>(problems_.size()) + more_; }
  /// As many are kept as are shown: what comes then is only counted, by its place.
  bool full() const { return problems_.size() >= 50; }
  /// Sorted by file and line, command line last; compiler-like, with the source line and a caret.
  std::string render(const std::deque<Source>& sources) const;

 private:
  struct Problem {
    Place place;
    std::string message, detail;
  };
  std::vector<Problem> problems_;
  std::set<std::tuple<int, int, int>> places_;  // of all
  int64_t more_ = 0;                            // counted alone
};

/// Parses sources[source].text from character `begin` on into a tree. Syntax errors and refused features go
/// to `problems`; then the result is what was understood (an empty map in the worst case).
Node parse(const std::deque<Source>& sources, int source, size_t begin, Problems& problems);

/// Maps merge, everything else replaces; null replaces too (the reader takes it as "the default").
void merge(Node& base, const Node& overlay);

/// Applies `a.b[0].c` = value to a tree, creating maps on the way. False with a message when the path does
/// not fit.
bool assign(Node& root, std::string_view path, const Node& value, std::string& message);

/// "file:line:column", "file", or "command line".
std::string describe(const std::deque<Source>& sources, Place place);

/// The candidate nearest to `word` by edit distance, or "" when none is near.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

/// Control characters escaped, at most `limit` characters.
std::string printable(std::string_view text, size_t limit = 60);

}  // namespace sluice::yaml
