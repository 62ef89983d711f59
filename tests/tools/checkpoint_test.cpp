// sluice checkpoint, on the checkpoints of a tiny run.
#include <filesystem>

#include "tools/tiny_run.h"

namespace sluice {

using Catch::Contains;
using test::Outcome;
using test::TinyRun;

TEST_CASE("checkpoint lists, verifies, compares, exports and prunes", "[checkpoint]") {
  namespace fs = std::filesystem;
  const TinyRun t;
  REQUIRE(t.train({"checkpoint.every_steps=2", "checkpoint.keep_last=4"}).code == 0);
  const std::string older = t.run + "/ckpt/step_00000006", newest = t.run + "/ckpt/step_00000008";
  const auto checkpoint = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "checkpoint");
    return t.sluice(arguments);
  };

  Outcome o = checkpoint({"list", t.run});
  INFO(o.out << o.err);
  CHECK(o.code == 0);
  CHECK(std::count(o.out.begin(), o.out.end(), '\n') == 4);
  CHECK(o.out.find("step_00000008") < o.out.find("step_00000006"));
  o = checkpoint({"info", t.run, "--all"});
  CHECK(o.code == 0);
  CHECK_THAT(o.out, Contains(newest) && Contains("parameters") && Contains("model.embed_tokens.weight ("));
  CHECK(checkpoint({"verify", t.run}).code == 0);

  o = checkpoint({"diff", t.run, newest});
  CHECK(o.code == 0);
  CHECK_THAT(o.out, Contains("equal bit for bit"));
  o = checkpoint({"diff", older, newest});
  CHECK(o.code == 1);
  CHECK_THAT(o.out, Contains("elements differ, the first is ["));

  o = checkpoint({"export", older, "-o", t.folder / "exported"});
  CHECK(o.code == 0);
  CHECK(io::list_directory(t.folder / "exported") ==
        std::vector<std::string>{"config.json", "model.safetensors"});
  CHECK(checkpoint({"diff", older + "/model.safetensors", t.folder / "exported"}).code == 0);
  o = checkpoint({"export", newest, "-o", t.folder / "exported"});
  CHECK(o.code == 73);  // nothing is overwritten
  CHECK_THAT(o.err, Contains("exists; nothing was written"));
  CHECK(checkpoint({"diff", older + "/model.safetensors", t.folder / "exported"}).code == 0);

  // A disk that is full at any moment leaves no file that is not whole.
  const std::string torn = t.folder / "torn";
  int failures = 0;
  for (int n = 1;; ++n) {
    o = t.sluice({"checkpoint", "export", older, "-o", torn},
                 {{"SLUICE_IOFAIL", fmt::format("{}:ENOSPC", n)}});
    if (o.code == 0) break;
    ++failures;
    INFO(n << ": " << o.err);
    CHECK((o.code == 74 || o.code == 73));
    for (const std::string& name :
         io::is_directory(torn) ? io::list_directory(torn) : std::vector<std::string>{}) {
      CHECK(io::read_file(torn + "/" + name) == io::read_file(older + "/" + name));
      io::remove_file(torn + "/" + name);
    }
  }
  CHECK(failures >= 8);
  CHECK(checkpoint({"diff", older + "/model.safetensors", torn}).code == 0);

  fs::resize_file(newest + "/optim.safetensors", 100);
  o = checkpoint({"verify", t.run});
  CHECK(o.code == 65);
  CHECK_THAT(o.out, Contains("damaged  " + newest + "/optim.safetensors: 100 bytes") &&
                        Contains("whole    " + older));
  CHECK(checkpoint({"verify", older}).code == 0);
  o = checkpoint({"prune", t.run, "--keep-last", "1"});
  CHECK(o.code == 0);
  CHECK(io::exists(older));  // the newest intact one
  CHECK_FALSE(io::exists(t.run + "/ckpt/step_00000004"));

  CHECK(checkpoint({"verify", t.folder / "absent"}).code == 66);
  CHECK(checkpoint({"prune", t.run, "--keep-last", "0"}).code == 64);
  CHECK(checkpoint({}).code == 64);
}

TEST_CASE("adapters are trained from a run, evaluated, merged, and refused without targets",
          "[checkpoint][lora]") {
  const TinyRun t;
  CHECK_THAT(t.train({"lora.rank=4"}).err, Contains("give train.init_from"));
  REQUIRE(t.train().code == 0);
  const std::string adapted = t.folder / "adapted", from = "train.init_from=" + t.run;
  Outcome o = t.train({"lora.rank=4", from, "run_dir=" + adapted});
  INFO(o.out << o.err);
  REQUIRE(o.code == 0);
  CHECK_THAT(o.out, Contains("lora     ") && Contains("rank 4"));
  CHECK(t.sluice({"eval", adapted}).code == 0);
  CHECK(t.sluice({"generate", adapted, "--prompt", "ab", "--tokens", "3"}).code == 0);
  CHECK(t.train({"lora.rank=8", from, "run_dir=" + adapted, "train.max_steps=9", "--allow-change",
                 "train.max_steps"})
            .code == 64);

  o = t.sluice({"checkpoint", "merge", adapted, "-o", t.folder / "merged"});
  CHECK(o.code == 0);
  CHECK_THAT(o.out, Contains("adapters of 8 matrices merged"));
  // The merged weights have the base's tensors with other values.
  o = t.sluice({"checkpoint", "diff", t.run, t.folder / "merged"});
  CHECK(o.code == 1);
  CHECK_THAT(o.out, Contains("8 tensors differ of"));
  CHECK(t.train({"train.init_from=" + (t.folder / "merged"), "run_dir=" + (t.folder / "on")}).code == 0);
  CHECK(t.sluice({"checkpoint", "merge", t.run, "-o", t.folder / "none"}).code == 64);
}

TEST_CASE("adapters are merged into modules with biases, which stay as they are", "[checkpoint][lora]") {
  const auto [key, biases] =
      GENERATE(std::pair{"model.attention_bias=true", 4},
               std::pair{"model.attention.gates=[{position: sdpa_output, bias: -1}]", 1});
  INFO(key);
  const TinyRun t;
  REQUIRE(t.train({key}).code == 0);
  const std::string adapted = t.folder / "adapted", merged = t.folder / "merged";
  REQUIRE(t.train({key, "lora.rank=4", "train.init_from=" + t.run, "run_dir=" + adapted}).code == 0);
  Outcome o = t.sluice({"checkpoint", "merge", adapted, "-o", merged});
  INFO(o.out << o.err);
  REQUIRE(o.code == 0);
  CHECK_THAT(o.out, Contains("adapters of 8 matrices merged"));
  o = t.sluice({"checkpoint", "diff", t.run, merged});
  CHECK(o.code == 1);
  CHECK_THAT(o.out, Contains("8 tensors differ of"));
  CHECK(test::count_of(io::read_file(merged + "/model.safetensors"), "_proj.bias") == biases);
  // The same model: the adapters' products are added to the weights instead of to the activations.
  const auto loss = [&](const std::string& of) {
    const Outcome eval = t.sluice({"eval", of, "data.seq_len=16", "--json", "--tokenizer", "byte", "--data",
                                   "held_out=" + t.folder / "held_out"});
    INFO(eval.err);
    REQUIRE(eval.code == 0);
    return nlohmann::json::parse(eval.out)["sets"]["held_out"]["loss"].get<double>();
  };
  CHECK(loss(merged) == Approx(loss(adapted)).epsilon(1e-5));
}

}  // namespace sluice
