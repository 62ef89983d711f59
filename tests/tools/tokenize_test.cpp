// sluice tokenize on typical files.
#include <cstdlib>
#include <filesystem>

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

TEST_CASE("no input and no tokenizer is overwritten, even on request", "[tokenize]") {
  TemporaryFolder folder;
  const std::string text = "{\"text\": \"the only copy\"}\n";
  write_bytes(folder / "web.json", text);
  write_bytes(folder / "web.bin", text);
  write_bytes(folder / "other.json", "{\"model\": {}}");
  write_bytes(folder / "a.txt", "some text");
  std::filesystem::create_hard_link(folder / "web.json", folder / "link.json");
  const std::string tokenizer = io::read_file(SLUICE_SOURCE_DIR "/tests/golden/tokenizers/gpt2.json");
  write_bytes(folder / "own.json", tokenizer);
  const auto refused = [&](int code, const std::string& part, const std::vector<std::string>& arguments) {
    const Outcome outcome = tokenize(folder, arguments);
    INFO(outcome.err);
    CHECK(outcome.code == code);
    CHECK_THAT(outcome.err, Catch::Contains(part) && !Catch::Contains("the token files"));
    CHECK(io::read_file(folder / "web.json") == text);
    CHECK(io::read_file(folder / "link.json") == text);
    CHECK(io::read_file(folder / "web.bin") == text);
    CHECK(io::read_file(folder / "own.json") == tokenizer);
    CHECK(io::read_file(folder / "other.json") == "{\"model\": {}}");
    for (const char* name : {"web.idx", "link.bin", "own.bin", "other.bin", "new.bin"})
      CHECK_FALSE(io::exists(folder / name));
  };
  const std::string web = folder / "web";
  for (const bool force : {false, true}) {
    const auto with = [&](std::vector<std::string> arguments) {
      if (force) arguments.push_back("--force");
      return arguments;
    };
    refused(64, "web.json: is read as an input and would be overwritten; choose another prefix, such as ",
            with({folder / "web.json", "-o", web}));
    refused(64, "web.bin: is read as an input", with({folder / "web.bin", "-o", web}));
    refused(64, "link.json: is read as an input", with({folder / "web.json", "-o", folder / "link"}));
    refused(64, "web.json: is read as an input",
            with({folder / "web.json", "-o", folder / "new", "--validation-prefix", web, "--validation-every",
                  "2"}));
    refused(64, "own.json: is read as an input",
            with({folder / "a.txt", "-o", folder / "own", "--tokenizer", folder / "own.json"}));
    refused(73, "other.json: exists and does not describe token files, so it is not replaced",
            with({folder / "a.txt", "-o", folder / "other"}));
    refused(64,
            "x.bin: the files' names are PREFIX.bin, PREFIX.idx and PREFIX.json; give the prefix " +
                (folder / "x"),
            with({folder / "a.txt", "-o", folder / "x.bin"}));
    // Where the file is written before it gets its name.
    write_bytes(folder / "new.bin.tmp", text);
    refused(64, "new.bin.tmp: is read as an input",
            with({folder / "new.bin.tmp", "-o", folder / "new", "--format", "jsonl"}));
    CHECK(io::read_file(folder / "new.bin.tmp") == text);
  }
  const std::string standard_input =
      fmt::format("'{}' tokenize - -o {} --force < {} 2> {}", std::getenv("SLUICE_BINARY"), web,
                  folder / "web.json", folder / "err.txt");
  CHECK(std::system(standard_input.c_str()) != 0);
  CHECK_THAT(io::read_file(folder / "err.txt"), Catch::Contains("web.json: is read as standard input"));
  CHECK(io::read_file(folder / "web.json") == text);
  for (const char* output : {"a.txt", "link.json"}) {
    const std::string before = io::read_file(folder / output);
    const Outcome outcome = Program(folder.path, {"tokenizer", "train", folder / "a.txt", folder / "web.json",
                                                  "-o", folder / output, "--vocab-size", "257", "--force"})
                                .wait();
    CHECK(outcome.code == 64);
    CHECK_THAT(outcome.err, Catch::Contains(output + std::string(": is read as an input")));
    CHECK(io::read_file(folder / output) == before);
  }
}

TEST_CASE("the command that a text is answered with keeps the text", "[tokenize]") {
  TemporaryFolder folder;
  write_bytes(folder / "corp.json", "{\"text\": \"the only copy\"}\n");
  write_bytes(folder / "book.txt", "text");
  write_bytes(folder / "book.json", "{\"model\": \"a tokenizer\"}");
  for (const char* path : {"corp", "corp.json"})
    expect_error(ExitCode::no_input,
                 {"sluice tokenize " + (folder / "corp.json") + " -o " + (folder / "corp.tokens") + "\n"},
                 [&] { TokenFile(folder / path); });
  expect_error(ExitCode::no_input, {"-o " + (folder / "book.tokens") + "\n"},
               [&] { TokenFile(folder / "book.txt"); });
  const Outcome outcome = tokenize(folder, {folder / "corp.json", "-o", folder / "corp.tokens"});
  INFO(outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK(text_of(folder / "corp.tokens") == "the only copy|");
  // What is left of token files that were removed is no text.
  io::remove_file(folder / "corp.tokens.bin");
  io::remove_file(folder / "corp.tokens.idx");
  CHECK_NOTHROW(refuse_text(folder / "corp.tokens"));
  CHECK_THROWS_WITH(TokenFile(folder / "corp.tokens"), !Catch::Contains("is text"));
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
  write_bytes(
      folder / "twice.jsonl",
      "{\"text\": \"a \\\"text\\\"\", \"meta\": {\"text\": \"text\"}}\n{\"text\": \"a\", \"text\": \"b\"}\n");
  refused(65, "twice.jsonl:2: has the key \"text\" twice", {folder / "twice.jsonl"});
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
  write_gzip(folder / "d.txt", "ab\n");
  write_bytes(folder / "d.txt.gz", io::read_file(folder / "d.txt.gz") + "more text\n");
  refused(65, "d.txt.gz: byte 2", {folder / "d.txt.gz"});
  for (const char* name : {"a.jsonl.xz", "a.txt"}) {
    write_bytes(folder / name, std::string("\xfd\x37zXZ\0\0\4 and more", 17));
    refused(65, fmt::format("{}: is compressed by xz, which is not supported; use xz -dc", folder / name),
            {folder / name});
  }
  write_bytes(folder / "a.parquet", "PAR1\x15\x04 and more");
  refused(65, "a.parquet: is a file of Parquet and no text", {folder / "a.parquet"});
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
