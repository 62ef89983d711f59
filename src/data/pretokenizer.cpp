#include "data/pretokenizer.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/error.h"
#include "core/strict_json.h"

namespace sluice {
namespace {

using nlohmann::json;

constexpr std::array<std::pair<std::string_view, std::string_view>, 4> kPatterns = {
    {{"gpt2", R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"},
     {"llama3",
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
      R"(\s*[\r\n]+|\s+(?!\S)|\s+)"},
     {"qwen2", R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
               R"(\s*[\r\n]+|\s+(?!\S)|\s+)"},
     {"o200k", R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
               R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
               R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)"
               R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
               R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)"}}};

/// The value of a key, which may be absent.
bool flag(const json& object, const char* key, bool absent, const std::string& where) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return absent;
  if (!found->is_boolean()) fail(ExitCode::data, "{}.{} must be true or false", where, key);
  return found->get<bool>();
}

std::string text(const json& object, const char* key, const std::string& where) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) fail(ExitCode::data, "{}.{} must be a text", where, key);
  return found->get<std::string>();
}

std::string quoted_literally(const std::string& literal) {
  std::string regex;
  for (const char c : literal) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80 && std::ispunct(byte)) regex += '\\';
    regex += c;
  }
  return regex;
}

constexpr size_t kMostSteps = 32;

}  // namespace

std::string_view known_pattern(std::string_view name) {
  for (const auto& [known, pattern] : kPatterns)
    if (known == name) return pattern;
  return "";
}

std::vector<std::string> known_pattern_names() {
  std::vector<std::string> names;
  for (const auto& [name, pattern] : kPatterns) names.emplace_back(name);
  return names;
}

Pretokenizer::Pretokenizer(const json& description, const std::string& where) {
  if (!description.is_object())
    fail(ExitCode::data, "{}: there is none; byte-level BPE needs ByteLevel, or a Sequence that ends with it",
         where);
  if (text(description, "type", where) != "Sequence") {
    add_step(description, where, true);
    return;
  }
  const auto list = description.find("pretokenizers");
  if (list == description.end() || !list->is_array() || list->empty())
    fail(ExitCode::data, "{}.pretokenizers must be a list", where);
  if (list->size() > kMostSteps)
    fail(ExitCode::data, "{}.pretokenizers: at most {} are supported", where, kMostSteps);
  for (size_t i = 0; i < list->size(); ++i)
    add_step((*list)[i], fmt::format("{}.pretokenizers[{}]", where, i), i + 1 == list->size());
}

void Pretokenizer::add_step(const json& d, const std::string& where, bool last) {
  if (!d.is_object()) fail(ExitCode::data, "{} must be an object", where);
  const std::string type = text(d, "type", where);
  if ((type == "ByteLevel") != last)
    fail(ExitCode::data, "{}: type {}, but byte-level BPE ends with ByteLevel, and has it nowhere else",
         where, printable(type));
  if (type == "ByteLevel") {
    Step step;
    step.adds_space = flag(d, "add_prefix_space", true, where);
    if (flag(d, "use_regex", true, where))
      step.pattern.emplace_back(std::string(known_pattern("gpt2")), where);
    steps_.push_back(std::move(step));
  } else if (type == "Split") {
    add_split(d, where);
  } else if (type == "Digits") {
    Step step;
    step.pattern.emplace_back("\\p{N}", where);
    if (!flag(d, "individual_digits", false, where)) step.behavior = Behavior::contiguous;
    steps_.push_back(std::move(step));
  } else {
    fail(ExitCode::data, "{}: type {} is not supported; ByteLevel, Split, Digits and a Sequence of them are",
         where, printable(type));
  }
}

void Pretokenizer::add_split(const json& d, const std::string& where) {
  Step step;
  const auto pattern = d.find("pattern");
  if (pattern == d.end() || !pattern->is_object() || pattern->size() != 1)
    fail(ExitCode::data, "{}.pattern must be an object with either String or Regex", where);
  const std::string kind = pattern->begin().key();
  if (kind != "String" && kind != "Regex")
    fail(ExitCode::data, "{}.pattern has {}; it must be String or Regex", where, printable(kind));
  const std::string given = text(*pattern, kind.c_str(), where + ".pattern");
  if (given.empty()) fail(ExitCode::data, "{}.pattern is empty", where);
  step.pattern.emplace_back(kind == "Regex" ? given : quoted_literally(given), where + ".pattern");
  step.invert = flag(d, "invert", false, where);
  const std::string behavior = text(d, "behavior", where);
  constexpr std::array<const char*, 5> names = {"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext",
                                                "Contiguous"};
  size_t i = 0;
  while (i < names.size() && behavior != names[i]) ++i;
  if (i == names.size())
    fail(ExitCode::data,
         "{}.behavior: {} is unknown; it must be Isolated, Removed, MergedWithPrevious, MergedWithNext or "
         "Contiguous",
         where, printable(behavior));
  step.behavior = static_cast<Behavior>(i);
  steps_.push_back(std::move(step));
}

bool Pretokenizer::adds_space() const { return steps_.back().adds_space; }

bool Pretokenizer::drops_text() const {
  return std::any_of(steps_.begin(), steps_.end(),
                     [](const Step& step) { return step.behavior == Behavior::removed; });
}

int64_t Pretokenizer::cut(std::string_view whole, Pattern::Memory& memory, const OnPiece& on_piece) const {
  Cut cut{memory, on_piece};
  if (!whole.empty()) apply(0, whole, cut);
  return cut.added_spaces;
}

void Pretokenizer::apply(size_t i, std::string_view piece, Cut& cut) const {
  if (i == steps_.size()) return cut.on_piece(piece);
  const Step& step = steps_[i];
  if (step.adds_space && !piece.starts_with(' ')) {
    const std::string longer = " " + std::string(piece);
    ++cut.added_spaces;
    return step.pattern.empty() ? apply(i + 1, longer, cut) : split(i, longer, cut);
  }
  step.pattern.empty() ? apply(i + 1, piece, cut) : split(i, piece, cut);
}

/// Matches and what lies between them, in order, are merged or dropped by the behaviour, from which the
/// pieces follow. At most two spans are held: those before `open` have been passed on.
void Pretokenizer::split(size_t i, std::string_view whole, Cut& cut) const {
  const Step& step = steps_[i];
  const auto pass = [&](const Span& span) {
    if (span.end > span.begin) apply(i + 1, whole.substr(span.begin, span.end - span.begin), cut);
  };
  Span open{};  // may still grow
  bool is_open = false, after_match = false;
  const auto add = [&](size_t begin, size_t end, bool match) {
    const Span span{begin, end, match != step.invert};
    bool grows = false;
    switch (step.behavior) {
      case Behavior::isolated:
        return pass(span);
      case Behavior::removed:
        return span.match ? void() : pass(span);
      case Behavior::contiguous:
        grows = is_open && open.match == span.match;
        break;
      case Behavior::merged_with_previous:
        grows = is_open && span.match && !after_match;
        break;
      case Behavior::merged_with_next:
        grows = is_open && open.match && !span.match;
        break;
    }
    after_match = span.match;
    if (grows) {
      open.end = span.end;
      if (step.behavior == Behavior::merged_with_next) open.match = false;
      return;
    }
    if (is_open) pass(open);
    open = span;
    is_open = true;
  };

  const Pattern& pattern = step.pattern[0];
  size_t done = 0, from = 0, last_end = 0, begin = 0, end = 0;
  bool any = false;
  while (from <= whole.size() && pattern.find(whole, from, cut.memory, begin, end)) {
    if (begin == end && any && last_end == end) {  // an empty match right behind a match counts for nothing
      from = end + 1;
      while (from < whole.size() && (static_cast<unsigned char>(whole[from]) & 0xc0) == 0x80) ++from;
      continue;
    }
    if (done != begin) add(done, begin, false);
    add(begin, end, true);
    done = from = last_end = end;
    any = true;
  }
  if (done != whole.size()) add(done, whole.size(), false);
  if (is_open) pass(open);
}

}  // namespace sluice
