// Runs and checkpoints moved to another folder or machine, without their original files.
#include <filesystem>

#include "checkpoint/manifest.h"
#include "data/small_model.h"
#include "tools/tiny_run.h"

namespace sluice {

using Catch::Contains;
using test::Outcome;
using test::TinyRun;
namespace fs = std::filesystem;

namespace {

/// A tiny run with a SentencePiece tokenizer; everything except the run folder is in `home`, which a test
/// removes.
struct PieceRun : TinyRun {
  std::string home = folder / "home", model = home + "/words.model";

  explicit PieceRun(const std::string& more = "") {
    fs::create_directory(home);
    fs::rename(test::train_model(folder, "words"), model);
    std::string text;
    for (int i = 0; i < 300; ++i)
      text += fmt::format("In the beginning was word {}, gated by head {}.\n", i * 7 % 97, i % 12);
    test::write_bytes(home + "/text.txt", text);
    for (const char* name : {"train", "held_out"})
      REQUIRE(sluice({"tokenize", home + "/text.txt", "--tokenizer", model, "-o", home + "/" + name}).code ==
              0);
    write_config(more);
    std::string text_of_config = io::read_file(config);
    for (const char* name : {"path: train", "path: held_out"}) {
      const std::string with_home = std::string("path: ") + "home/" + (name + 6);
      text_of_config.replace(text_of_config.find(name), std::string(name).size(), with_home);
    }
    const std::string at = "data:\n";
    text_of_config.replace(
        text_of_config.find(at), at.size(),
        at + "  allow_overlap: true\n  tokenizer: {type: sentencepiece, path: home/words.model}\n");
    test::write_bytes(config, text_of_config);
  }
  std::string newest() const { return run + "/ckpt/step_00000008"; }
};

}  // namespace

TEST_CASE("a moved run works without its original files", "[moved]") {
  const PieceRun t;
  Outcome o = t.train({"train.max_steps=4"});
  INFO(o.out << o.err);
  REQUIRE(o.code == 0);
  const std::string loss = t.sluice({"eval", t.run}).out;
  const std::string model = io::read_file(t.model);
  CHECK(io::read_file(t.run + "/tokenizer.model") == model);
  CHECK(io::read_file(t.run + "/ckpt/step_00000004/tokenizer.model") == model);
  CHECK_THAT(io::read_file(t.run + "/ckpt/step_00000004/MANIFEST.json"), Contains("tokenizer.model"));

  const std::string moved = t.folder / "elsewhere", data = t.folder / "data";
  fs::rename(t.run, moved);
  fs::create_directory(data);
  for (const char* name : {"train", "held_out"})
    for (const char* extension : {".bin", ".idx", ".json"})
      fs::rename(t.home + "/" + name + extension, data + "/" + name + extension);
  fs::remove_all(t.home);
  const std::string held_out = "held_out=" + data + "/held_out";

  o = t.sluice({"eval", moved});
  CHECK(o.code == 66);
  CHECK_THAT(o.err, Contains("home/held_out") && Contains("--data held_out=PREFIX"));
  o = t.sluice({"eval", moved, "--data", held_out});
  INFO(o.err);
  CHECK(o.code == 0);
  CHECK(o.out.substr(o.out.find('\n')) == loss.substr(loss.find('\n')));
  CHECK(t.sluice({"generate", moved, "-p", "the word", "-n", "4"}).code == 0);
  CHECK(t.sluice({"analyze", moved, "--data", held_out, "-o", t.folder / "analysis", "--quiet"}).code == 0);

  // Resuming: moved files are given by their keys, and the tokenizer is the copy in the run.
  const std::vector<std::string> to_moved = {"run_dir=" + moved, "train.max_steps=8", "--allow-change",
                                             "train.max_steps"};
  o = t.train(to_moved);
  CHECK(o.code == 66);
  CHECK_THAT(o.err, Contains("data.train[0].path (tiny)") && Contains("data.train[0].path=PREFIX"));
  std::vector<std::string> with_data = to_moved;
  with_data.insert(with_data.end(), {"data.train[0].path=" + data + "/train",
                                     "data.validation[0].path=" + data + "/held_out"});
  o = t.train(with_data);
  INFO(o.out << o.err);
  CHECK(o.code == 0);
  CHECK_THAT(o.out, Contains("resume   from"));
  CHECK(io::read_file(moved + "/ckpt/step_00000008/tokenizer.model") == model);

  // A new run has no copy, so the error names the key of its tokenizer.
  with_data[0] = "run_dir=" + (t.folder / "new");
  o = t.train(with_data);
  CHECK(o.code == 66);
  CHECK_THAT(o.err, Contains("data.tokenizer.path: ") && Contains("data.tokenizer.path=PATH"));
}

TEST_CASE("a checkpoint copied alone is complete", "[moved]") {
  const PieceRun t;
  Outcome o = t.train();
  INFO(o.out << o.err);
  REQUIRE(o.code == 0);
  const std::string alone = t.folder / "alone", exported = t.folder / "exported",
                    model = io::read_file(t.model);
  fs::copy(t.newest(), alone);
  fs::remove_all(t.run);
  fs::rename(t.model, t.folder / "kept.model");
  CHECK(t.sluice({"checkpoint", "verify", alone}).code == 0);
  CHECK(t.sluice({"eval", alone}).code == 0);
  CHECK(t.sluice({"generate", alone, "-n", "2"}).code == 0);
  o = t.sluice({"checkpoint", "export", alone, "-o", exported});
  CHECK(o.code == 0);
  CHECK(io::read_file(exported + "/tokenizer.model") == model);
  CHECK(t.train({"data.tokenizer.path=" + (t.folder / "kept.model"), "train.init_from=" + alone,
                 "run_dir=" + (t.folder / "b")})
            .code == 0);

  // --tokenizer names the same one, or is refused.
  CHECK(t.sluice({"eval", alone, "--tokenizer", t.folder / "kept.model"}).code == 0);
  const std::string other = test::train_model(t.folder, "other", "--vocab_size=390");
  o = t.sluice({"generate", alone, "--tokenizer", other});
  CHECK(o.code == 64);
  CHECK_THAT(o.err, Contains("another tokenizer than --tokenizer " + other));

  // The copy is covered by the manifest.
  fs::copy_file(other, alone + "/tokenizer.model", fs::copy_options::overwrite_existing);
  o = t.sluice({"checkpoint", "verify", alone});
  CHECK(o.code == 65);
  CHECK_THAT(o.out, Contains("tokenizer.model"));
}

TEST_CASE("a checkpoint without a copy of its tokenizer uses the file that it names, or asks for it",
          "[moved]") {
  const PieceRun t;
  REQUIRE(t.train().code == 0);
  const std::string alone = t.folder / "alone";
  fs::copy(t.newest(), alone);
  // As an older version wrote it: the manifest names no tokenizer.model.
  fs::remove(alone + "/tokenizer.model");
  std::string text = io::read_file(alone + "/MANIFEST.json");
  const size_t record = text.find(",\n  {\"bytes\"", text.find("config.json\""));
  REQUIRE(text.find("tokenizer.model", record) != std::string::npos);
  text.erase(record, text.find('}', record) + 1 - record);
  text.resize(text.rfind('\n', text.size() - 2) + 1);
  text += fmt::format("\"xxh3_128\": \"{}\"}}\n", checksum(text));
  test::write_bytes(alone + "/MANIFEST.json", text);

  CHECK(t.sluice({"generate", alone, "-n", "2"}).code == 0);
  Outcome o = t.sluice({"checkpoint", "export", alone, "-o", t.folder / "whole"});
  CHECK(io::exists(t.folder / "whole/tokenizer.model"));
  fs::rename(t.model, t.folder / "kept.model");
  o = t.sluice({"generate", alone, "-n", "2"});
  CHECK(o.code == 66);
  CHECK_THAT(o.err, Contains(t.model) && Contains("--tokenizer PATH"));
  CHECK(t.sluice({"generate", alone, "-n", "2", "--tokenizer", t.folder / "kept.model"}).code == 0);
  o = t.sluice({"checkpoint", "export", alone, "-o", t.folder / "without"});
  CHECK(o.code == 0);
  CHECK_THAT(o.err, Contains("exported without a tokenizer"));
  CHECK(t.sluice({"export", alone, "-o", t.folder / "exported"}).code == 0);
  for (const char* file : {"exported/config.json", "exported/generation_config.json"})
    CHECK(nlohmann::json::parse(io::read_file(t.folder / file)).at("eos_token_id") ==
          nlohmann::json::parse(io::read_file(alone + "/config.json")).at("eos_token_id"));
  CHECK(t.sluice(
             {"checkpoint", "export", alone, "-o", t.folder / "with", "--tokenizer", t.folder / "kept.model"})
            .code == 0);
  CHECK(io::exists(t.folder / "with/tokenizer.model"));
  // Another model under the old name would give wrong numbers.
  fs::rename(test::train_model(t.folder, "other", "--split_digits=true"), t.model);
  o = t.sluice({"eval", alone});
  CHECK(o.code == 65);
  CHECK_THAT(o.err, Contains("was trained with another tokenizer"));
}

TEST_CASE("the configuration of a checkpoint reads no other file", "[moved]") {
  const TinyRun t;
  REQUIRE(t.train().code == 0);
  const std::string checkpoint = t.run + "/ckpt/step_00000008", secret = t.folder / "secret.txt";
  test::write_bytes(secret, "root:x:0:0:the secret\n");
  // An attacker who can write the configuration can write a matching manifest, too.
  const std::string config = "extends: " + secret + "\n" + io::read_file(checkpoint + "/config.yaml");
  std::string manifest = io::read_file(checkpoint + "/MANIFEST.json");
  const std::string old = checksum(io::read_file(checkpoint + "/config.yaml"));
  const auto old_bytes =
      fmt::format("{{\"bytes\":{},\"name\":\"config.yaml\"", fs::file_size(checkpoint + "/config.yaml"));
  test::write_bytes(checkpoint + "/config.yaml", config);
  REQUIRE(manifest.find(old_bytes) != std::string::npos);
  manifest.replace(manifest.find(old_bytes), old_bytes.size(),
                   fmt::format("{{\"bytes\":{},\"name\":\"config.yaml\"", config.size()));
  for (size_t at; (at = manifest.find(old)) != std::string::npos;)
    manifest.replace(at, old.size(), checksum(config));
  manifest.resize(manifest.rfind('\n', manifest.size() - 2) + 1);
  manifest += fmt::format("\"xxh3_128\": \"{}\"}}\n", checksum(manifest));
  test::write_bytes(checkpoint + "/MANIFEST.json", manifest);

  const std::vector<std::vector<std::string>> commands = {{"eval", t.run},
                                                          {"generate", t.run, "-n", "1"},
                                                          {"analyze", t.run, "-o", t.folder / "a"},
                                                          t.train_arguments()};
  for (const auto& command : commands) {
    const Outcome o = t.sluice(command);
    INFO(command[0] << ": " << o.err);
    CHECK(o.code == 64);
    CHECK_THAT(o.err, Contains("extends no other file") && !Contains("the secret"));
  }
}

}  // namespace sluice
