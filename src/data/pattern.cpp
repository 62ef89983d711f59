#include "data/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <vector>

#include "core/error.h"
#include "core/strict_json.h"
#include "data/later_characters.h"

namespace sluice {
namespace {

constexpr uint32_t kMostSteps = 50'000'000;
constexpr size_t kLongestPattern = 10'000;
constexpr size_t kSmallStack = 32 << 10, kLargeStack = 8 << 20;  // of compiled matching code, bytes

std::string pcre_message(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

const CharacterClass* character_class(std::string_view name) {
  const auto found = std::find_if(kCharacterClasses.begin(), kCharacterClasses.end(),
                                  [&](const CharacterClass& known) { return known.name == name; });
  return found == kCharacterClasses.end() ? nullptr : found;
}

bool is_ascii(char c) { return static_cast<unsigned char>(c) < 0x80; }
bool is_alphanumeric(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// Rewrites a pattern from left to right.
class Translation {
 public:
  Translation(const std::string& regex, const std::string& where) : regex_(regex), where_(where) {}

  std::string result() {
    while (at_ < regex_.size()) step();
    // Where a group does not end PCRE2 says so.
    if (groups_.size() == 1) out_ += std::string(groups_[0].options, ')');
    return std::move(out_);
  }

 private:
  static constexpr size_t kNowhere = std::string::npos;
  enum class Repeated { no, in_braces, otherwise };
  struct Group {
    size_t begin = 0;       // in the output
    size_t options = 0;     // groups that (?i) has opened within it, and that end with it
    bool caseless = false;  // before it
  };

  char next(size_t behind = 0) const { return at_ + behind < regex_.size() ? regex_[at_ + behind] : '\0'; }

  void begin_atom() {
    atom_ = out_.size();
    repeated_ = Repeated::no;
  }

  void step() {
    const char c = next();
    if (c == '\\') return escape();
    if (c == '[') return character_class_in_brackets();
    if (c == '*' || c == '+' || c == '?' || c == '{') return quantifier();
    if (c == '(') return open_group();
    if (c == ')') return close_group();
    if (c == '|') {
      atom_ = kNowhere;
      letter_ = 0;
      out_ += c;
      ++at_;
      return;
    }
    begin_atom();
    take_literal(c);
    out_ += regex_[at_++];
    while (at_ < regex_.size() && (static_cast<unsigned char>(regex_[at_]) & 0xc0) == 0x80)
      out_ += regex_[at_++];
  }

  /// Oniguruma lets one letter match several where case is ignored, (?i:ss) an eszett; PCRE2 does not. Of
  /// ASCII letters these are the only ones.
  void take_literal(char c) {
    const char before = letter_;
    letter_ = 0;
    if (!caseless_) return;
    if (!is_ascii(c)) refuse("a character that is not ASCII, where case is ignored");
    letter_ = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    for (const std::string_view pair : {"ss", "st", "ff", "fi", "fl"})
      if (before == pair[0] && letter_ == pair[1]) refuse("letters of a ligature, where case is ignored");
  }

  void open_group() {
    if (next(1) == '*') refuse("a verb");
    std::string_view kind;
    if (next(1) == '?') {
      const std::string_view rest = std::string_view(regex_).substr(at_ + 2);
      for (const std::string_view same : {":", "=", "!", ">", "<=", "<!", "i:", "i)", "-i:", "-i)"})
        if (rest.starts_with(same)) kind = same;
      if (kind.empty()) refuse("this kind of group");
    }
    const bool names_case = kind.find('i') != std::string_view::npos;
    if (kind.ends_with(')')) {
      // (?i) holds to the end of the group around it, alternatives included: a(?i)b|c is a(?i:b|c).
      ++groups_.back().options;
    } else {
      groups_.push_back({out_.size(), 0, caseless_});
    }
    out_ += '(';
    if (!kind.empty()) out_ += '?' + std::string(kind);
    if (kind.ends_with(')')) out_.back() = ':';
    if (names_case) caseless_ = kind[0] == 'i';
    at_ += kind.empty() ? 1 : 2 + kind.size();
    atom_ = kNowhere;
  }

  void close_group() {
    if (groups_.size() == 1) refuse("a parenthesis that closes nothing");
    out_ += std::string(groups_.back().options + 1, ')');
    begin_atom();
    atom_ = groups_.back().begin;
    caseless_ = groups_.back().caseless;
    groups_.pop_back();
    ++at_;
  }

  /// {n} {n,} {n,m} and {,m}, which PCRE2 does not know before 10.43; the length of it, 0 for other braces.
  size_t braces(std::string& repeat, bool& fixed) const {
    size_t length = 1;
    std::string low, high;
    while (is_digit(next(length))) low += next(length++);
    fixed = next(length) != ',';
    if (!fixed)
      for (++length; is_digit(next(length));) high += next(length++);
    if (next(length) != '}' || (low.empty() && high.empty())) return 0;
    repeat = '{' + (low.empty() ? "0" : low) + (fixed ? "" : ',' + high) + '}';
    return length + 1;
  }

  /// Behind braces Oniguruma reads + as a quantifier of its own, and so ? behind {n}; PCRE2 as possessive and
  /// lazy.
  void quantifier() {
    std::string repeat(1, next());
    bool fixed = false;
    const bool in_braces = next() == '{';
    const size_t length = in_braces ? braces(repeat, fixed) : 1;
    if (length == 0) {
      begin_atom();
      take_literal('{');
      out_ += "\\{";
      ++at_;
      return;
    }
    if (atom_ == kNowhere) refuse("a quantifier of nothing");
    if (repeated_ == Repeated::otherwise) refuse("a quantifier of a quantifier");
    if (repeated_ == Repeated::in_braces) {
      out_.insert(atom_, "(?:");
      out_ += ')';
    }
    out_ += repeat;
    at_ += length;
    repeated_ = in_braces ? Repeated::in_braces : Repeated::otherwise;
    if ((next() == '?' && !fixed) || (next() == '+' && !in_braces)) {
      out_ += regex_[at_++];
      repeated_ = Repeated::otherwise;
    }
  }

  void character_class_in_brackets() {
    begin_atom();
    letter_ = 0;
    in_class_ = true;
    out_ += regex_[at_++];
    if (next() == '^') out_ += regex_[at_++];
    if (next() == ']') refuse("an empty class");
    if (next() == ':' || next() == '.' || next() == '=') out_ += '\\';  // no bracket name begins here
    while (next() != ']' || at_ == regex_.size()) {
      if (at_ == regex_.size()) refuse("a class that does not end");
      if (next() == '[') refuse(next(1) == ':' ? "the name of a class" : "a class within a class");
      if (next() == '&' && next(1) == '&') refuse("an intersection of classes");
      if (next() == '\\') {
        escape();
        continue;
      }
      if (caseless_ && !is_ascii(next())) refuse("a character that is not ASCII, where case is ignored");
      out_ += regex_[at_++];
    }
    out_ += regex_[at_++];
    in_class_ = false;
  }

  void escape() {
    if (at_ + 1 == regex_.size()) refuse("a backslash at the end");
    const char c = regex_[at_ + 1];
    if (!in_class_) begin_atom();
    switch (c) {
      case 's':
      case 'S':
        return add_class(c == 'S', {"", "\\p{White_Space}", ""}, 2);
      case 'd':
      case 'D':
        return add_class(c == 'D', *character_class("Nd"), 2);
      case 'w':
      case 'W':
        return add_class(c == 'W', *character_class("Word"), 2);
      case 'p':
      case 'P':
        return property(c == 'P');
      case 'x':
        return hexadecimal();
      default:
        break;
    }
    if (c != 'r' && c != 'n' && c != 't' && c != 'f' && c != 'v' && (!is_ascii(c) || is_alphanumeric(c)))
      refuse("this escape");
    letter_ = 0;
    out_ += c == 'v' ? std::string("\\x0b") : regex_.substr(at_, 2);
    at_ += 2;
  }

  void property(bool negated) {
    const size_t end = regex_.find('}', at_);
    if (next(2) != '{' || end == std::string::npos) refuse("a property without braces");
    std::string name = regex_.substr(at_ + 3, end - at_ - 3);
    if (name.starts_with('^')) {
      name.erase(0, 1);
      negated = !negated;
    }
    const CharacterClass* const known = name == "Word" ? nullptr : character_class(name);
    if (!known) refuse("the property " + printable(name));
    add_class(negated, *known, end + 1 - at_);
  }

  void hexadecimal() {
    const size_t first = at_ + 2;
    size_t end = first;
    std::string digits;
    if (next(2) == '{') {
      end = regex_.find('}', end);
      if (end == std::string::npos) refuse("a brace that does not end");
      digits = regex_.substr(first + 1, end - first - 1);
      ++end;
    } else {
      while (end < first + 2 && std::isxdigit(static_cast<unsigned char>(next(end - at_)))) ++end;
      if (end != first + 2) refuse("\\x without two digits");
      if (regex_[first] >= '8') refuse("a byte above 7F");  // a byte there, a character here
      digits = regex_.substr(first, 2);
    }
    if (caseless_) {
      digits.erase(0, std::min(digits.find_first_not_of('0'), digits.size()));
      const bool ascii = digits.size() < 2 || (digits.size() == 2 && digits[0] < '8');
      const char c = ascii ? static_cast<char>(std::strtol(digits.c_str(), nullptr, 16)) : '\x80';
      if (!in_class_ || !ascii) take_literal(c);
    }
    out_ += regex_.substr(at_, end - at_);
    at_ = end;
  }

  /// Writes a class for an escape of this length. Outside brackets it does not care about case.
  void add_class(bool negated, const CharacterClass& known, size_t length) {
    std::string members = std::string(known.members) + std::string(known.later);
    const bool whole = known.later.empty() && known.name != "Word";
    if (negated && whole) members[1] = 'P';
    if (in_class_) {
      if (caseless_) refuse("a class of characters in brackets, where case is ignored");
      if (negated && !whole) refuse("a negated class within a class");
      out_ += members;
    } else {
      if (known.name == "Word") members += kWordsAlone;
      const std::string alone = whole ? members : fmt::format("[{}{}]", negated ? "^" : "", members);
      out_ += caseless_ ? "(?-i:" + alone + ")" : alone;
      letter_ = 0;
    }
    at_ += length;
  }

  [[noreturn]] void refuse(const std::string& what) const {
    fail(ExitCode::data, "{}: the regular expression {} has, at character {}, {}, which is not supported",
         where_, printable(regex_), at_ + 1, what);
  }

  const std::string &regex_, &where_;
  std::string out_;
  size_t at_ = 0;
  size_t atom_ = kNowhere;  // where in the output begins what a quantifier would repeat
  Repeated repeated_ = Repeated::no;
  std::vector<Group> groups_ = {{}};  // open ones; the first is the pattern
  bool in_class_ = false, caseless_ = false;
  char letter_ = 0;  // the one before, where case is ignored
};

}  // namespace

std::string pcre_of_oniguruma(const std::string& regex, const std::string& where) {
  if (regex.size() > kLongestPattern)
    fail(ExitCode::data, "{}: the regular expression has {} bytes; at most {} are supported", where,
         regex.size(), kLongestPattern);
  return Translation(regex, where).result();
}

struct Pattern::Code {
  pcre2_code* code = nullptr;
  ~Code() { pcre2_code_free(code); }
};

struct Pattern::Memory::Parts {
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_match_data* match = pcre2_match_data_create(1, nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(kSmallStack, kLargeStack, nullptr);
  ~Parts() {
    pcre2_jit_stack_free(stack);
    pcre2_match_data_free(match);
    pcre2_match_context_free(context);
  }
};

Pattern::Memory::Memory() : parts_(std::make_unique<Parts>()) {
  if (!parts_->context || !parts_->match) throw std::bad_alloc();
  pcre2_set_match_limit(parts_->context, kMostSteps);
  if (parts_->stack) pcre2_jit_stack_assign(parts_->context, nullptr, parts_->stack);
}
Pattern::Memory::~Memory() = default;

Pattern::Pattern(const std::string& regex, const std::string& where)
    : where_(where), code_(std::make_unique<Code>()) {
  const std::string pattern = pcre_of_oniguruma(regex, where);
  int error = 0;
  PCRE2_SIZE offset = 0;
  // . stops at \n alone, whatever this PCRE2 was built for.
  const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), &pcre2_compile_context_free);
  if (!context) throw std::bad_alloc();
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  // ^ and $ mean lines, as in Ruby; there is no difference in the patterns of published tokenizers.
  code_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                              PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error,
                              &offset, context.get());
  if (!code_->code)
    fail(ExitCode::data, "{}: the regular expression {} is not valid: {}", where, printable(regex),
         pcre_message(error));
  pcre2_jit_compile(code_->code, PCRE2_JIT_COMPLETE);  // where it fails, the interpreter serves
}
Pattern::Pattern(Pattern&&) noexcept = default;
Pattern::~Pattern() = default;

bool Pattern::find(std::string_view text, size_t from, Memory& memory, size_t& begin, size_t& end) const {
  Memory::Parts& parts = *memory.parts_;
  const int found = pcre2_match(code_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                                PCRE2_NO_UTF_CHECK, parts.match, parts.context);
  if (found == PCRE2_ERROR_NOMATCH) return false;
  if (found < 0)
    fail(ExitCode::data, "{}: the regular expression fails on text of {} bytes: {}", where_, text.size(),
         pcre_message(found));
  const PCRE2_SIZE* const place = pcre2_get_ovector_pointer(parts.match);
  begin = place[0];
  end = place[1];
  if (end < begin) fail(ExitCode::data, "{}: the regular expression ends before it begins", where_);
  return true;
}

}  // namespace sluice
