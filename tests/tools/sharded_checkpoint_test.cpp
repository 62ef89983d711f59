// sluice checkpoint and training with a checkpoint written by several ranks.
#include <filesystem>
#include <mutex>

#include "checkpoint/manifest.h"
#include "checkpoint/stored_tensors.h"
#include "comm/threads.h"
#include "core/parallel_for.h"
#include "tools/tiny_run.h"

namespace sluice {

using Catch::Contains;
using test::Outcome;
using test::TinyRun;

namespace {

/// Saves a checkpoint again, at `folder`, as three ranks with sharded optimizer state.
void shard(const std::string& checkpoint, const std::string& folder,
           std::vector<unsigned char> (*change)(std::vector<unsigned char>)) {
  const CheckpointInfo info = verify_checkpoint(checkpoint);
  const Manifest manifest = read_manifest(checkpoint);
  struct Whole {
    StoredTensor stored;
    std::vector<unsigned char> bytes;
  };
  std::vector<Whole> tensors[2];
  const char* kinds[] = {kWeightsKind, kOptimizerKind};
  for (int kind = 0; kind < 2; ++kind) {
    StoredTensors stored(checkpoint, manifest, kinds[kind], StoredTensors::Check::checksum);
    for (const auto& [name, tensor] : stored.tensors()) {
      std::vector<unsigned char> buffer;
      const unsigned char* bytes = stored.read(tensor, 0, tensor.bytes, buffer);
      REQUIRE(tensor.dtype == "F32");
      tensors[kind].push_back({tensor, std::vector<unsigned char>(bytes, bytes + tensor.bytes)});
      if (change && name == "model.layers.0.mlp.up_proj.weight.v")
        tensors[kind].back().bytes = change(tensors[kind].back().bytes);
    }
  }
  run_thread_ranks(3, [&](Communicator& c) {
    set_num_threads(1);
    CheckpointContent content;
    content.step = info.step;
    content.state = info.state;
    content.config_yaml = info.config_yaml;
    content.hf_config = nlohmann::json::parse(io::read_file(checkpoint + "/config.json"));
    for (size_t i = 0; i < tensors[0].size(); ++i) {
      Whole& w = tensors[0][i];
      if (static_cast<int>(i % 3) != c.rank()) continue;
      NamedTensor t{w.stored.name, Tensor(w.bytes.data(), DType::f32, {1})};
      t.tensor.rank = static_cast<int>(w.stored.shape.size());
      std::copy(w.stored.shape.begin(), w.stored.shape.end(), t.tensor.shape.begin());
      content.weights.push_back(t);
    }
    for (Whole& w : tensors[1]) {
      const int64_t n = w.stored.elements(), begin = n * c.rank() / 3, end = n * (c.rank() + 1) / 3;
      content.optimizer.push_back({w.stored.name,
                                   Tensor(w.bytes.data() + 4 * begin, DType::f32, {end - begin}),
                                   w.stored.shape, begin});
    }
    CheckpointStore store(folder, CheckpointConfig{}, content, nullptr, &c);
    store.save(content);
    if (!store.wait()) throw std::runtime_error(store.last_error());
  });
}

}  // namespace

TEST_CASE("a checkpoint of several ranks is verified, compared, exported and resumed", "[checkpoint]") {
  namespace fs = std::filesystem;
  const TinyRun t;
  REQUIRE(t.train({"checkpoint.keep_last=4"}).code == 0);
  const std::string one = t.run + "/ckpt/step_00000004", run = t.folder / "sharded",
                    many = run + "/ckpt/step_00000004";
  shard(one, run + "/ckpt", nullptr);
  const auto checkpoint = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "checkpoint");
    return t.sluice(arguments);
  };

  Outcome o = checkpoint({"diff", one, many});
  INFO(o.out << o.err);
  CHECK(o.code == 0);
  CHECK_THAT(o.out, Contains("equal bit for bit"));
  o = checkpoint({"info", many, "--all"});
  CHECK(o.code == 0);
  CHECK_THAT(o.out, Contains("optim-00003-of-00003.safetensors") && Contains("  elements [0, "));
  const auto parameters = [](const std::string& out) { return out.substr(out.find("parameters"), 30); };
  CHECK(parameters(o.out) == parameters(checkpoint({"info", one}).out));
  CHECK(checkpoint({"verify", run}).code == 0);
  CHECK_THAT(checkpoint({"list", run}).out, Contains("step          4"));

  // Other programs' layout: shards and their index.
  o = checkpoint({"export", run, "-o", t.folder / "exported"});
  CHECK(o.code == 0);
  CHECK(io::list_directory(t.folder / "exported") ==
        std::vector<std::string>{"config.json", "model-00001-of-00003.safetensors",
                                 "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
                                 "model.safetensors.index.json"});
  CHECK(checkpoint({"diff", one + "/model.safetensors", t.folder / "exported"}).code == 0);
  CHECK(t.train({"run_dir=" + t.folder / "from", "train.init_from=" + t.folder / "exported",
                 "train.max_steps=1"})
            .code == 0);

  // One rank resumes where three have stopped, with the same bits.
  o = t.train({"run_dir=" + run});
  INFO(o.out << o.err);
  CHECK(o.code == 0);
  CHECK_THAT(o.out, Contains("resume   from " + many));
  CHECK(t.bits(run, 8) == t.bits(t.run, 8));

  // The differing tensors by name.
  shard(one, t.folder / "other", [](std::vector<unsigned char> bytes) {
    bytes[4 * 200] ^= 1;
    bytes[4 * 201] ^= 1;
    return bytes;
  });
  o = checkpoint({"diff", one, t.folder / "other/step_00000004"});
  CHECK(o.code == 1);
  CHECK_THAT(o.out,
             Contains("model.layers.0.mlp.up_proj.weight.v: 2 of 384 elements differ, the first is [200]: "));

  fs::resize_file(many + "/optim-00002-of-00003.safetensors", 100);
  o = checkpoint({"verify", many});
  CHECK(o.code == 65);
  CHECK_THAT(o.out, Contains("damaged  " + many + "/optim-00002-of-00003.safetensors: 100 bytes"));
}

}  // namespace sluice
