#pragma once
// A restricted subset of YAML: yaml-cpp finds the tokens; this file keeps their positions and refuses
// ambiguous features. No anchors, aliases, tags or merge keys; depth <= 32, size <= 1 MiB; duplicate keys are
// problems.
#include <deque>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace sluice::yaml {

/// A source of values: a file, or one command-line override.
struct Source {
  std::string path;    // as shown to the user
  std::string folder;  // the base of its relative paths; "" is the working folder
  std::string text;
  bool command_line = false;
};

/// A position in a source. Lines and columns count from 1; line 0 means the source as a whole.
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

/// Collects the problems of a configuration and reports them together.
class Problems {
 public:
  /// message: one line. detail: further lines, may be empty. The same problem is kept once.
  void add(Place place, std::string message, std::string detail = "");
  bool empty() const { return problems_.empty(); }
  int64_t size() const { return static_cast<int64_t>(problems_.size()) + more_; }
  /// Further problems are only counted, one per place, and not shown.
  bool full() const { return problems_.size() >= 50; }
  /// Sorted by file and line, command line last; compiler-like, with the source line and a caret.
  std::string render(const std::deque<Source>& sources) const;

 private:
  struct Problem {
    Place place;
    std::string message, detail;
  };
  std::vector<Problem> problems_;
  std::set<std::tuple<int, int, int>> places_;  // places of all problems, shown or counted
  int64_t more_ = 0;                            // counted, not shown
};

/// Parses sources[source].text from character `begin` on into a tree. Syntax errors and refused features are
/// added to `problems`; the result is then what could be parsed (possibly an empty map).
Node parse(const std::deque<Source>& sources, int source, size_t begin, Problems& problems);

/// Maps are merged; everything else replaces the old value. Null replaces too: the reader takes it as the
/// default.
void merge(Node& base, const Node& overlay);

/// Assigns `value` at the path `a.b[0].c`, creating maps as needed. Returns false with a message if the path
/// does not fit the tree.
bool assign(Node& root, std::string_view path, const Node& value, std::string& message);

/// "file:line:column", "file", or "command line".
std::string describe(const std::deque<Source>& sources, Place place);

/// The candidate nearest to `word` by edit distance, or "" when none is near.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

/// Control characters escaped, at most `limit` characters.
std::string printable(std::string_view text, size_t limit = 60);

}  // namespace sluice::yaml
