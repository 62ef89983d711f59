// Models with which the library would read out of bounds.
#include "data/sentencepiece_check.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>

#include "data/small_model.h"
#include "data/tokenizer.h"

namespace sluice {

using namespace test;

namespace {

void append_utf8(std::string& text, uint32_t point) {
  const auto put = [&](uint32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (point < 0x80) return put(point);
  if (point < 0x800) {
    put(0xc0 | point >> 6);
  } else {
    put(0xe0 | point >> 12);
    put(0x80 | (point >> 6 & 0x3f));
  }
  put(0x80 | (point & 0x3f));
}

/// Code points of a plane that are characters, in steps, and invalid bytes.
std::string many_characters(uint32_t step) {
  std::string text;
  for (uint32_t point = 1; point < 0x10000; point += step)
    if (point < 0xd800 || point >= 0xe000) append_utf8(text, point);
  for (int byte = 0; byte < 256; ++byte) text.push_back(static_cast<char>(byte));
  return text;
}

/// A model that replaces full-width letters, line ends and ligatures.
std::string model_with_rules(const TemporaryFolder& folder) {
  std::string rules = "A\t20\nFB03\t66 66 69\n2026\t2E 2E 2E\n";
  for (int letter = 0x21; letter < 0x7f; ++letter)
    rules += fmt::format("{:X}\t{:X}\n", 0xfee0 + letter, letter);
  write_bytes(folder / "rules.tsv", rules);
  return io::read_file(train_model(folder, "rules", "--normalization_rule_tsv=" + (folder / "rules.tsv")));
}

std::string varint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  return out + static_cast<char>(value);
}

std::string field(int number, const std::string& bytes) {
  return varint(static_cast<uint64_t>(number) << 3 | 2) + varint(bytes.size()) + bytes;
}

/// The model with another normalisation map: the last of a repeated field is used.
std::string with_map(const std::string& model, const std::string& map) {
  return model + field(3, field(2, map));
}

std::string map_of(const std::vector<uint32_t>& units, const std::string& texts) {
  const auto bytes = static_cast<uint32_t>(4 * units.size());
  std::string map(4 + bytes, '\0');
  std::memcpy(map.data(), &bytes, 4);
  std::memcpy(map.data() + 4, units.data(), bytes);
  return map + texts;
}

/// Rules for "a", "aa", "aaa"...: one block of 256 units each, and the value of each at the base of the next.
std::vector<uint32_t> chain(uint32_t rules, uint32_t value = 0) {
  std::vector<uint32_t> units(256 * (rules + 2), 0x80000000u);  // a unit without label
  units[0] = 256 << 10;
  for (uint32_t i = 1; i <= rules; ++i) {
    const uint32_t unit = 256 * i + 'a', base = 256 * (i + 1);
    units[unit] = (unit ^ base) << 10 | 1u << 8 | 'a';
    units[base] = 0x80000000u | value;
  }
  return units;
}

/// Exit code of a child process that creates and uses the tokenizer: 0, 65 if it refuses the model, 128 +
/// signal if it dies.
int outcome_of(const TemporaryFolder& folder, const std::string& model, const std::string& text) {
  write_bytes(folder / "hostile.model", model);
  const pid_t child = fork();
  if (child == 0) {
    int code = 1;
    try {
      const auto tokenizer = make_tokenizer({TokenizerType::sentencepiece, folder / "hostile.model", ""});
      tokenizer->decode(tokenizer->encode(text));
      code = 0;
    } catch (const Error& error) {
      code = static_cast<int>(error.code());
    } catch (...) {
    }
    _exit(code);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/// Damages the map of a model `times` times; returns how many child processes refused it and how many used
/// it. None may die.
std::pair<int, int> damage_map(const TemporaryFolder& folder, const std::string& model, int times,
                               const std::string& text) {
  std::mt19937 random(11);
  // The map is the longest field by far; its bytes begin with the size of the trie.
  size_t begin = 0, size = 0;
  for (size_t at = 0; at + 8 < model.size(); ++at) {
    uint32_t trie = 0;
    std::memcpy(&trie, model.data() + at, 4);
    if (trie % 1024 == 0 && trie >= 1024 && trie < model.size() - at && trie > size) begin = at, size = trie;
  }
  REQUIRE(size > 0);
  int refused = 0, used = 0;
  for (int i = 0; i < times; ++i) {
    std::string damaged = model;
    const int bytes = 1 << random() % 8;
    for (int k = 0; k < bytes; ++k) {
      // Half of them in the first units, which every text reaches.
      const size_t range = random() % 2 == 0 ? std::min<size_t>(size, 4096) : size + 256;
      damaged[std::min(begin + random() % range, damaged.size() - 1)] = static_cast<char>(random());
    }
    const int code = outcome_of(folder, damaged, text);
    INFO("damage " << i);
    CHECK((code == 0 || code == 65));
    refused += code == 65;
    used += code == 0;
  }
  return {refused, used};
}

}  // namespace

TEST_CASE("what the library says of a model's bytes is escaped", "[tokenizer]") {
  TemporaryFolder folder;
  const std::string model = io::read_file(train_model(folder, "sound"));
  const std::string piece =
      field(1, "<0x2\xff>") + varint(3 << 3) + varint(6);  // that says that it is a byte
  write_bytes(folder / "bad.model", model + field(1, piece));
  expect_error(ExitCode::data, {"not a SentencePiece model", "<0x2\\xff>"}, [&] {
    make_tokenizer({TokenizerType::sentencepiece, folder / "bad.model", ""});
  });
}

TEST_CASE("valid models pass, and their normalisation is reported", "[tokenizer]") {
  TemporaryFolder folder;
  const auto check = [](const std::string& path) {
    return check_sentencepiece_model(io::read_file(path), path);
  };
  const SentencePieceSpec usual = check(train_model(folder, "usual"));
  CHECK(usual.normalizer == "nmt_nfkc");
  CHECK(usual.adds_space);
  CHECK(usual.removes_extra_whitespace);
  const SentencePieceSpec plain = check(train_model(
      folder, "plain",
      "--normalization_rule_name=identity --remove_extra_whitespaces=false --add_dummy_prefix=false"));
  CHECK(plain.normalizer == "identity");
  CHECK_FALSE(plain.adds_space);
  CHECK_FALSE(plain.removes_extra_whitespace);
  CHECK_NOTHROW(check(train_model(folder, "folded", "--normalization_rule_name=nmt_nfkc_cf")));
}

TEST_CASE("a normalisation map that points out of bounds is refused", "[tokenizer]") {
  TemporaryFolder folder;
  const std::string model = io::read_file(train_model(folder, "a", "--normalization_rule_name=identity"));
  const auto refused = [&](const std::string& map, const std::string& what) {
    expect_error(ExitCode::data, {"h.model", "normalisation map", what},
                 [&] { check_sentencepiece_model(with_map(model, map), "h.model"); });
  };
  const std::string texts("b\0", 2);
  CHECK_NOTHROW(check_sentencepiece_model(with_map(model, map_of(chain(32), texts)), "h.model"));
  CHECK(outcome_of(folder, with_map(model, map_of(chain(32), texts)), "aaaa") == 0);
  refused(map_of(chain(33), texts), "more than 32 rules");
  refused(map_of(chain(3, 2), texts), "puts in the text at 2, of 2 bytes");
  refused(map_of(chain(3), "b"), "does not end its last text");
  refused(map_of(chain(3), std::string("\xff\0", 2)), "not UTF-8");
  std::vector<uint32_t> units = chain(3);
  units[0] = 5 * 256 << 10;
  refused(map_of(units, texts), "leads from unit 0");
  units = chain(3);
  units[3 * 256 + 'a'] = ((3 * 256 + 'a') ^ 256) << 10 | 1u << 8 | 'a';  // back to the first block
  refused(map_of(units, texts), "contains a cycle");
  refused("ab", "has no size");
  for (const uint32_t size : {0u, 6u, 0xffffffffu, 1022u}) {
    std::string map = map_of(chain(3), texts);
    std::memcpy(map.data(), &size, 4);
    refused(map.substr(0, 1024), "says that its trie");
  }
}

TEST_CASE("pieces that the library's tries cannot handle are refused", "[tokenizer]") {
  TemporaryFolder folder;
  const std::string model = io::read_file(train_model(folder, "a"));
  const auto piece = [](const std::string& text, int type) {
    return field(1, field(1, text) + varint(3 << 3) + varint(static_cast<uint64_t>(type)));
  };
  const auto refused = [&](const std::string& more, const std::string& what) {
    expect_error(ExitCode::data, {"h.model", what},
                 [&] { check_sentencepiece_model(model + more, "h.model"); });
    CHECK(outcome_of(folder, model + more, "some text") == 65);
  };
  refused(piece("", 1), "piece 400 is empty");
  refused(piece(std::string("a\0b", 3), 4), "zero byte");
  std::string nested, text;
  for (int i = 0; i < 65; ++i) nested += piece(text += 'q', 4);
  refused(nested, "more than 64 user-defined pieces have a common prefix");
  refused("\x0a\x7f", "too early");
  refused(std::string("\x0b"), "wire type 3");
}

TEST_CASE("damaged normalisation maps never crash", "[tokenizer]") {
  TemporaryFolder folder;
  const auto [refused, used] = damage_map(folder, model_with_rules(folder), 200, many_characters(97));
  CHECK(refused > 20);
  CHECK(used > 20);
}

// A long run: build/tests/test_data "[tokenizer-fuzz]" takes minutes.
TEST_CASE("2,000 mutations of the common normalisation map never crash", "[.][tokenizer-fuzz]") {
  TemporaryFolder folder;
  const auto [refused, used] =
      damage_map(folder, io::read_file(train_model(folder, "usual")), 2000, many_characters(3));
  std::printf("refused %d, used %d\n", refused, used);
}

}  // namespace sluice
