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
  CHECK(o.code == 73);  // nothing is written over
  CHECK_THAT(o.err, Contains("exists; nothing was written"));
  CHECK(checkpoint({"diff", older + "/model.safetensors", t.folder / "exported"}).code == 0);

  fs::resize_file(newest + "/optim.safetensors", 100);
  o = checkpoint({"verify", t.run});
  CHECK(o.code == 65);
  CHECK_THAT(o.out, Contains("damaged  " + newest + "/optim.safetensors: 100 bytes") &&
                        Contains("whole    " + older));
  CHECK(checkpoint({"verify", older}).code == 0);
  o = checkpoint({"prune", t.run, "--keep-last", "1"});
  CHECK(o.code == 0);
  CHECK(io::exists(older));  // the newest that is whole
  CHECK_FALSE(io::exists(t.run + "/ckpt/step_00000004"));

  CHECK(checkpoint({"verify", t.folder / "absent"}).code == 66);
  CHECK(checkpoint({"prune", t.run, "--keep-last", "0"}).code == 64);
  CHECK(checkpoint({}).code == 64);
}

}  // namespace sluice
