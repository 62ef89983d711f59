#include "data/token_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <random>

#include "temporary.h"

using namespace sluice;
using namespace sluice::test;

namespace {

template <class T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

/// An index built by hand, independent of the writer under test.
std::string index_bytes(int code, int item_size, const std::vector<int32_t>& lengths,
                        const std::vector<int64_t>& bounds) {
  std::string out("MMIDIDX\0\0", 9);
  put<uint64_t>(out, 1);
  put<uint8_t>(out, static_cast<uint8_t>(code));
  put<uint64_t>(out, lengths.size());
  put<uint64_t>(out, bounds.size());
  for (int32_t length : lengths) put(out, length);
  int64_t pointer = 0;
  for (int32_t length : lengths) {
    put(out, pointer);
    pointer += int64_t{length} * item_size;
  }
  for (int64_t bound : bounds) put(out, bound);
  return out;
}

std::string slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

template <class T>
std::string array_bytes(const std::vector<T>& values) {
  std::string out;
  for (T value : values) put(out, value);
  return out;
}

}  // namespace

TEST_CASE("a written token file has exactly the Megatron layout", "[token_file]") {
  TemporaryFolder folder;
  const std::string prefix = folder / "made/for/it/x";
  write_tokens(prefix, {{1, 2, 3}, {}, {65000}, {7, 8}}, 65499);
  CHECK(slurp(prefix + ".bin") == array_bytes<uint16_t>({1, 2, 3, 65000, 7, 8}));
  CHECK(slurp(prefix + ".idx") == index_bytes(8, 2, {3, 1, 2}, {0, 1, 2, 3}));
  write_tokens(prefix, {{1, 2, 3}, {65499}}, 65500);  // replaces the old one; from 65,500 on it is i32
  CHECK(slurp(prefix + ".bin") == array_bytes<int32_t>({1, 2, 3, 65499}));
  CHECK(slurp(prefix + ".idx") == index_bytes(4, 4, {3, 1}, {0, 1, 2}));
  CHECK(io::list_directory(folder / "made/for/it") == std::vector<std::string>{"x.bin", "x.idx"});
}

TEST_CASE("written tokens are read back, in every supported type", "[token_file]") {
  TemporaryFolder folder;
  const std::string prefix = folder / "x";
  const int code = GENERATE(1, 4, 8);
  std::vector<int32_t> tokens;
  for (int i = 0; i < 1000; ++i)
    tokens.push_back(code == 1 ? i * 7 % 256 : code == 4 ? i * 2000003 : i * 131 % 65536);
  std::string bytes;
  for (int32_t t : tokens) bytes.append(reinterpret_cast<const char*>(&t), code == 1 ? 1 : code == 4 ? 4 : 2);
  write_bytes(prefix + ".bin", bytes);
  // Documents of several sequences, one of them empty.
  write_bytes(prefix + ".idx", index_bytes(code,
                                           code == 1   ? 1
                                           : code == 4 ? 4
                                                       : 2,
                                           {100, 250, 1, 649}, {0, 2, 2, 3, 4}));

  for (const char* ending : {"", ".bin", ".idx"}) CHECK(TokenFile(prefix + ending).prefix() == prefix);
  const TokenFile file(prefix);
  CHECK(file.num_tokens() == 1000);
  CHECK(file.num_sequences() == 4);
  CHECK(file.num_documents() == 4);
  CHECK(file.sequence_begin(3) == 351);
  CHECK(file.sequence_begin(4) == 1000);
  const auto document = [&](int64_t i) { return std::pair(file.document_begin(i), file.document_end(i)); };
  CHECK(document(0) == std::pair<int64_t, int64_t>(0, 350));
  CHECK(document(349) == std::pair<int64_t, int64_t>(0, 350));
  CHECK(document(350) == std::pair<int64_t, int64_t>(350, 351));
  CHECK(document(351) == std::pair<int64_t, int64_t>(351, 1000));
  CHECK(document(999) == std::pair<int64_t, int64_t>(351, 1000));

  for (int64_t begin : {0, 1, 15, 17, 500}) {
    for (int64_t count : {0, 1, 15, 16, 17, 100, 500}) {
      std::vector<int32_t> out(static_cast<size_t>(count) + 1, -7);
      file.read(begin, count, out.data());
      CHECK(std::equal(out.begin(), out.end() - 1, tokens.begin() + begin));
      CHECK(out.back() == -7);  // and nothing beyond
    }
  }
  CHECK(file.token(999) == tokens[999]);
  CHECK(file.max_token() == *std::max_element(tokens.begin(), tokens.end()));
  expect_error(ExitCode::internal, {"tokens 999 + 2 of 1000"}, [&] {
    int32_t out[2];
    file.read(999, 2, out);
  });
}

TEST_CASE("token files beyond 2^32 tokens open quickly and are read at the right offsets", "[token_file]") {
  TemporaryFolder folder;
  const std::string prefix = folder / "big";
  const std::vector<int32_t> lengths = {2000000000, 1000000000, 1500000000, 500000000};
  constexpr int64_t kTokens = 5000000000;
  write_bytes(prefix + ".idx", index_bytes(8, 2, lengths, {0, 1, 2, 3, 4}));
  const int fd = ::open((prefix + ".bin").c_str(), O_CREAT | O_WRONLY, 0600);
  REQUIRE(fd >= 0);
  if (::ftruncate(fd, 2 * kTokens) != 0) {
    ::close(fd);
    WARN("skipped: no sparse file of 10 GB here");
    return;
  }
  const std::vector<int64_t> marks = {
      0, (int64_t{1} << 31) - 1, int64_t{1} << 31, (int64_t{1} << 32) - 1, int64_t{1} << 32, kTokens - 1};
  for (size_t i = 0; i < marks.size(); ++i) {
    const auto value = static_cast<uint16_t>(1000 + i);
    REQUIRE(::pwrite(fd, &value, 2, 2 * marks[i]) == 2);
  }
  ::close(fd);
  const TokenFile file(prefix);
  CHECK(file.num_tokens() == kTokens);
  for (size_t i = 0; i < marks.size(); ++i) CHECK(file.token(marks[i]) == 1000 + static_cast<int32_t>(i));
  CHECK(file.token((int64_t{1} << 32) + 1) == 0);
  CHECK(file.document_begin(int64_t{1} << 31) == 2000000000);
  CHECK(file.document_begin(int64_t{1} << 32) == 3000000000);
  CHECK(file.document_end(int64_t{1} << 32) == 4500000000);
  CHECK(!file.sampled_fingerprint().empty());  // the fast one, too
}

TEST_CASE("the fingerprint depends on the content, not on the name", "[token_file]") {
  TemporaryFolder folder;
  std::vector<int32_t> tokens(1000);
  for (int i = 0; i < 1000; ++i) tokens[static_cast<size_t>(i)] = i;
  write_tokens(folder / "a", {tokens}, 1000);
  write_tokens(folder / "b", {tokens}, 1000);
  const std::string first = TokenFile(folder / "a").fingerprint();
  CHECK(first == TokenFile(folder / "b").fingerprint());
  tokens[777] = 1;
  write_tokens(folder / "b", {tokens}, 1000);
  CHECK(first != TokenFile(folder / "b").fingerprint());
  tokens[777] = 777;
  write_tokens(folder / "b", {{tokens.begin(), tokens.begin() + 5}, {tokens.begin() + 5, tokens.end()}},
               1000);
  CHECK(first != TokenFile(folder / "b").fingerprint());
}

TEST_CASE(
    "every changed token changes the full fingerprint, and the sampled one is unchanged from older versions",
    "[token_file]") {
  TemporaryFolder folder;
  std::vector<int32_t> tokens(9'000'000);  // three parts of the hash
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 2654435761u >> 16 & 0x3fff);
  write_tokens(folder / "a", {tokens}, 20000);
  const std::string whole = TokenFile(folder / "a").fingerprint(),
                    sampled = TokenFile(folder / "a").sampled_fingerprint();
  CHECK(sampled == "xxh3:f980ac763288fcbc0b4548bc410ee9af");
  for (const size_t at : {size_t{5000}, size_t{4'500'000}, tokens.size() - 5000}) {
    std::vector<int32_t> changed = tokens;
    changed[at] ^= 1;
    write_tokens(folder / "b", {changed}, 20000);
    const TokenFile file(folder / "b");
    CHECK(file.fingerprint() != whole);
    CHECK(file.sampled_fingerprint() == sampled);  // between the sampled pages
  }
}

TEST_CASE("the largest token is found at any position, and a negative one counts as larger", "[token_file]") {
  TemporaryFolder folder;
  const int code = GENERATE(1, 4, 8);
  const size_t size = code == 1 ? 1 : code == 4 ? 4 : 2;
  const auto with = [&](int64_t count, int64_t at, int32_t value) {
    std::string bytes;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t token = i == at ? value : static_cast<int32_t>(i % 100);
      bytes.append(reinterpret_cast<const char*>(&token), size);
    }
    write_bytes(folder / "x.bin", bytes);
    write_bytes(folder / "x.idx",
                index_bytes(code, static_cast<int>(size), {static_cast<int32_t>(count)}, {0, 1}));
    return TokenFile(folder / "x");
  };
  for (const int64_t count : {1, 17, 1000, 5000})
    for (const int64_t at : {int64_t{0}, count / 2, count - 1}) {
      const TokenFile file = with(count, at, 201);
      CHECK(file.max_token() == 201);
      CHECK(file.find_outside(201) == at);
      CHECK(file.find_outside(202) == -1);
    }
  if (code != 4) return;
  const TokenFile negative = with(1000, 700, -3);
  CHECK(negative.max_token() == -3);
  CHECK(negative.find_outside(1 << 30) == 700);
  const TokenFile large = with(6'000'000, 5'999'999, 2'000'000'000);  // several parts
  CHECK(large.max_token() == 2'000'000'000);
}

TEST_CASE("damaged indexes are refused by file, field and offset", "[token_file]") {
  TemporaryFolder folder;
  const std::string prefix = folder / "x";
  write_bytes(prefix + ".bin", std::string(20, '\1'));
  const std::string good = index_bytes(8, 2, {3, 5, 2}, {0, 1, 2, 3});
  const auto refused = [&](const std::string& bytes, std::vector<std::string> parts) {
    write_bytes(prefix + ".idx", bytes);
    parts.push_back(prefix + ".idx");
    expect_error(ExitCode::data, parts, [&] { TokenFile file(prefix); });
  };
  const auto with = [&](size_t at, auto value) {
    std::string bytes = good;
    std::memcpy(bytes.data() + at, &value, sizeof(value));
    return bytes;
  };
  write_bytes(prefix + ".idx", good);
  REQUIRE(TokenFile(prefix).num_tokens() == 10);
  write_bytes(prefix + ".idx", good + "\1\1\1");  // modes of a multimodal file: ignored
  REQUIRE(TokenFile(prefix).num_tokens() == 10);

  for (size_t length = 0; length < good.size(); ++length) refused(good.substr(0, length), {});
  refused("", {"header", "has 0"});
  refused(with(0, 'X'), {"magic", "offset 0"});
  refused(with(9, uint64_t{2}), {"version", "offset 9", "is 2"});
  for (int code : {0, 2, 3, 5, 6, 7, 9, 255}) {
    refused(with(17, static_cast<uint8_t>(code)), {"dtype", "offset 17", fmt::format("code {} ", code)});
  }
  refused(with(18, uint64_t{0}), {"sequence count", "offset 18"});
  for (const uint64_t huge :
       {uint64_t{4}, uint64_t{1} << 62, ~uint64_t{0}, ~uint64_t{0} / 12 + 2, uint64_t{1} << 32}) {
    refused(with(18, huge), {});
    refused(with(26, huge - 1), {});
  }
  refused(with(18, ~uint64_t{0}), {"sequence count", "offset 18"});
  refused(with(26, ~uint64_t{0}), {"document index length", "offset 26"});
  refused(with(26, uint64_t{1}), {"document index length", "offset 26"});
  refused(with(38, int32_t{0}), {"length of sequence 1", "offset 38", "0 is not positive"});
  refused(with(38, int32_t{-5}), {"length of sequence 1", "offset 38"});
  refused(with(38, int32_t{4}), {"start of sequence 2", "offset 62"});
  refused(with(42, int32_t{0x7fffffff}), {"sequence 2", "offset 42", "truncated copy"});
  refused(with(42, int32_t{1}), {"sequences end at byte 18", "20 bytes", ".bin"});
  refused(with(54, int64_t{8}), {"start of sequence 1", "offset 54"});
  refused(with(70, int64_t{1}), {"document index entry 0", "offset 70"});
  refused(with(78, int64_t{3}), {"document index entry 2", "offset 86", "2 is not in 3..3"});
  refused(with(78, int64_t{-1}), {"document index entry 1", "offset 78"});
  refused(with(86, int64_t{4}), {"document index entry 2", "offset 86"});
  refused(with(94, int64_t{2}), {"document index entry 3", "offset 94", "ends at sequence 2 of 3"});
  refused(good + "\1", {"1 bytes at offset 102"});

  write_bytes(prefix + ".idx", good);
  write_bytes(prefix + ".bin", std::string(19, '\1'));
  expect_error(ExitCode::data, {".idx: sequence 2", "has 19 bytes"}, [&] { TokenFile file(prefix); });
  write_bytes(prefix + ".bin", "");
  expect_error(ExitCode::data, {"has 0 bytes"}, [&] { TokenFile file(prefix); });
  expect_error(ExitCode::no_input, {folder / "absent.bin"}, [&] { TokenFile file(folder / "absent"); });
  std::filesystem::remove(prefix + ".idx");
  expect_error(ExitCode::no_input, {prefix + ".idx"}, [&] { TokenFile file(prefix); });
}

TEST_CASE("mutated indexes are either refused or read within bounds", "[token_file]") {
  TemporaryFolder folder;
  const std::string prefix = folder / "x";
  constexpr int kBytes = 240;
  write_bytes(prefix + ".bin", std::string(kBytes, '\2'));
  const std::vector<std::string> seeds = {index_bytes(8, 2, {30, 50, 20, 20}, {0, 1, 2, 4}),
                                          index_bytes(4, 4, {60}, {0, 1}),
                                          index_bytes(1, 1, {120, 120}, {0, 0, 1, 2, 2})};
  std::mt19937_64 random(7);
  const std::vector<uint64_t> nasty = {0,
                                       1,
                                       2,
                                       3,
                                       0x7fffffff,
                                       0x80000000,
                                       0xffffffff,
                                       uint64_t{1} << 62,
                                       ~uint64_t{0},
                                       uint64_t{1} << 63,
                                       ~uint64_t{0} / 12,
                                       ~uint64_t{0} / 8};
  const int fd = ::open((prefix + ".idx").c_str(), O_CREAT | O_WRONLY, 0600);
  REQUIRE(fd >= 0);
  int accepted = 0, refused = 0;
  for (int round = 0; round < 6000; ++round) {
    std::string bytes = seeds[random() % seeds.size()];
    for (uint64_t changes = 1 + random() % 3; changes > 0; --changes) {
      const size_t at = random() % bytes.size();
      const uint64_t value = nasty[random() % nasty.size()];
      switch (random() % 4) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes[at] = static_cast<char>(bytes[at] + (random() % 2 ? 1 : -1));
          break;
        case 2:
          std::memcpy(bytes.data() + at, &value, std::min<size_t>(8, bytes.size() - at));
          break;
        case 3:
          bytes.resize(random() % 8 ? bytes.size() : at + 1);
          break;
      }
    }
    // Rewritten in place: a new file every time would wait for the disk.
    REQUIRE(::pwrite(fd, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
    REQUIRE(::ftruncate(fd, static_cast<off_t>(bytes.size())) == 0);
    try {
      const TokenFile file(prefix);
      ++accepted;
      const int64_t n = file.num_tokens();
      if (n <= 0 || n > kBytes) FAIL("round " << round << ": " << n << " tokens");
      std::vector<int32_t> out(static_cast<size_t>(n));
      file.read(0, n, out.data());
      for (int64_t i = 0; i < n; ++i) {
        if (file.document_begin(i) > i || file.document_end(i) <= i)
          FAIL("round " << round << ", token " << i);
      }
    } catch (const Error& error) {
      ++refused;
      if (error.code() != ExitCode::data) FAIL("round " << round << ": " << error.what());
    }
  }
  ::close(fd);
  CHECK(accepted > 50);
  CHECK(refused > 4000);
}

TEST_CASE("an unfinished writer leaves no files, and tokens outside the vocabulary are refused",
          "[token_file]") {
  TemporaryFolder folder;
  const std::vector<int32_t> good = {1, 2, 3}, high = {1, 100}, low = {-1};
  {
    TokenFileWriter writer(folder / "x", 100);
    writer.add_document(good.data(), 3);
    CHECK(writer.num_tokens() == 3);
    CHECK(writer.num_documents() == 1);
    expect_error(ExitCode::data, {"document 1, token 1: 100", "vocabulary of 100"},
                 [&] { writer.add_document(high.data(), 2); });
    expect_error(ExitCode::data, {"document 1, token 0: -1"}, [&] { writer.add_document(low.data(), 1); });
  }
  CHECK(io::list_directory(folder.path).empty());
  expect_error(ExitCode::data, {"no document"}, [&] { write_tokens(folder / "x", {}, 100); });
  CHECK(io::list_directory(folder.path).empty());
  write_bytes(folder / "x.bin.tmp", "litter");
  write_tokens(folder / "x", {good}, 100);
  CHECK(TokenFile(folder / "x").num_tokens() == 3);
  CHECK(io::list_directory(folder.path).size() == 2);
}

TEST_CASE("a long file written in pieces is complete", "[token_file]") {
  TemporaryFolder folder;
  std::vector<int32_t> tokens(3000000);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 2654435761u >> 16 & 0x7fff);
  TokenFileWriter writer(folder / "x", 40000);
  for (size_t i = 0; i < tokens.size(); i += 3) writer.add_document(tokens.data() + i, 3);
  writer.finish();
  const TokenFile file(folder / "x");
  REQUIRE(file.num_tokens() == 3000000);
  CHECK(file.num_documents() == 1000000);
  std::vector<int32_t> out(tokens.size());
  file.read(0, 3000000, out.data());
  CHECK(out == tokens);
  CHECK(file.document_begin(2999999) == 2999997);
}

TEST_CASE("PREFIX.json is read back, and may be absent", "[token_file]") {
  TemporaryFolder folder;
  CHECK(!read_token_file_info(folder / "x"));
  write_token_file_info(folder / "x", {"byte:257", 257, 256, 3, int64_t{1} << 40, 5000, 256, "byte"});
  const auto info = read_token_file_info(folder / "x");
  REQUIRE(info);
  CHECK(info->tokenizer == "byte:257");
  CHECK(info->vocab_size == 257);
  CHECK(info->tokens == int64_t{1} << 40);
  CHECK(info->largest_token == 256);
  CHECK(info->tokenizer_name == "byte");
  for (const auto& [bad, part] : {std::pair<std::string, std::string>{"", "not JSON: parse error at line 1"},
                                  {"[]", "is no object of JSON, so it does not describe token files"},
                                  {"{}", "has no schema, so it does not describe token files"},
                                  {"{\"schema\":2}", "only 1 is supported"},
                                  {"{\"schema\":1}", "has no tokenizer"},
                                  {"{\"schema\":1,\"tokenizer\":3}", "tokenizer must be text, got 3"}}) {
    write_bytes(folder / "x.json", bad);
    expect_error(ExitCode::data, {folder / "x.json: ", part}, [&] { read_token_file_info(folder / "x"); });
  }
  for (const char* number : {"-1", "1.5", "1e300", "18446744073709551615", "\"1\"", "null"}) {
    write_bytes(
        folder / "x.json",
        fmt::format(
            R"({{"schema":1,"tokenizer":"byte:257","vocab_size":{0},"end_of_document":256,"documents":1,"tokens":1,"text_bytes":1,"largest_token":1}})",
            number));
    expect_error(ExitCode::data, {"vocab_size must be a whole number of at least 0"},
                 [&] { read_token_file_info(folder / "x"); });
  }
  write_bytes(folder / "x.json", "\xff");
  expect_error(ExitCode::data, {"\\xff"}, [&] { read_token_file_info(folder / "x"); });
}
