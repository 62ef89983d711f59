#include "config/scalars.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "config/fields.h"
#include "config/yaml.h"

namespace sluice {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// 010, 0x10, 1_000, 1:30: YAML 1.1 and 1.2 read these as different values.
std::string surprise(std::string_view text) {
  std::string_view t = text;
  if (!t.empty() && (t[0] == '-' || t[0] == '+')) t.remove_prefix(1);
  if (t.size() > 1 && t[0] == '0' && is_digit(t[1])) {
    const size_t first = std::min(t.find_first_not_of('0'), t.size() - 1);
    return fmt::format("has a leading zero (octal in YAML 1.1): write {}", t.substr(first));
  }
  if (t.size() > 1 && t[0] == '0' && (t[1] == 'x' || t[1] == 'o' || t[1] == 'b'))
    return fmt::format("must be a decimal number, got {}", yaml::printable(text));
  if (!t.empty() && is_digit(t[0]) && t.find('_') != std::string_view::npos)
    return fmt::format("must be written without underscores, got {}", yaml::printable(text));
  return "";
}

/// digits * 10^exponent; digits may be negative.
struct Decimal {
  __int128 digits = 0;
  int exponent = 0;
};

bool parse_decimal(std::string_view& text, Decimal& out, bool& overflow) {
  size_t i = 0;
  const bool negative = !text.empty() && text[0] == '-';
  if (!text.empty() && (text[0] == '-' || text[0] == '+')) ++i;
  bool any = false, point = false;
  for (; i < text.size() && (is_digit(text[i]) || (text[i] == '.' && !point)); ++i) {
    if (text[i] == '.') {
      point = true;
      continue;
    }
    any = true;
    if (out.digits > (static_cast<__int128>(1) << 100)) {
      overflow = true;
    } else {
      out.digits = out.digits * 10 + (text[i] - '0');
    }
    out.exponent -= point;
  }
  if (!any) return false;
  if (negative) out.digits = -out.digits;
  if (i < text.size() && (text[i] == 'e' || text[i] == 'E')) {
    size_t j = i + 1;
    const bool minus = j < text.size() && text[j] == '-';
    if (j < text.size() && (text[j] == '-' || text[j] == '+')) ++j;
    if (j == text.size() || !is_digit(text[j])) return false;
    int exponent = 0;
    for (; j < text.size() && is_digit(text[j]); ++j)
      exponent = std::min(exponent * 10 + (text[j] - '0'), 100000);
    out.exponent += minus ? -exponent : exponent;
    i = j;
  }
  text.remove_prefix(i);
  return true;
}

std::string parse_whole(std::string_view text, __int128 low, __int128 high, __int128& value) {
  if (std::string reason = surprise(text); !reason.empty()) return reason;
  const std::string wrong = fmt::format("must be an integer, got {}", yaml::printable(text));
  std::string_view rest = text;
  Decimal d;
  bool overflow = false;
  if (!parse_decimal(rest, d, overflow)) return wrong;
  int64_t factor = 1;
  if (rest == "k")
    d.exponent += 3;
  else if (rest == "M")
    d.exponent += 6;
  else if (rest == "B")
    d.exponent += 9;
  else if (rest == "T")
    d.exponent += 12;
  else if (rest == "Ki")
    factor = int64_t{1} << 10;
  else if (rest == "Mi")
    factor = int64_t{1} << 20;
  else if (!rest.empty())
    return wrong + " (suffixes: k M B T, Ki Mi)";
  d.digits *= factor;
  for (; d.exponent < 0 && d.digits != 0; ++d.exponent) {
    if (d.digits % 10 != 0) return wrong;
    d.digits /= 10;
  }
  for (; d.exponent > 0 && d.digits != 0 && !overflow; --d.exponent) {
    d.digits *= 10;
    overflow = d.digits > high * 10 || d.digits < -high * 10;
  }
  if (overflow || d.digits > high) return fmt::format("is too large: {}", yaml::printable(text));
  if (d.digits < low)
    return low == 0 ? fmt::format("must not be negative, got {}", yaml::printable(text))
                    : fmt::format("is too small: {}", yaml::printable(text));
  value = d.digits;
  return "";
}

}  // namespace

std::string parse_integer(std::string_view text, int64_t& value) {
  __int128 wide = 0;
  std::string reason =
      parse_whole(text, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(), wide);
  if (reason.empty()) value = static_cast<int64_t>(wide);
  return reason;
}

std::string parse_integer(std::string_view text, uint64_t& value) {
  __int128 wide = 0;
  std::string reason = parse_whole(text, 0, std::numeric_limits<uint64_t>::max(), wide);
  if (reason.empty()) value = static_cast<uint64_t>(wide);
  return reason;
}

std::string parse_number(std::string_view text, double& value) {
  if (std::string reason = surprise(text); !reason.empty()) return reason;
  std::string_view rest = text;
  Decimal ignored;
  bool ignored_overflow = false;
  // The syntax is checked here because from_chars also accepts inf and nan; the value comes from from_chars,
  // which
  // rounds correctly.
  if (!parse_decimal(rest, ignored, ignored_overflow) || !rest.empty())
    return fmt::format("must be a number, got {}", yaml::printable(text));
  const char* begin = text.data() + (text[0] == '+');
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value))
    return fmt::format("is out of range: {}", yaml::printable(text));
  return "";
}

std::string parse_boolean(std::string_view text, bool& value) {
  value = text == "true";
  if (value || text == "false") return "";
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; });
  for (const char* yes : {"true", "yes", "on", "y", "1"})
    if (lower == yes) return fmt::format("must be true or false, got {}; write true", yaml::printable(text));
  for (const char* no : {"false", "no", "off", "n", "0"})
    if (lower == no) return fmt::format("must be true or false, got {}; write false", yaml::printable(text));
  return fmt::format("must be true or false, got {}", yaml::printable(text));
}

std::string scalar_text(bool value) { return value ? "true" : "false"; }
std::string scalar_text(int64_t value) { return fmt::format("{}", value); }
std::string scalar_text(uint64_t value) { return fmt::format("{}", value); }

std::string scalar_text(double value) {
  std::string text = fmt::format("{}", value);
  // 1e-06 becomes 1e-6, and 1e+20 becomes 1e20.
  const size_t e = text.find('e');
  if (e == std::string::npos) return text;
  std::string exponent = text.substr(e + 1);
  const bool minus = exponent[0] == '-';
  exponent.erase(0, exponent[0] == '-' || exponent[0] == '+');
  exponent.erase(0, std::min(exponent.find_first_not_of('0'), exponent.size() - 1));
  return text.substr(0, e) + (minus ? "e-" : "e") + exponent;
}

std::string scalar_text(const std::string& value) {
  const auto plain = [](char c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '/' ||
           c == '.';
  };
  const bool inner = std::all_of(value.begin(), value.end(),
                                 [&](char c) { return plain(c) || c == '-' || c == '*' || c == '+'; });
  std::string lower = value;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; });
  if (!value.empty() && inner && plain(value[0]) && lower != "null") return value;
  std::string quoted = "\"";
  for (const char c : value) {
    if (c == '"' || c == '\\') quoted += '\\';
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      quoted += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

}  // namespace sluice
