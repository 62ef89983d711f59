// Regular expressions against what Oniguruma matches (scripts/check_tokenizers --goldens).
#include "data/pattern.h"

#include <nlohmann/json.hpp>

#include "core/io.h"
#include "data/temporary.h"
#include "data/unicode_form.h"

using namespace sluice;
using namespace sluice::test;
using nlohmann::json;

namespace {

/// Matches that are not empty.
std::vector<std::string> matches(const std::string& regex, const std::string& text) {
  const Pattern pattern(regex, "here");
  Pattern::Memory memory;
  std::vector<std::string> found;
  size_t begin = 0, end = 0;
  for (size_t from = 0; from <= text.size() && pattern.find(text, from, memory, begin, end);) {
    if (end > begin) found.push_back(text.substr(begin, end - begin));
    from = std::max(end, begin + (end == begin ? 1 : 0));
    while (from < text.size() && (static_cast<unsigned char>(text[from]) & 0xc0) == 0x80) ++from;
  }
  return found;
}

json golden() {
  return json::parse(io::read_file(SLUICE_SOURCE_DIR "/tests/golden/tokenizers/patterns.json"));
}

}  // namespace

TEST_CASE("classes of characters are those of Hugging Face's tokenizers", "[pattern]") {
  std::string all;
  for (char32_t c = 0; c < 0x110000; ++c)
    if (c < 0xd800 || c >= 0xe000) append_utf8(all, c);
  int compared = 0;
  const json classes = golden()["classes"];
  for (const auto& [regex, expected] : classes.items()) {
    INFO(regex);
    int64_t count = 0, sum = 0;
    bool single = true;
    for (const std::string& match : matches(regex, all)) {
      size_t at = 0;
      ++count;
      sum += next_character(match, at);
      single = single && at == match.size();
    }
    CHECK(single);
    CHECK(count == expected[0]);
    CHECK(sum == expected[1]);
    ++compared;
  }
  CHECK(compared == 76);
}

TEST_CASE("quantifiers, options and places match what Oniguruma matches", "[pattern]") {
  const json cases = golden()["cases"];
  CHECK(cases.size() == 33);
  for (const json& c : cases) {
    INFO(c[0] << " in " << c[1].dump(-1, ' ', true));
    CHECK(json(matches(c[0], c[1])) == c[2]);
  }
}

TEST_CASE("what PCRE2 would read in another way is refused with its place", "[pattern]") {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"a[[:alpha:]]", "at character 3, the name of a class"},
      {"[a[b]]", "at character 3, a class within a class"},
      {"[a&&b]", "at character 3, an intersection"},
      {"a+\\p{Mn}", "at character 3, the property Mn"},
      {"\\p{Cn}", "the property Cn"},
      {"\\p{Script=Han}", "the property Script=Han"},
      {"\\p{Word}", "the property Word"},
      {"[\\W]", "a negated class within a class"},
      {"[\\P{L}]", "a negated class within a class"},
      {"(?i:[\\p{Lu}])", "at character 6, a class of characters in brackets, where case is ignored"},
      {"(?i:[\xc3\xa4])", "at character 6, a character that is not ASCII"},
      {"(?i)\\x{df}", "at character 5, a character that is not ASCII"},
      {"(?i:ss)", "at character 6, letters of a ligature"},
      {"(?i)F(?:I)", "at character 9, letters of a ligature"},
      {"a**", "at character 3, a quantifier of a quantifier"},
      {"a+{2}", "at character 3, a quantifier of a quantifier"},
      {"a|*", "at character 3, a quantifier of nothing"},
      {"a)", "at character 2, a parenthesis that closes nothing"},
      {"(?m:a)", "this kind of group"},
      {"(*UCP)a", "a verb"},
      {"[a", "a class that does not end"},
      {"a\\", "a backslash at the end"},
  };
  for (const auto& [regex, message] : cases) {
    INFO(regex);
    expect_error(ExitCode::data, {"here", message, "not supported"}, [&] { Pattern(regex, "here"); });
  }
  // Outside a group that ignores case its rules do not hold.
  CHECK(matches("(?i:s)ss|\xc3\xa4", "Sss \xc3\xa4").size() == 2);
}
