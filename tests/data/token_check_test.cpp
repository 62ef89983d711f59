#include "data/token_check.h"

#include <filesystem>

#include "temporary.h"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr int64_t kVocab = 257;

struct Data {
  TemporaryFolder folder;
  Config config;
  std::unique_ptr<Tokenizer> tokenizer = make_tokenizer({});

  Data() {
    config.model.vocab_size = kVocab;
    config.data.seq_len = 4;
  }
  /// Two documents, and their PREFIX.json.
  void write(const std::string& name, const std::vector<int32_t>& first = {1, 2, 3, 4, 5, 6}) const {
    write_tokens(folder / name, {first, {7, 256}}, 40000);
    write_token_file_info(folder / name, info(first));
  }
  TokenFileInfo info(const std::vector<int32_t>& first = {1, 2, 3, 4, 5, 6}) const {
    return {"byte:257", 257, 256, 2, static_cast<int64_t>(first.size()) + 2, 7, 256, "byte"};
  }
  Blend open(const std::string& pattern) const {
    return Blend({{"text", folder / pattern, 1}}, config.data.seq_len, config.model.vocab_size, false, 1);
  }
  void check(const std::string& pattern) const { check_tokens(open(pattern), *tokenizer, config); }
};

}  // namespace

TEST_CASE("what PREFIX.json says of its tokenizer is escaped in the message", "[token_check]") {
  Data data;
  data.write("a");
  TokenFileInfo other = data.info();
  other.tokenizer = "\x1b[31mred";
  other.tokenizer_name = "\x1b]0;title";
  write_token_file_info(data.folder / "a", other);
  expect_error(ExitCode::data, {"\\x1b[31mred", "\\x1b]0;title"}, [&] { data.check("a"); });
}

TEST_CASE("token files of another tokenizer are refused with the names of both", "[token_check]") {
  const Data d;
  d.write("a-0"), d.write("a-1");
  CHECK_NOTHROW(d.check("a-*.bin"));
  TokenFileInfo info = d.info();
  info.tokenizer = "xxh3:1234", info.vocab_size = 512, info.tokenizer_name = "sentencepiece english.model";
  write_token_file_info(d.folder / "a-1", info);
  CHECK_NOTHROW(d.check("a-0"));
  expect_error(ExitCode::data,
               {"data source text", d.folder / "a-1.bin",
                "sentencepiece english.model, vocabulary of 512, fingerprint xxh3:1234",
                "byte, vocabulary of 257, fingerprint byte:257", "sluice tokenize"},
               [&] { d.check("a-*.bin"); });
  // As older versions wrote it, without a name.
  write_bytes(
      d.folder / "a-1.json",
      R"({"schema":1,"tokenizer":"xxh3:1234","vocab_size":512,"end_of_document":2,"documents":2,"tokens":8,"text_bytes":7,"largest_token":256})");
  expect_error(ExitCode::data, {"unnamed, vocabulary of 512", "byte, vocabulary of 257"},
               [&] { d.check("a-1"); });
}

TEST_CASE("the largest token is known before the first step, with PREFIX.json and without", "[token_check]") {
  const Data d;
  d.write("good");
  d.write("bad", {1, 2, 3, 4, 5, 300});
  for (const bool note : {true, false}) {
    if (!note) std::filesystem::remove(d.folder / "bad.json");
    expect_error(ExitCode::data, {d.folder / "bad.bin", "token 5 is 300", "vocabulary of 257"},
                 [&] { d.check("bad"); });
    CHECK(tokenizer_known(d.open("bad"), 0) == note);
  }
  CHECK(tokenizer_known(d.open("good"), 0));
  CHECK_FALSE(tokenizer_known(d.open("*.bin"), 0));
}

TEST_CASE("a PREFIX.json that belongs to other files is refused", "[token_check]") {
  const Data d;
  d.write("a");
  const auto refused = [&](const TokenFileInfo& info, std::vector<std::string> parts) {
    write_token_file_info(d.folder / "a", info);
    parts.push_back(d.folder / "a.json does not belong to");
    expect_error(ExitCode::data, parts, [&] { d.check("a"); });
  };
  TokenFileInfo info = d.info();
  info.tokens = 9;
  refused(info, {"it says 9 tokens in 2 documents, the files hold 8 in 2"});
  info = d.info();
  info.documents = 3;
  refused(info, {"in 3 documents"});
  info = d.info();
  info.largest_token = 255;
  refused(info, {"it says the largest token is 255, the files hold 256"});
  // New tokens under an old name replace PREFIX.json, too.
  d.write("b");
  write_tokens(d.folder / "b", {{1, 2, 3, 4, 5}}, 257);
  CHECK_FALSE(io::exists(d.folder / "b.json"));
}

TEST_CASE("validation data that is also training data is refused, by file and by contents", "[token_check]") {
  Data d;
  d.write("train-0", {1, 2, 3, 4, 5, 9}), d.write("train-1"), d.write("held", {9, 8, 7, 6, 5, 4});
  d.write("copy");
  std::filesystem::create_symlink(d.folder / "train-1.bin", d.folder / "link.bin");
  std::filesystem::create_symlink(d.folder / "train-1.idx", d.folder / "link.idx");
  const Blend training = d.open("train-*.bin");
  const auto check = [&](const std::string& held) {
    std::vector<std::unique_ptr<Blend>> sets;
    sets.push_back(
        std::make_unique<Blend>(std::vector<DataSource>{{"v", d.folder / held, 1}}, 4, kVocab, false, 1));
    check_data(training, sets, *d.tokenizer, d.config);
  };
  CHECK_NOTHROW(check("held"));
  for (const std::string same : {"train-1", "link"})
    expect_error(ExitCode::data,
                 {"validation set v", d.folder / same + ".bin is the same file as", "train-1.bin",
                  "source text", "data.allow_overlap=true"},
                 [&] { check(same); });
  expect_error(ExitCode::data, {"copy.bin holds the same tokens as", "train-1.bin"}, [&] { check("copy"); });
  d.config.data.allow_overlap = true;
  CHECK_NOTHROW(check("train-1"));
  CHECK_NOTHROW(check("copy"));
}
