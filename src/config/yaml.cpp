#include "config/yaml.h"

#include <spdlog/fmt/fmt.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <optional>
#include <sstream>

#include "core/utf8.h"

namespace sluice::yaml {
namespace {

constexpr size_t kMaxBytes = size_t{1} << 20;
constexpr size_t kMaxDepth = 32;
constexpr size_t kMaxKeys = 1000;  // per section; the largest has about 30

/// Stops the parser at the first feature that is refused.
struct Refused {
  Place place;
  std::string message;
};

/// Builds the tree from yaml-cpp's events, because its own nodes keep duplicate keys silently.
class Builder : public YAML::EventHandler {
 public:
  Builder(int source, int first_column, const std::deque<Source>& sources, Problems& problems)
      : source_(source), first_column_(first_column), sources_(sources), problems_(problems) {}

  Node root;

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (++documents_ > 1) throw Refused{place(mark), "a second document (---): one per file"};
  }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    // The mark of an empty value is that of the next token: point at the key instead.
    Place at = place(mark);
    if (!stack_.empty() && stack_.back().node->kind == Node::Kind::map && stack_.back().key)
      at = stack_.back().key->place;
    guard(at, "", anchor);
    if (expects_key()) throw Refused{at, "an empty key"};
    begin(Node{Node::Kind::null, at, "", false, {}, {}});
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    throw Refused{place(mark), "aliases (*name) are not allowed; use extends, or write the value again"};
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    guard(place(mark), tag, anchor);
    if (expects_key()) {
      if (value == "<<" && tag != "!")
        throw Refused{place(mark), "merge keys (<<) are not allowed; use extends"};
      add_key(Key{value, place(mark)});
      return;
    }
    begin(Node{Node::Kind::scalar, place(mark), value, tag == "!", {}, {}});
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(mark, tag, anchor, Node::Kind::list);
  }
  void OnSequenceEnd() override { stack_.pop_back(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(mark, tag, anchor, Node::Kind::map);
  }
  void OnMapEnd() override { stack_.pop_back(); }

 private:
  struct Frame {
    Node* node;  // stays valid: its parent's items do not grow while it is open
    std::optional<Key> key;
  };

  Place place(const YAML::Mark& mark) const {
    if (mark.is_null()) return {source_, 0, 0};
    return {source_, mark.line + 1, mark.column + 1 + (mark.line == 0 ? first_column_ : 0)};
  }
  bool expects_key() const {
    return !stack_.empty() && stack_.back().node->kind == Node::Kind::map && !stack_.back().key;
  }
  void guard(Place at, const std::string& tag, YAML::anchor_t anchor) const {
    if (anchor != 0)
      throw Refused{at, "anchors (&name) are not allowed; use extends, or write the value again"};
    if (!tag.empty() && tag != "?" && tag != "!")
      throw Refused{at, fmt::format("tags ({}) are not allowed", printable(tag))};
  }
  Node* begin(Node node) {
    if (stack_.empty()) {
      root = std::move(node);
      return &root;
    }
    Frame& top = stack_.back();
    if (top.node->kind == Node::Kind::map) {
      top.node->keys.push_back(*top.key);
      top.key.reset();
    }
    top.node->items.push_back(std::move(node));
    return &top.node->items.back();
  }
  void open(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, Node::Kind kind) {
    guard(place(mark), tag, anchor);
    if (expects_key()) throw Refused{place(mark), "a list or section cannot be a key; is a bracket missing?"};
    if (stack_.size() >= kMaxDepth)
      throw Refused{place(mark), fmt::format("nested deeper than {} levels", kMaxDepth)};
    Node* node = begin(Node{kind, place(mark), "", false, {}, {}});
    stack_.push_back({node, std::nullopt});
  }
  void add_key(Key key) {
    const Frame& top = stack_.back();
    if (top.node->keys.size() >= kMaxKeys)
      throw Refused{key.place,
                    fmt::format("more than {} keys in one section: not a configuration", kMaxKeys)};
    for (const Key& earlier : top.node->keys)
      if (earlier.text == key.text) {
        problems_.add(key.place, fmt::format("duplicate key {}; it is also given at {}. Remove one.",
                                             path_to(key.text), yaml::describe(sources_, earlier.place)));
        break;
      }
    stack_.back().key = std::move(key);
  }
  std::string path_to(const std::string& last) const {
    std::string path;
    for (size_t i = 0; i + 1 < stack_.size(); ++i) {
      const Node& node = *stack_[i].node;
      if (node.kind == Node::Kind::map) {
        path += (path.empty() ? "" : ".") + node.keys.back().text;
      } else {
        path += fmt::format("[{}]", node.items.size() - 1);
      }
    }
    return printable(path.empty() ? last : path + "." + last, 120);
  }

  int source_, first_column_, documents_ = 0;
  const std::deque<Source>& sources_;
  Problems& problems_;
  std::vector<Frame> stack_;
};

/// Offset of the first control character, which YAML forbids or editors hide; npos if there is none.
size_t find_control(std::string_view text) {
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if ((c < 0x20 && c != '\n' && c != '\r' && c != '\t') || c == 0x7f) return i;
  }
  return std::string_view::npos;
}

/// Control characters, and of a text that is not UTF-8 every byte above 0x7f, are escaped.
void append_visible(std::string& out, char c, bool utf8) {
  const auto u = static_cast<unsigned char>(c);
  if (u < 0x20 || u == 0x7f || (u >= 0x80 && !utf8)) {
    out += fmt::format("\\x{:02x}", u);
  } else {
    out += c;
  }
}

/// A message, whatever names and values it quotes, as a terminal may show it: several lines stay several
/// lines.
std::string visible(std::string_view message) {
  std::string out;
  const bool utf8 = find_invalid_utf8(message) == std::string_view::npos;
  for (const char c : message) {
    if (c == '\n')
      out += c;
    else
      append_visible(out, c, utf8);
  }
  return out;
}

/// The text of a line that counts from 1; empty for line 0.
std::string_view line_of(std::string_view text, int line) {
  if (line < 1) return {};
  size_t begin = 0;
  for (int i = 1; i < line; ++i) {
    const size_t end = text.find('\n', begin);
    if (end == std::string_view::npos) return {};
    begin = end + 1;
  }
  std::string_view rest = text.substr(begin);
  rest = rest.substr(0, rest.find('\n'));
  if (!rest.empty() && rest.back() == '\r') rest.remove_suffix(1);
  return rest;
}

/// The column, from 1, of a tab among the blanks that a line begins with; 0 if there is none.
int tab_in_indentation(std::string_view line) {
  const std::string_view blanks = line.substr(0, std::min(line.find_first_not_of(" \t"), line.size()));
  return static_cast<int>(blanks.find('\t') + 1);
}

}  // namespace

std::string printable(std::string_view text, size_t limit) {
  std::string out;
  const bool utf8 = find_invalid_utf8(text) == std::string_view::npos;
  for (const char c : text) {
    if (out.size() >= limit) return out + "...";
    append_visible(out, c, utf8);
  }
  return out;
}

const Node* Node::find(std::string_view key) const {
  for (size_t i = 0; i < keys.size(); ++i)
    if (keys[i].text == key) return &items[i];
  return nullptr;
}

std::string Node::describe() const {
  switch (kind) {
    case Kind::null:
      return "nothing";
    case Kind::list:
      return "a list";
    case Kind::map:
      return "a section";
    case Kind::scalar:
      break;
  }
  return quoted ? fmt::format("the text \"{}\"", printable(text)) : printable(text);
}

std::string describe(const std::deque<Source>& sources, Place place) {
  if (place.source < 0) return "configuration";
  const Source& source = sources[static_cast<size_t>(place.source)];
  if (source.command_line) return "command line";
  if (place.line == 0) return source.path;
  return fmt::format("{}:{}:{}", source.path, place.line, place.column);
}

void Problems::add(Place place, std::string message, std::string detail) {
  const bool known_place = !places_.emplace(place.source, place.line, place.column).second;
  if (full()) {
    more_ += !known_place;
    return;
  }
  for (const Problem& p : problems_)
    if (p.place == place && p.message == message) return;
  problems_.push_back({place, std::move(message), std::move(detail)});
}

std::string Problems::render(const std::deque<Source>& sources) const {
  const auto order = [&](const Problem* p) {
    const bool known = p->place.source >= 0;
    const Source* s = known ? &sources[static_cast<size_t>(p->place.source)] : nullptr;
    // Command-line sources keep the order of the arguments; a file that is read twice sorts as one.
    return std::tuple(s && s->command_line, s && !s->command_line ? s->path : std::string(),
                      s && s->command_line ? p->place.source : 0, p->place.line, p->place.column);
  };
  std::vector<const Problem*> sorted;
  for (const Problem& p : problems_) sorted.push_back(&p);
  std::stable_sort(sorted.begin(), sorted.end(), [&](auto* a, auto* b) { return order(a) < order(b); });
  std::vector<std::string> shown;
  for (const Problem* p : sorted) {
    std::string text = fmt::format("{}: {}", describe(sources, p->place), visible(p->message));
    if (p->place.source >= 0 && p->place.line > 0) {
      const Source& source = sources[static_cast<size_t>(p->place.source)];
      const std::string_view line = line_of(source.text, p->place.line);
      const std::string number = source.command_line ? "" : std::to_string(p->place.line);
      std::string spaced(line.substr(0, 110));
      std::replace(spaced.begin(), spaced.end(), '\t', ' ');
      if (!spaced.empty() && static_cast<size_t>(p->place.column) <= spaced.size() + 1)
        text += fmt::format("\n  {:>4} | {}\n  {:>4} | {:>{}}", number, printable(spaced, 440), "", "^",
                            p->place.column);
    }
    if (!p->detail.empty()) text += "\n         " + visible(p->detail);
    if (std::find(shown.begin(), shown.end(), text) != shown.end()) continue;  // a file extended twice
    shown.push_back(std::move(text));
  }
  std::string out = fmt::format("{}", fmt::join(shown, "\n"));
  if (more_ > 0) out += fmt::format("\n... and {} more", more_);
  return out;
}

Node parse(const std::deque<Source>& sources, int source, size_t begin, Problems& problems) {
  const Source& from = sources[static_cast<size_t>(source)];
  const std::string_view text = std::string_view(from.text).substr(begin);
  Node empty{Node::Kind::map, {source, 0, 0}, "", false, {}, {}};
  if (text.size() > kMaxBytes) {
    problems.add({source, 0, 0}, "larger than 1 MiB: not a configuration");
    return empty;
  }
  if (const size_t bad = find_control(text); bad != std::string_view::npos) {
    const auto line =
        static_cast<int>(std::count(text.begin(), text.begin() + static_cast<int64_t>(bad), '\n')) + 1;
    problems.add({source, line, 1},
                 fmt::format("control character 0x{:02x}", static_cast<unsigned char>(text[bad])));
    return empty;
  }
  if (const size_t bad = find_invalid_utf8(text); bad != std::string_view::npos) {
    const auto line =
        static_cast<int>(std::count(text.begin(), text.begin() + static_cast<int64_t>(bad), '\n')) + 1;
    problems.add({source, line, 1},
                 fmt::format("byte 0x{:02x} is not UTF-8", static_cast<unsigned char>(text[bad])));
    return empty;
  }
  Builder builder(source, static_cast<int>(begin), sources, problems);
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(builder)) {
    }
  } catch (const Refused& refused) {
    problems.add(refused.place, refused.message);
    return empty;
  } catch (const YAML::Exception& e) {
    const Place place = e.mark.is_null()
                            ? Place{source, 0, 0}
                            : Place{source, e.mark.line + 1,
                                    e.mark.column + 1 + (e.mark.line == 0 ? static_cast<int>(begin) : 0)};
    if (const int tab = tab_in_indentation(line_of(from.text, place.line)); tab > 0) {
      problems.add({source, place.line, tab},
                   "not valid YAML: the line is indented with a tab; use spaces, as many as its neighbours");
      return empty;
    }
    problems.add(place, fmt::format("not valid YAML: {}", e.msg));
    return empty;
  }
  if (builder.root.place.source < 0) builder.root.place = {source, 0, 0};  // an empty text: null
  return builder.root;
}

void merge(Node& base, const Node& overlay) {
  if (base.kind != Node::Kind::map || overlay.kind != Node::Kind::map) {
    base = overlay;
    return;
  }
  for (size_t i = 0; i < overlay.keys.size(); ++i) {
    const auto same = std::find_if(base.keys.begin(), base.keys.end(),
                                   [&](const Key& k) { return k.text == overlay.keys[i].text; });
    if (same == base.keys.end()) {
      base.keys.push_back(overlay.keys[i]);
      base.items.push_back(overlay.items[i]);
    } else {
      merge(base.items[static_cast<size_t>(same - base.keys.begin())], overlay.items[i]);
      same->place = overlay.keys[i].place;
    }
  }
}

bool assign(Node& root, std::string_view path, const Node& value, std::string& message) {
  Node* node = &root;
  size_t at = 0;
  while (true) {
    const size_t end = std::min(path.find_first_of(".[", at), path.size());
    const std::string name(path.substr(at, end - at));
    if (name.empty() || name.find_first_of("] \t") != std::string::npos) {
      message = fmt::format("{} is not the name of a key", printable(path));
      return false;
    }
    if (node->kind == Node::Kind::null) *node = Node{Node::Kind::map, value.place, "", false, {}, {}};
    if (node->kind != Node::Kind::map) {
      message =
          fmt::format("{} is {}, it has no {}{}", path.substr(0, at == 0 ? 0 : at - 1), node->describe(),
                      name, node->kind == Node::Kind::list ? "; name an element: [0]" : "");
      return false;
    }
    const Place here{value.place.source, 1, 1};
    size_t i = 0;
    while (i < node->keys.size() && node->keys[i].text != name) ++i;
    if (i == node->keys.size()) {
      node->keys.push_back({name, here});
      node->items.push_back(Node{Node::Kind::null, here, "", false, {}, {}});
    }
    if (end == path.size()) node->keys[i].place = here;
    node = &node->items[i];
    at = end;
    while (at < path.size() && path[at] == '[') {
      const size_t close = path.find(']', at);
      const std::string digits(path.substr(at + 1, close == std::string_view::npos ? close : close - at - 1));
      if (close == std::string_view::npos || digits.empty() || digits.size() > 6 ||
          digits.find_first_not_of("0123456789") != std::string::npos) {
        message = fmt::format("{} has a bad index; write name[0]", printable(path));
        return false;
      }
      const size_t index = std::stoul(digits);
      const size_t length = node->kind == Node::Kind::list ? node->items.size() : 0;
      if (node->kind != Node::Kind::list && node->kind != Node::Kind::null) {
        message = fmt::format("{} is not a list", path.substr(0, at));
        return false;
      }
      if (index >= length) {
        message = fmt::format("{} does not exist: {} has {} element{}", path.substr(0, close + 1),
                              path.substr(0, at), length, length == 1 ? "" : "s");
        return false;
      }
      node = &node->items[index];
      at = close + 1;
    }
    if (at == path.size()) break;
    if (path[at] != '.') {
      message = fmt::format("{} is not the name of a key", printable(path));
      return false;
    }
    ++at;
  }
  merge(*node, value);
  return true;
}

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  const auto distance = [](std::string_view a, std::string_view b) {
    // Optimal string alignment: insert, delete, replace, swap neighbours.
    std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
    for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
    for (size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
    for (size_t i = 1; i <= a.size(); ++i)
      for (size_t j = 1; j <= b.size(); ++j) {
        d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
        if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
          d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    return d[a.size()][b.size()];
  };
  if (word.size() > 64) return "";
  std::string best;
  size_t best_distance = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const size_t n = distance(word, candidate);
    if (n < best_distance && n < candidate.size()) {
      best_distance = n;
      best = candidate;
    }
  }
  return best;
}

}  // namespace sluice::yaml
