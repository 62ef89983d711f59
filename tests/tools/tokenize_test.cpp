// sluice tokenize on typical files.
#include <cstdlib>

#include "data/token_file.h"
#include "tools/program.h"

namespace sluice {
namespace {

using namespace test;

Outcome tokenize(const TemporaryFolder& folder, std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "tokenize");
  return Program(folder.path, arguments).wait();
}

/// The documents of a byte-tokenized file as text, each ended by '|' for the end-of-document token.
std::string text_of(const std::string& prefix) {
  const TokenFile file(prefix);
  std::string text;
  for (int64_t i = 0; i < file.num_tokens(); ++i) {
    text += file.token(i) == 256 ? '|' : static_cast<char>(file.token(i));
  }
  return text;
}

/// path.gz, by gzip itself.
void write_gzip(const std::string& path, const std::string& text) {
  write_bytes(path, text);
  REQUIRE(std::system(("gzip -f " + path).c_str()) == 0);
}

}  // namespace

TEST_CASE("text becomes documents, byte by byte", "[tokenize]") {
  TemporaryFolder folder;
  write_bytes(folder / "a.txt",
              "one\ntwo\n<|endoftext|>\nthree\r\n<|endoftext|>\r\n<|endoftext|>\nfour <|endoftext|>");
  write_bytes(folder / "b.txt", std::string("\0\xff\n", 3));
  const Outcome outcome = tokenize(folder, {folder / "a.txt", folder / "b.txt", "-o", folder / "new/x"});
  INFO(outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK_THAT(outcome.out, Catch::Contains("4 documents") && Catch::Contains("MB/s"));
  // A separator is a separate line; the empty document between two of them is skipped.
  CHECK(text_of(folder / "new/x") == std::string("one\ntwo\n|three\r\n|four <|endoftext|>|\0\xff\n|", 40));
  const auto info = read_token_file_info(folder / "new/x");
  REQUIRE(info);
  CHECK(info->tokenizer == "byte:257");
  CHECK(info->documents == 4);
  CHECK(info->text_bytes == 36);
  CHECK(info->tokens == 40);
  CHECK(info->largest_token == 256);
}

TEST_CASE("JSONL, gzip and held-out documents", "[tokenize]") {
  TemporaryFolder folder;
  std::string lines, every, held;
  for (int i = 0; i < 25; ++i) {
    lines += fmt::format("{{\"id\": {}, \"text\": \"line\\n\\u00e9 {}\"}}\n\n", i, i);
    (i % 10 == 9 ? held : every) += fmt::format("line\n\xc3\xa9 {}|", i);
  }
  write_gzip(folder / "a.jsonl", lines);
  const Outcome outcome = tokenize(folder, {folder / "a.jsonl.gz", "-o", folder / "x", "--validation-prefix",
                                            folder / "v", "--validation-every", "10"});
  INFO(outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK(text_of(folder / "x") == every);
  CHECK(text_of(folder / "v") == held);
}

TEST_CASE("token files are replaced only on request", "[tokenize]") {
  TemporaryFolder folder;
  write_bytes(folder / "a.txt", "one\n<|endoftext|>\ntwo\n");
  write_bytes(folder / "b.txt", "other");
  REQUIRE(tokenize(folder, {folder / "a.txt", "-o", folder / "x"}).code == 0);
  const auto refused = [&](int code, const std::string& part, const std::vector<std::string>& arguments) {
    const Outcome outcome = tokenize(folder, arguments);
    CHECK(outcome.code == code);
    CHECK_THAT(outcome.err, Catch::Contains(part));
    CHECK(text_of(folder / "x") == "one\n|two\n|");
    CHECK(read_token_file_info(folder / "x")->documents == 2);
  };
  refused(73, folder / "x.bin: exists; choose another prefix, or --force",
          {folder / "b.txt", "-o", folder / "x"});
  refused(73, folder / "x.bin: exists",
          {folder / "a.txt", "-o", folder / "new", "--validation-prefix", folder / "x", "--validation-every",
           "2"});
  refused(64, "-o and --validation-prefix are both",
          {folder / "a.txt", "-o", folder / "new", "--validation-prefix", folder / "./new",
           "--validation-every", "2", "--force"});
  CHECK_FALSE(io::exists(folder / "new.bin"));
  CHECK(tokenize(folder, {folder / "b.txt", "-o", folder / "x", "--force"}).code == 0);
  CHECK(text_of(folder / "x") == "other|");
  CHECK(read_token_file_info(folder / "x")->tokenizer_name == "byte");
}

TEST_CASE("input that cannot be tokenized is refused with its position, and no files are left",
          "[tokenize]") {
  TemporaryFolder folder;
  const auto refused = [&](int code, const std::string& part, std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"-o", folder / "x"});
    const Outcome outcome = tokenize(folder, arguments);
    CHECK(outcome.code == code);
    CHECK_THAT(outcome.err, Catch::Contains(part));
    for (const std::string& name : io::list_directory(folder.path)) CHECK(name.rfind("x.", 0) != 0);
  };
  write_bytes(folder / "a.jsonl", "{\"text\": \"good\"}\n{\"text\": 3}\n");
  refused(65, "a.jsonl:2: has no text under the key \"text\"", {folder / "a.jsonl"});
  refused(65, "a.jsonl:1: has no text under the key \"body\"", {folder / "a.jsonl", "--key", "body"});
  write_bytes(folder / "b.jsonl", "{\"text\": \"torn");
  refused(65, "b.jsonl:1: not a JSON object", {folder / "b.jsonl"});
  write_bytes(folder / "utf8.jsonl", "{\"text\": \"\xff\"}\n");
  refused(65, "utf8.jsonl:1: not a JSON object in UTF-8", {folder / "utf8.jsonl"});
  write_bytes(folder / "range.jsonl", "{\"n\": -2e+308, \"text\": \"ab\"}\n");
  refused(65, "range.jsonl:1: not JSON that can be held: number overflow", {folder / "range.jsonl"});
  // A lone surrogate: the line, the byte and the reason; it may be left out.
  write_bytes(folder / "lone.jsonl",
              "{\"text\": \"ab\"}\n{\"text\": \"\\ud800\"}\n[1]\n{\"n\": 1e999}\n{\"text\": \"cd\"}\n");
  refused(65, "lone.jsonl:2: not a JSON object in UTF-8: byte 17: invalid string: surrogate",
          {folder / "lone.jsonl"});
  const Outcome skipped =
      Program(folder.path, {"tokenize", folder / "lone.jsonl", "-o", folder / "lone", "--skip-bad-documents"})
          .wait();
  CHECK(skipped.code == 0);
  CHECK_THAT(skipped.err, Catch::Contains("3 bad documents left out; the first: ") &&
                              Catch::Contains("lone.jsonl:2: not a JSON object"));
  CHECK(io::read_file(folder / "lone.bin").size() == 12);  // 6 tokens of 2 bytes
  write_gzip(folder / "c.txt", std::string(10000, 'a') + "b");
  write_bytes(folder / "c.txt.gz", io::read_file(folder / "c.txt.gz").substr(0, 30));
  refused(65, "truncated copy", {folder / "c.txt.gz"});
  write_bytes(folder / "empty.txt", "");
  refused(65, "no document", {folder / "empty.txt"});
  write_bytes(folder / "z.zst", "x");
  refused(64, "zstd -dc", {folder / "z.zst"});
  refused(66, "none.txt", {folder / "none.txt"});
  refused(66, "is a folder", {folder.path});
  write_bytes(folder / "one.txt", "x");
  refused(65, "too few",
          {folder / "one.txt", "--validation-prefix", folder / "v", "--validation-every", "2"});
  refused(64, "go together", {folder / "one.txt", "--validation-every", "2"});
  refused(64, "--format", {folder / "one.txt", "--format", "xml"});
  refused(66, "none.model", {folder / "one.txt", "--tokenizer", folder / "none.model"});
}

}  // namespace sluice
