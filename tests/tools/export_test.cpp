// What a run and its exports have in common beside the weights: the phase of sparse attention, the token in
// front of a text, the token that ends documents.
#include "data/small_model.h"
#include "tools/tiny_run.h"

using Catch::Matchers::Contains;

namespace sluice::test {
namespace {

struct Exported : TinyRun {
  std::string out = folder / "out";

  nlohmann::json json_of(const std::string& file) const { return nlohmann::json::parse(io::read_file(file)); }
  void write_export(const std::string& format = "auto") const {
    const Outcome o = sluice({"export", run, "-o", out, "--format", format});
    INFO(o.out << o.err);
    REQUIRE(o.code == 0);
  }
  double loss(const std::string& model) const {
    const Outcome o =
        sluice({"eval", model, "data.seq_len=16", "--data", "held_out=" + (folder / "held_out"), "--json"});
    INFO(model << ": " << o.err);
    REQUIRE(o.code == 0);
    return nlohmann::json::parse(o.out).at("sets").at("held_out").at("loss");
  }
  /// A BPE tokenizer of text.txt, which it writes.
  std::string trained_tokenizer() const {
    std::string text;
    for (int i = 0; i < 200; ++i) text += fmt::format("gate {} opens\n", i % 7);
    write_bytes(folder / "text.txt", text);
    const std::string file = folder / "t.json";
    REQUIRE(sluice({"tokenizer", "train", folder / "text.txt", "-o", file, "--vocab-size", "270"}).code == 0);
    return file;
  }
  std::string text_of(const std::string& model) const {
    const Outcome o = sluice({"generate", model, "-n", "60", "--seed", "3", "data.seq_len=16"});
    INFO(model << ": " << o.err);
    REQUIRE(o.code == 0);
    return o.out;
  }
};

/// The ids that a tokenizer.json puts in front of a text; null: none, and nothing behind it either.
nlohmann::json front_of(const nlohmann::json& tokenizer) {
  nlohmann::json processor = tokenizer.at("post_processor");
  if (processor.is_object() && processor.at("type") == "Sequence") processor = processor["processors"].back();
  if (!processor.is_object() || processor.at("type") != "TemplateProcessing") return nullptr;
  CHECK(processor["single"].size() == 2);
  return processor["special_tokens"][processor["single"][0]["SpecialToken"]["id"].get<std::string>()]["ids"];
}

}  // namespace

TEST_CASE("a checkpoint within the warm-up of sparse attention is a dense model everywhere", "[export]") {
  const Exported t;
  const std::string sparse = "model.attention={kind: sparse, sparse: {k: {base: 2}, phase_steps: ";
  // Large weights, so that the choice of keys matters.
  const std::vector<std::string> keys = {"model.attention.gates=[]", "model.initializer_range=0.5",
                                         "train.max_steps=4"};
  const auto train = [&](const std::string& steps, const std::string& run,
                         std::vector<std::string> more = {}) {
    more.insert(more.end(), keys.begin(), keys.end());
    more.push_back(sparse + steps + "}}");
    more.push_back("run_dir=" + run);
    return t.train(more);
  };
  REQUIRE(train("3", t.run, {"checkpoint.every_steps=2"}).code == 0);
  std::filesystem::remove_all(step_folder(t.run, 4));  // as if it had been stopped within the warm-up
  t.write_export();
  for (const std::string& file : {t.out + "/config.json", step_folder(t.run, 2) + "/config.json"})
    CHECK(t.json_of(file).at("attention").at("sparse").at("phase") == "dense_warm_up");
  CHECK(t.loss(t.out) == Approx(t.loss(t.run)).epsilon(1e-6));
  // A training that starts from it computes another function, unless it begins with a warm-up, too.
  const std::string from = "train.init_from=" + t.run;
  const Outcome refused = train("0", t.folder / "no", {from});
  CHECK(refused.code == 64);
  CHECK_THAT(refused.err,
             Contains("model.attention.sparse.phase = sparse, but that of") && Contains("is dense_warm_up"));
  CHECK(train("3", t.folder / "on", {from}).code == 0);
  // And the other way round: its last step was sparse.
  CHECK_THAT(train("3", t.folder / "no", {"train.init_from=" + (t.folder / "on")}).err,
             Contains("model.attention.sparse.phase = dense_warm_up, but that of"));
  CHECK(
      t.json_of(step_folder(t.folder / "on", 4) + "/config.json").at("attention").at("sparse").at("phase") ==
      "sparse");
}

TEST_CASE("the token in front of a text goes along with an export in every format", "[export]") {
  for (const std::string format : {"qwen3", "sluice"}) {
    INFO(format);
    const Exported t;
    REQUIRE(t.train({"data.begin_token=256", "model.attention.gates=[]"}).code == 0);
    t.write_export(format);
    CHECK(t.loss(t.out) == Approx(t.loss(t.run)).epsilon(1e-6));
    CHECK(t.text_of(t.out) == t.text_of(t.run));
    const nlohmann::json settings = t.json_of(t.out + "/tokenizer_config.json");
    CHECK(settings.at("add_bos_token") == true);
    CHECK(settings.at("bos_token") == "<|endoftext|>");
    CHECK(front_of(t.json_of(t.out + "/tokenizer.json")) == nlohmann::json{256});
    CHECK_THAT(io::read_file(t.out + "/README.md"), Contains("the tokenizer puts it before a text"));
    const Outcome imported = t.sluice({"import", t.out});
    CHECK_THAT(imported.out, Contains("begin_token: 256"));
    CHECK_THAT(imported.err, Contains("begins       each text with token 256"));
  }
}

TEST_CASE("the tokenizer of an export puts in front of a text what training had there", "[export]") {
  const Exported t;
  const std::string file = t.trained_tokenizer();
  // As published tokenizers have it: one token in front, one behind, and a part that adds none.
  nlohmann::ordered_json j = nlohmann::ordered_json::parse(io::read_file(file));
  const int64_t id = j["added_tokens"][0]["id"];
  const auto token = [](const char* name) {
    return nlohmann::ordered_json{{"SpecialToken", {{"id", name}, {"type_id", 0}}}};
  };
  j["post_processor"] = {
      {"type", "Sequence"},
      {"processors",
       {{{"type", "ByteLevel"}, {"trim_offsets", false}},
        {{"type", "TemplateProcessing"},
         {"single", {token("g"), {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}, token("<|endoftext|>")}},
         {"special_tokens",
          {{"g", {{"id", "g"}, {"ids", {1}}, {"tokens", {"g"}}}},
           {"<|endoftext|>", {{"id", "<|endoftext|>"}, {"ids", {id}}, {"tokens", {"<|endoftext|>"}}}}}}}}}};
  write_bytes(file, j.dump());
  for (const char* prefix : {"train", "held_out"})
    REQUIRE(
        t.sluice({"tokenize", t.folder / "text.txt", "-o", t.folder / prefix, "--tokenizer", file, "--force"})
            .code == 0);
  const std::vector<std::string> keys = {"data.tokenizer={type: bpe, path: " + file + "}",
                                         "data.allow_overlap=true", "model.attention.gates=[]",
                                         "train.max_steps=1", "model.vocab_size=0"};
  for (const bool begins : {false, true}) {
    INFO(begins);
    std::filesystem::remove_all(t.run);
    std::filesystem::remove_all(t.out);
    std::vector<std::string> all = keys;
    if (begins) all.push_back(fmt::format("data.begin_token={}", id));
    const Outcome trained = t.train(all);
    INFO(trained.err);
    REQUIRE(trained.code == 0);
    t.write_export("qwen3");
    const nlohmann::json written = t.json_of(t.out + "/tokenizer.json");
    CHECK(front_of(written) == (begins ? nlohmann::json{id} : nlohmann::json()));
    CHECK(written.dump().find("ByteLevel") != std::string::npos);
    CHECK(t.json_of(t.out + "/tokenizer_config.json").at("add_bos_token") == begins);
    // Evaluations know the tokenizer of the token files again.
    CHECK(io::read_file(t.out + "/original_tokenizer.json") == io::read_file(file));
    CHECK(t.loss(t.out) == Approx(t.loss(t.run)).epsilon(1e-6));
  }
}

TEST_CASE("transformers is told to take a SentencePiece model as it is", "[export]") {
  const Exported t;
  const std::string file = train_model(t.folder, "words");
  for (const char* prefix : {"train", "held_out"})
    REQUIRE(t.sluice({"tokenize", t.folder / "corpus.txt", "-o", t.folder / prefix, "--tokenizer", file,
                      "--force"})
                .code == 0);
  const Outcome trained =
      t.train({"data.tokenizer={type: sentencepiece, path: " + file + "}", "data.allow_overlap=true",
               "model.attention.gates=[]", "train.max_steps=1", "model.vocab_size=0"});
  INFO(trained.err);
  REQUIRE(trained.code == 0);
  t.write_export("qwen3");
  const nlohmann::json settings = t.json_of(t.out + "/tokenizer_config.json");
  CHECK(settings.at("tokenizer_class") == "PreTrainedTokenizerFast");  // or it would be Qwen's
  CHECK(settings.at("add_bos_token") == false);
  CHECK(settings.at("eos_token") == "</s>");
  CHECK(t.loss(t.out) == Approx(t.loss(t.run)).epsilon(1e-6));
}

TEST_CASE("a folder of another format has the begin token of its run, or none", "[export]") {
  // One that is none of the tokenizer's, which tokenizer_config.json cannot name.
  const Exported t;
  REQUIRE(t.train({"data.begin_token=257", "model.vocab_size=258", "model.attention.gates=[]"}).code == 0);
  t.write_export("qwen3");
  CHECK(t.loss(t.out) == Approx(t.loss(t.run)).epsilon(1e-6));
  // Weights alone, without the tokenizer's files.
  const std::string weights = t.folder / "weights";
  REQUIRE(t.sluice({"checkpoint", "export", t.run, "-o", weights}).code == 0);
  const Outcome o = t.sluice({"eval", weights, "data.seq_len=16", "--tokenizer", "byte", "--data",
                              "held_out=" + (t.folder / "held_out"), "--json"});
  INFO(o.err);
  REQUIRE(o.code == 0);
  CHECK(nlohmann::json::parse(o.out)["sets"]["held_out"]["loss"].get<double>() ==
        Approx(t.loss(t.run)).epsilon(1e-6));
  // And none, although the tokenizer's file puts one in front of every text.
  const Exported plain;
  REQUIRE(plain.train({"model.attention.gates=[]"}).code == 0);
  plain.write_export("qwen3");
  const std::string file = plain.out + "/tokenizer.json";
  nlohmann::ordered_json tokenizer = nlohmann::ordered_json::parse(io::read_file(file));
  tokenizer["post_processor"] = {
      {"type", "TemplateProcessing"},
      {"single", {{{"SpecialToken", {{"id", "<|endoftext|>"}, {"type_id", 0}}}}}},
      {"special_tokens", {{"<|endoftext|>", {{"id", "<|endoftext|>"}, {"ids", {256}}}}}}};
  write_bytes(file, tokenizer.dump());
  CHECK(plain.loss(plain.out) == Approx(plain.loss(plain.run)).epsilon(1e-6));
}

TEST_CASE("documents of an exported folder end with the token of the run", "[export]") {
  const Exported t;
  // A tokenizer with two tokens that may end documents.
  const std::string tokenizer = t.trained_tokenizer();
  nlohmann::ordered_json j = nlohmann::ordered_json::parse(io::read_file(tokenizer));
  const int64_t usual = j["added_tokens"][0]["id"];
  j["added_tokens"].push_back(j["added_tokens"][0]);
  j["added_tokens"].back()["id"] = 270;
  j["added_tokens"].back()["content"] = "<|im_end|>";
  write_bytes(tokenizer, j.dump());
  const auto tokenize = [&](const std::string& prefix, std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"tokenize", t.folder / "text.txt", "-o", t.folder / prefix, "--tokenizer",
                               tokenizer, "--force"});
    return t.sluice(more);
  };
  const std::string of_run =
      "data.tokenizer={type: bpe, path: " + tokenizer + ", end_of_document: <|im_end|>}";
  const std::vector<std::string> keys = {of_run, "data.allow_overlap=true", "model.attention.gates=[]",
                                         "train.max_steps=1"};
  REQUIRE(tokenize("train").code == 0);
  REQUIRE(tokenize("held_out").code == 0);
  const Outcome refused = t.train(keys);
  CHECK(refused.code == 65);
  CHECK_THAT(refused.err, Contains(fmt::format("end with token {} (<|endoftext|>", usual)) &&
                              Contains("but those of this run with 270 (<|im_end|>)") &&
                              Contains("--end-of-document '<|im_end|>'"));
  for (const char* prefix : {"train", "held_out"})
    REQUIRE(tokenize(prefix, {"--end-of-document", "<|im_end|>"}).code == 0);
  const Outcome trained = t.train(keys);
  INFO(trained.err);
  REQUIRE(trained.code == 0);
  t.write_export();
  CHECK(t.json_of(t.out + "/tokenizer_config.json").at("eos_token") == "<|im_end|>");
  CHECK(t.json_of(t.out + "/config.json").at("eos_token_id") == 270);
  CHECK(t.loss(t.out) == Approx(t.loss(t.run)).epsilon(1e-6));  // not refused: documents end alike
  CHECK(t.text_of(t.out) == t.text_of(t.run));
  CHECK_THAT(t.sluice({"import", t.out}).out, Contains("end_of_document: \"<|im_end|>\""));
  // The same tokenizer, given by hand.
  const Outcome by_hand = t.sluice({"eval", t.out, "data.seq_len=16", "--tokenizer", tokenizer, "--data",
                                    "held_out=" + (t.folder / "held_out"), "--json"});
  INFO(by_hand.err);
  REQUIRE(by_hand.code == 0);
  CHECK(nlohmann::json::parse(by_hand.out)["sets"]["held_out"]["loss"].get<double>() ==
        Approx(t.loss(t.run)).epsilon(1e-6));
  // Where the tokenizer cannot choose.
  const Outcome bytes =
      t.sluice({"tokenize", t.folder / "text.txt", "-o", t.folder / "b", "--end-of-document", "x"});
  CHECK(bytes.code == 64);
  CHECK_THAT(bytes.err, Contains("--end-of-document x: only a tokenizer.json"));
}

TEST_CASE("an export does not take the place of a run's checkpoints", "[export]") {
  const Exported t;
  REQUIRE(t.train().code == 0);
  for (const std::string& folder :
       {t.run, t.run + "/", t.run + "/ckpt", step_folder(t.run, 4), t.folder / "./run/../run"})
    for (const std::vector<std::string>& command :
         {std::vector<std::string>{"export"}, {"checkpoint", "export"}}) {
      std::vector<std::string> arguments = command;
      arguments.insert(arguments.end(), {t.run, "-o", folder});
      const Outcome o = t.sluice(arguments);
      INFO(folder << o.out << o.err);
      CHECK(o.code == 73);
      CHECK_THAT(o.err, Contains("holds the checkpoints of a run"));
      CHECK_FALSE(io::exists(folder + "/model.safetensors.tmp"));
    }
  CHECK_FALSE(io::exists(t.run + "/model.safetensors"));
  const Outcome nameless = t.sluice({"export", t.run, "-o", ""});
  CHECK(nameless.code == 64);
  CHECK_THAT(nameless.err, Contains("the output folder has no name"));
  // Where an older program has written one there, the run is what is read.
  t.write_export();
  for (const std::string& name : io::list_directory(t.out))
    std::filesystem::copy_file(t.out + "/" + name, t.run + "/" + name);
  const Outcome o = t.sluice({"eval", t.run, "--json"});
  REQUIRE(o.code == 0);
  CHECK(nlohmann::json::parse(o.out).at("step") == 8);
  CHECK_THAT(t.sluice({"import", t.run}).err, Contains("is not a Hugging Face folder"));
}

TEST_CASE("an export without vocab_size is refused by file and key", "[export]") {
  const Exported t;
  REQUIRE(t.train().code == 0);
  t.write_export("sluice");
  nlohmann::json config = t.json_of(t.out + "/config.json");
  config.erase("vocab_size");
  for (const std::string& text : {config.dump(), std::string("{\"model_type\": \"sluice\"}")}) {
    write_bytes(t.out + "/config.json", text);
    const Outcome o = t.sluice({"eval", t.out, "--data", "held_out=" + (t.folder / "held_out")});
    INFO(o.err);
    CHECK(o.code == 65);
    CHECK_THAT(o.err, Contains("out/config.json: vocab_size is missing"));
  }
}

}  // namespace sluice::test
