// Checkpoints of several ranks: saved with any sharding, loaded with any other; errors are equal on all
// ranks.
#include <sched.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <mutex>

#include "checkpoint/compare.h"
#include "checkpoint/manifest.h"
#include "checkpoint/rotation.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/sharded_toy.h"
#include "comm/threads.h"
#include "core/parallel_for.h"
#include "support/temp_folder.h"

using namespace sluice;
using namespace sluice::test;
using Catch::Matchers::Contains;

namespace {

void require(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);  // Catch's own are not for threads
}

struct Quiet {
  Quiet() { spdlog::set_level(spdlog::level::off); }
  ~Quiet() { spdlog::set_level(spdlog::level::info); }
};

/// Saves on as many threads as the layout has ranks; returns the result, which is equal on all ranks.
std::string save(const std::string& folder, ShardedState& state, const Layout& layout, bool async = false) {
  std::vector<std::string> errors(static_cast<size_t>(layout.ranks));
  run_thread_ranks(layout.ranks, [&](Communicator& c) {
    set_num_threads(1);
    const CheckpointContent content = content_of(state, layout, c.rank());
    CheckpointStore store(folder, checkpoint_config_of(async), content, nullptr, &c);
    store.save(content);
    const bool ok = store.wait();
    errors[static_cast<size_t>(c.rank())] = store.last_error();
    require(ok == store.last_error().empty() && ok == (store.saved_step() == state.step),
            "verdict and step disagree");
  });
  for (const std::string& error : errors) REQUIRE(error == errors[0]);
  return errors[0];
}

/// Loads the newest checkpoint on the ranks of another layout; returns the state that they hold together.
ShardedState load(const std::string& folder, const ShardedState& like, const Layout& layout) {
  ShardedState state = like.blank();
  const WholeModel model = like.model();
  run_thread_ranks(layout.ranks, [&](Communicator& c) {
    set_num_threads(1);
    const CheckpointInfo info = newest_valid_checkpoint(folder, &c);
    require(!info.path.empty() && info.step == like.step && info.state["step"] == like.step, "another step");
    const CheckpointContent targets = content_of(state, layout, c.rank());
    load_checkpoint(info.path, targets.weights, targets.optimizer, nullptr, &model);
  });
  return state;
}

/// The error that all ranks throw, or "" if none does.
template <class Body>
std::string common_error(int ranks, Body&& body) {
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  run_thread_ranks(ranks, [&](Communicator& c) {
    try {
      body(c);
    } catch (const Error& error) {
      require(error.code() == ExitCode::data, error.what());
      errors[static_cast<size_t>(c.rank())] = error.what();
    }
  });
  for (const std::string& error : errors) REQUIRE(error == errors[0]);
  return errors[0];
}

void write_over(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary | std::ios::trunc).write(content.data(), std::ssize(content));
}

}  // namespace

TEST_CASE("a checkpoint saved with any sharding loads bit for bit with any other", "[sharded]") {
  std::mt19937 random(20);
  for (int pair = 0; pair < 30; ++pair) {
    const TempFolder folder;
    ShardedState state(100 + pair);
    const int savers = 1 + static_cast<int>(random() % 4), loaders = 1 + static_cast<int>(random() % 4);
    const Layout from = random_layout(random, state, savers, false),
                 to = random_layout(random, state, loaders, true);
    INFO("pair " << pair << ": " << savers << " ranks save, " << loaders << " load");
    REQUIRE(save(folder / "a", state, from, pair % 2 == 1).empty());
    ShardedState loaded = load(folder / "a", state, to);
    REQUIRE(loaded.bits() == state.bits());

    // Saved again with a third sharding, it is an equal checkpoint; with one bit changed, it is not.
    const Layout again = random_layout(random, state, loaders, false);
    REQUIRE(save(folder / "b", loaded, again).empty());
    const std::string a = folder / "a/" + step_folder_name(state.step),
                      b = folder / "b/" + step_folder_name(state.step);
    Comparison c = compare_checkpoints(a, b);
    CHECK(c.differences.empty());
    CHECK(c.tensors == 12);
    ShardedState::Whole& changed =
        loaded.optimizer[2];  // of layer 2, which would follow layer 10 in alphabetical order
    const int64_t element = static_cast<int64_t>(random() % static_cast<uint64_t>(changed.elements()));
    changed.bytes[static_cast<size_t>(element * 4)] ^= 1;
    loaded.optimizer[5].bytes[0] ^= 1;  // of layer 10
    REQUIRE(save(folder / "b", loaded, again).empty());
    c = compare_checkpoints(a, b);
    REQUIRE(c.differences.size() == 2);
    CHECK(c.differences[0].name == "model.layers.2.mlp.up_proj.weight.m");
    CHECK(c.differences[0].first == element);
    CHECK(c.differences[0].value_a != c.differences[0].value_b);
    CHECK(c.differing_elements() == 2);
  }
}

TEST_CASE("several ranks write several files that other programs can read", "[sharded]") {
  const TempFolder folder;
  ShardedState state(7);
  REQUIRE(save(folder / "ckpt", state, even_layout(state, 3), true).empty());
  const std::string path = folder / "ckpt/step_00000007";
  CHECK(io::list_directory(path) ==
        std::vector<std::string>{"MANIFEST.json", "config.json", "config.yaml",
                                 "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                                 "model-00003-of-00003.safetensors", "model.safetensors.index.json",
                                 "optim-00001-of-00003.safetensors", "optim-00002-of-00003.safetensors",
                                 "optim-00003-of-00003.safetensors", "state.json"});
  CHECK(io::list_directory(folder / "ckpt") == std::vector<std::string>{"LATEST", "step_00000007"});
  const auto index = nlohmann::json::parse(io::read_file(path + "/model.safetensors.index.json"));
  CHECK(index["metadata"]["total_size"] == 2 * (35 + 24 + 24 + 5));
  CHECK(index["weight_map"].size() == 4);
  CHECK(index["weight_map"]["model.layers.2.mlp.up_proj.weight"] == "model-00002-of-00003.safetensors");
  const auto manifest = nlohmann::json::parse(io::read_file(path + "/MANIFEST.json"));
  CHECK(manifest["version"] == 2);
  CHECK(manifest["tensors"].size() == 4 + 3 * 8);
  const SafetensorsFile optim(path + "/optim-00002-of-00003.safetensors");
  REQUIRE(optim.find("model.norm.weight.m@1"));  // elements 1 and 2 of 5
  CHECK(optim.find("model.norm.weight.m@1")->shape == std::vector<int64_t>{2});

  // As a plain model folder, without Sluice's own files.
  for (const bool whole : {true, false}) {
    ShardedState blank = state.blank();
    const CheckpointContent targets = content_of(blank, even_layout(state, 1), 0);
    load_weights(path, targets.weights);
    CHECK(blank.weights[1].bytes == state.weights[1].bytes);
    CHECK(blank.weights[3].bytes == state.weights[3].bytes);
    if (whole) io::remove_file(path + "/MANIFEST.json");
  }
}

TEST_CASE("a single rank with data writes the single-file format, alone or beside empty ranks", "[sharded]") {
  const TempFolder folder;
  ShardedState state(7);
  Layout one = even_layout(state, 1);
  REQUIRE(save(folder / "a", state, one).empty());
  one.ranks = 3;
  REQUIRE(save(folder / "b", state, one, true).empty());
  const std::string a = folder / "a/step_00000007/", b = folder / "b/step_00000007/";
  CHECK(io::list_directory(a) == std::vector<std::string>{"MANIFEST.json", "config.json", "config.yaml",
                                                          "model.safetensors", "optim.safetensors",
                                                          "state.json"});
  CHECK(io::list_directory(a) == io::list_directory(b));
  for (const std::string& name : io::list_directory(a))
    CHECK(io::read_file(a + name) == io::read_file(b + name));
  CHECK_THAT(io::read_file(a + "MANIFEST.json"), Contains("\"version\": 1,") && !Contains("slice"));
  for (Cut& cut : one.cuts) cut.rank = 2;  // it need not be rank 0
  REQUIRE(save(folder / "c", state, one).empty());
  CHECK(io::read_file(folder / "c/step_00000007/model.safetensors") ==
        io::read_file(a + "model.safetensors"));
}

TEST_CASE("all ranks refuse a checkpoint that does not fit the model, with the same error", "[sharded]") {
  const TempFolder folder;
  ShardedState state(7);
  REQUIRE(save(folder / "ckpt", state, even_layout(state, 2)).empty());
  const std::string path = folder / "ckpt/step_00000007";
  const Layout layout = even_layout(state, 3);
  const auto attempt = [&](const WholeModel& model) {
    return common_error(3, [&](Communicator& c) {
      ShardedState mine = state.blank();
      CheckpointContent targets = content_of(mine, layout, c.rank());
      const auto unknown = [](const std::vector<TensorShape>& all) {
        return [&](const NamedTensor& t) {
          return std::none_of(all.begin(), all.end(), [&](const TensorShape& w) {
            return w.name == t.name && w.shape == whole_shape(t) && w.dtype == t.tensor.dtype;
          });
        };
      };
      std::erase_if(targets.weights, unknown(model.weights));
      std::erase_if(targets.optimizer, unknown(model.optimizer));
      load_checkpoint(path, targets.weights, targets.optimizer, nullptr, &model);
    });
  };
  CHECK(attempt(state.model()).empty());
  WholeModel other = state.model();
  other.weights[0].name = "model.other.weight";  // held only by its rank
  other.optimizer[4].shape = {5, 5};
  other.optimizer[5].dtype = DType::f32;
  CHECK_THAT(
      attempt(other),
      Contains("4 tensors)") && Contains("missing: model.other.weight (7, 5)") &&
          Contains("unexpected: model.embed_tokens.weight (7, 5) BF16") &&
          Contains("shape: model.layers.10.mlp.up_proj.weight.m is (3, 2, 4) F32, the model wants (5, 5)") &&
          Contains("type: model.layers.10.mlp.up_proj.weight.v is F64, the model wants f32"));

  // Slices with a gap or an overlap, in a manifest with a valid checksum.
  const Manifest good = read_manifest(path);
  const auto changed = [&](auto&& change) {
    Manifest manifest = good;
    for (TensorRecord& t : manifest.tensors)
      if (t.name == "model.norm.weight.m" && t.begin > 0) change(t);
    write_over(path + "/MANIFEST.json", manifest.text());
    return attempt(state.model()) + common_error(2, [&](Communicator& c) { verify_checkpoint(path, &c); });
  };
  CHECK_THAT(changed([](TensorRecord& t) { t.begin += 1; }),
             Contains("incomplete: model.norm.weight.m: elements [2, 3) of (5) F32 are in no file") &&
                 Contains("differs from the one in the manifest"));
  CHECK_THAT(changed([](TensorRecord& t) {
               t.begin -= 1;
               t.end -= 1;
             }),
             Contains("elements from 1 on of (5) F32 are stored twice"));
  CHECK_THAT(changed([](TensorRecord& t) { t.end += 1; }), Contains("its slice is outside its shape"));
  CHECK_THAT(changed([](TensorRecord& t) { t.shape = {6}; }),
             Contains("its slices are of (5) F32 and of (6) F32"));
  CHECK_THAT(changed([](TensorRecord& t) { t.offset += 1000000; }), Contains("it is outside its file"));
  // A piece that is read whole is hashed again from its destination in memory.
  changed([](TensorRecord& t) { t.xxh3_128[3] ^= 1; });
  CHECK_THAT(common_error(2,
                          [&](Communicator&) {
                            ShardedState mine = state.blank();
                            const CheckpointContent targets = content_of(mine, even_layout(state, 1), 0);
                            load_checkpoint(path, targets.weights, targets.optimizer);
                          }),
             Contains("checksum of tensor model.norm.weight.m as read differs"));
  CHECK(changed([](TensorRecord&) {}).empty());
}

TEST_CASE("tensors that ranks together do not hold exactly once are not saved", "[sharded]") {
  const Quiet quiet;
  const TempFolder folder;
  ShardedState state(7), next(8);
  REQUIRE(save(folder / "ckpt", state, even_layout(state, 2)).empty());
  Layout layout = even_layout(state, 2);
  const Cut last = layout.cuts.back();
  layout.cuts.pop_back();
  CHECK_THAT(save(folder / "ckpt", next, layout),
             Contains("step 8") && Contains("every tensor exactly once") &&
                 Contains("model.norm.weight.v: elements [2, 5) of (5) F64 are in no file"));
  layout.cuts.push_back(last);
  layout.cuts.push_back({0, last.tensor, 1, 1});
  CHECK_THAT(save(folder / "ckpt", next, layout), Contains("elements from 1 on") && Contains("twice"));
  layout.cuts.pop_back();
  // A non-finite value on one rank: all ranks decide alike.
  const ShardedState before = next;
  std::fill(next.optimizer[6].bytes.end() - 4, next.optimizer[6].bytes.end(), '\x7f');
  next.optimizer[6].bytes[next.optimizer[6].bytes.size() - 2] = '\x80';  // 0x7f80....: a NaN
  CHECK_THAT(
      save(folder / "ckpt", next, layout, true),
      Contains("rank 1: refused: model.norm.weight.m holds a value that is not finite (element 4 of 5)"));
  CHECK(list_checkpoints(folder / "ckpt").size() == 1);
  next = before;
  CHECK(save(folder / "ckpt", next, layout, true).empty());
  CHECK(load(folder / "ckpt", next, even_layout(next, 1)).bits() == next.bits());
}

TEST_CASE("damage to any shard is found by all ranks, which load the previous checkpoint", "[sharded]") {
  const Quiet quiet;
  namespace fs = std::filesystem;
  const TempFolder folder;
  ShardedState older(7), newer(8);
  const Layout layout = even_layout(older, 3);
  REQUIRE(save(folder / "seed", older, layout).empty());
  REQUIRE(save(folder / "seed", newer, layout).empty());
  using Damage =
      std::function<void(const std::string& file, const std::string& other, const std::string& sibling)>;
  const std::vector<std::pair<const char*, Damage>> damages = {
      {"a flipped bit",
       [](auto& file, auto&, auto&) {
         std::string bytes = io::read_file(file);
         bytes[bytes.size() * 2 / 3] ^= 4;
         write_over(file, bytes);
       }},
      {"cut", [](auto& file, auto&, auto&) { fs::resize_file(file, fs::file_size(file) / 2); }},
      {"deleted", [](auto& file, auto&, auto&) { fs::remove(file); }},
      {"another step's", [](auto& file, auto& other,
                            auto&) { fs::copy_file(other, file, fs::copy_options::overwrite_existing); }},
      {"swapped with another shard", [](auto& file, auto&, auto& sibling) {
         fs::rename(file, file + ".x");
         fs::rename(sibling, file);
         fs::rename(file + ".x", sibling);
       }}};
  int trials = 0;
  for (const std::string& name : io::list_directory(folder / "seed/step_00000008"))
    for (const auto& [what, damage] : damages) {
      const std::string other = folder / "seed/step_00000007/" + name;
      std::string sibling = name;
      if (const size_t at = name.find("-0000"); at != std::string::npos)
        sibling[at + 5] = name[at + 5] == '3' ? '1' : '3';
      if (sibling == name && std::string(what).find("swapped") == 0) continue;
      if (std::string(what) == "another step's" &&
          io::read_file(folder / "seed/step_00000008/" + name) == io::read_file(other))
        continue;
      io::remove_tree(folder / "trial");
      fs::copy(folder / "seed", folder / "trial", fs::copy_options::recursive);
      const std::string path = folder / "trial/step_00000008";
      INFO(name << " " << what);
      damage(path + "/" + name, other, path + "/" + sibling);
      const std::string error = common_error(2, [&](Communicator& c) { verify_checkpoint(path, &c); });
      CHECK_THAT(error, Contains(path));
      CHECK((error.find(name) != std::string::npos || error.find(sibling) != std::string::npos));
      REQUIRE(load(folder / "trial", older, even_layout(older, 2)).bits() == older.bits());
      fs::remove(folder / "trial/step_00000007/model.safetensors.index.json");
      const std::string none =
          common_error(2, [&](Communicator& c) { newest_valid_checkpoint(folder / "trial", &c); });
      CHECK_THAT(none, Contains("no valid checkpoint; refusing to start from scratch (2 found"));
      ++trials;
    }
  CHECK(trials >= 45);
  CHECK(common_error(2, [&](Communicator& c) {
          require(newest_valid_checkpoint(folder / "absent", &c).path.empty(), "found what is absent");
        }).empty());
}

TEST_CASE("changed bytes in shards, manifest and index are detected", "[sharded]") {
  const TempFolder folder;
  ShardedState state(7);
  REQUIRE(save(folder / "ckpt", state, even_layout(state, 2)).empty());
  const std::string path = folder / "ckpt/step_00000007";
  // Every byte with SLUICE_CRASH_ALL=1.
  const size_t stride = std::getenv("SLUICE_CRASH_ALL") ? 1 : 19;
  int flips = 0;
  for (const std::string& name : io::list_directory(path)) {
    const std::string file = path + "/" + name, good = io::read_file(file);
    for (size_t i = name.size() % stride; i < good.size(); i += stride, ++flips) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ (1 << (i * 7 + 3) % 8));
      write_over(file, bad);
      try {
        verify_checkpoint(path);
        FAIL("byte " << i << " of " << name << " was not noticed");
      } catch (const Error& error) {
        if (error.code() != ExitCode::data || std::string(error.what()).find(name) == std::string::npos)
          FAIL(error.what());
      }
    }
    write_over(file, good);
  }
  CHECK_NOTHROW(verify_checkpoint(path));
  CHECK(flips > 400);
}

TEST_CASE("ranks without a shared file system are refused before the first save", "[sharded]") {
  const TempFolder folder;
  ShardedState state(7);
  std::vector<std::string> errors(2);
  run_thread_ranks(2, [&](Communicator& c) {
    const std::string mine = folder / std::to_string(c.rank());
    // The same path is another folder on rank 1, as on the local disks of two machines.
    require(::unshare(CLONE_FS) == 0, "unshare");
    io::make_directories(mine);
    require(::chdir(mine.c_str()) == 0, "chdir");
    try {
      CheckpointStore("ckpt", checkpoint_config_of(false, 0.2),
                      content_of(state, even_layout(state, 2), c.rank()), nullptr, &c);
    } catch (const Error& error) {
      errors[static_cast<size_t>(c.rank())] = error.what();
    }
  });
  for (const std::string& error : errors) CHECK_THAT(error, Contains("a file system shared by all ranks"));
}

TEST_CASE("restoring allocates no memory except the restored tensors", "[sharded]") {
  const TempFolder folder;
  // 72 MiB in three files, sliced so that no target is a single piece.
  const int64_t n = int64_t{6} << 20;
  std::vector<float> w(static_cast<size_t>(n)), m(w), v(w);
  for (int64_t i = 0; i < n; ++i)
    w[static_cast<size_t>(i)] = static_cast<float>(i), m[static_cast<size_t>(i)] = -w[static_cast<size_t>(i)];
  const auto slice = [&](const char* name, std::vector<float>& values, int64_t begin, int64_t end) {
    return NamedTensor{name, Tensor(values.data() + begin, DType::f32, {end - begin}), {n}, begin};
  };
  run_thread_ranks(3, [&](Communicator& c) {
    set_num_threads(1);
    const int64_t begin = n * c.rank() / 3, end = n * (c.rank() + 1) / 3;
    CheckpointContent content;
    content.step = 5;
    if (c.rank() == 1) content.weights = {{"w", Tensor(w.data(), DType::f32, {n})}};
    content.optimizer = {slice("w.m", m, begin, end), slice("w.v", v, begin, end)};
    content.state = content.hf_config = nlohmann::json::object();
    CheckpointStore store(folder / "ckpt", checkpoint_config_of(false), content, nullptr, &c);
    store.save(content);
    require(store.wait(), store.last_error());
  });
  const int status = in_child([&] {
    set_num_threads(1);
    std::fill(w.begin(), w.end(), 0.0f);
    std::fill(m.begin(), m.end(), 0.0f);
    // Private memory of the process may grow by 6 MiB from here on: for the pieces of the C library, not for
    // a tensor.
    const std::string text = io::read_file("/proc/self/status");
    const int64_t data = std::stoll(text.substr(text.find("VmData:") + 7)) << 10;
    const rlimit limit{static_cast<rlim_t>(data + (6 << 20)), static_cast<rlim_t>(data + (6 << 20))};
    if (::setrlimit(RLIMIT_DATA, &limit) != 0) ::_exit(3);
    try {
      const CheckpointInfo info = newest_valid_checkpoint(folder / "ckpt");
      load_checkpoint(info.path, {{"w", Tensor(w.data(), DType::f32, {n})}},
                      {slice("w.m", m, 0, 5000000), slice("w.m", m, 5000000, n), slice("w.v", v, 1, n),
                       slice("w.v", v, 0, 1)});
    } catch (const std::bad_alloc&) {
      ::_exit(4);
    }
    for (int64_t i = 0; i < n; ++i)
      if (w[static_cast<size_t>(i)] != static_cast<float>(i) ||
          m[static_cast<size_t>(i)] != -static_cast<float>(i))
        ::_exit(5);
  });
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("tensors are listed in the order of the model", "[sharded]") {
  const std::vector<std::string> order = {"model.embed_tokens.weight",
                                          "model.layers.2.input_layernorm.weight",
                                          "model.layers.2.self_attn.q_proj.weight",
                                          "model.layers.2.self_attn.o_proj.weight",
                                          "model.layers.2.mlp.experts.9.up_proj.weight",
                                          "model.layers.2.mlp.experts.10.up_proj.weight",
                                          "model.layers.10.input_layernorm.weight",
                                          "model.norm.weight",
                                          "lm_head.weight",
                                          "other"};
  std::vector<std::string> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  CHECK(sorted != order);
  std::sort(sorted.begin(), sorted.end(), before_in_model);
  CHECK(sorted == order);
}
