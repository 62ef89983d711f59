#include "data/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>
#include <cctype>

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

/// Rewrites a pattern from left to right.
class Translation {
 public:
  Translation(const std::string& regex, const std::string& where) : regex_(regex), where_(where) {}

  std::string result() {
    while (at_ < regex_.size()) step();
    if (in_class_) refuse("a class that does not end");
    return std::move(out_);
  }

 private:
  void step() {
    const char c = regex_[at_];
    if (c == '\\') return escape();
    if (in_class_) {
      if (c == '[' && !regex_.substr(at_).starts_with("[:")) refuse("a class within a class");
      if (regex_.substr(at_, 2) == "&&") refuse("an intersection of classes");
      if (c == '[') {  // [:alpha:]
        const size_t end = regex_.find(":]", at_);
        if (end == std::string::npos) refuse("a bracket that does not end");
        out_ += regex_.substr(at_, end + 2 - at_);
        at_ = end + 2;
        return;
      }
      if (c == ']') in_class_ = false;
    } else if (c == '[') {
      in_class_ = true;
      out_ += c;
      if (++at_ < regex_.size() && regex_[at_] == '^') out_ += regex_[at_++];
      if (at_ < regex_.size() && regex_[at_] == ']') refuse("an empty class");
      return;
    } else if (c == '(' && regex_.substr(at_, 2) == "(?") {
      return group();
    } else if (c == '(' && regex_.substr(at_, 2) == "(*") {
      refuse("a verb");
    }
    out_ += c;
    ++at_;
  }

  /// (?: (?= (?! (?> (?<= (?<! (?i: (?i) and (?-i: mean the same in both.
  void group() {
    const std::string rest = regex_.substr(at_ + 2, 4);
    for (const char* same : {":", "=", "!", ">", "<=", "<!", "i:", "i)", "-i:", "-i)"}) {
      if (!rest.starts_with(same)) continue;
      out_ += "(?" + std::string(same);
      at_ += 2 + std::string_view(same).size();
      return;
    }
    refuse("this kind of group");
  }

  void escape() {
    if (at_ + 1 == regex_.size()) refuse("a backslash at the end");
    const char c = regex_[at_ + 1];
    // PCRE2's \s has U+180E, and its \w no marks.
    const char* replacement = nullptr;
    switch (c) {
      case 's':
        replacement = "\\p{White_Space}";
        break;
      case 'S':
        replacement = "\\P{White_Space}";
        break;
      case 'd':
        return add_class(false, property("Nd"));
      case 'D':
        return add_class(true, property("Nd"));
      case 'w':
        return add_class(false, property("L") + property("M") + property("N") + "\\p{Pc}");
      case 'W':
        return add_class(true, property("L") + property("M") + property("N") + "\\p{Pc}");
      default:
        break;
    }
    if (replacement) {
      out_ += replacement;
      at_ += 2;
    } else if (c == 'p' || c == 'P') {
      const size_t end = regex_.find('}', at_);
      if (at_ + 2 >= regex_.size() || regex_[at_ + 2] != '{' || end == std::string::npos)
        refuse("a property without braces");
      const std::string name = regex_.substr(at_ + 3, end - at_ - 3);
      const bool known = property(name).find("\\x") != std::string::npos;
      if (known) {
        at_ = end - 1;
        add_class(c == 'P', property(name));
      } else {
        out_ += regex_.substr(at_, end + 1 - at_);
      }
      at_ = end + 1;
    } else if (c == 'x') {
      const size_t first = at_ + 2;
      size_t end = first;
      if (end < regex_.size() && regex_[end] == '{') {
        end = regex_.find('}', end);
        if (end == std::string::npos) refuse("a brace that does not end");
        ++end;
      } else {
        while (end < regex_.size() && end < first + 2 &&
               std::isxdigit(static_cast<unsigned char>(regex_[end])))
          ++end;
        if (end != first + 2) refuse("\\x without two digits");
        if (regex_[first] >= '8') refuse("a byte above 7F");  // a byte there, a character here
      }
      out_ += regex_.substr(at_, end - at_);
      at_ = end;
    } else if (c == 'r' || c == 'n' || c == 't' || c == 'f' || c == 'v' ||
               (static_cast<unsigned char>(c) < 0x80 && !std::isalnum(static_cast<unsigned char>(c)))) {
      out_ += c == 'v' ? std::string("\\x0b") : regex_.substr(at_, 2);
      at_ += 2;
    } else {
      refuse("this escape");
    }
  }

  /// A property and what belongs to it since PCRE2's tables, for a class in brackets.
  static std::string property(const std::string& name) {
    std::string text = "\\p{" + name + "}";
    for (const auto& [known, characters] : kLaterCharacters)
      if (known == name) text += characters;
    return text;
  }

  /// Writes a class for an escape of two characters.
  void add_class(bool negated, const std::string& members) {
    if (in_class_ && negated) refuse("a negated class within a class");
    out_ += in_class_ ? members : fmt::format("[{}{}]", negated ? "^" : "", members);
    at_ += 2;
  }

  [[noreturn]] void refuse(const std::string& what) const {
    fail(ExitCode::data, "{}: the regular expression {} has, at character {}, {}, which is not supported",
         where_, printable(regex_), at_ + 1, what);
  }

  const std::string &regex_, &where_;
  std::string out_;
  size_t at_ = 0;
  bool in_class_ = false;
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
  // ^ and $ mean lines, as in Ruby; there is no difference in the patterns of published tokenizers.
  code_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                              PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error,
                              &offset, nullptr);
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
