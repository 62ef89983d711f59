#include "checkpoint/store.h"

#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>

#include "checkpoint/manifest.h"
#include "checkpoint/rotation.h"
#include "core/parallel_for.h"
#include "support/temp_folder.h"

using namespace sluice;
using Catch::Matchers::Contains;

namespace {

/// A state whose every value follows from (step, branch).
struct Toy {
  std::vector<float> weight = std::vector<float>(12), moment = std::vector<float>(12),
                     norm = std::vector<float>(5);
  std::vector<bf16> narrow = std::vector<bf16>(6);
  std::vector<double> wide = std::vector<double>(3);
  int64_t step = 0;

  Toy() = default;
  explicit Toy(int64_t step_, int branch = 0) : step(step_) {
    float x = static_cast<float>(step) + 0.001f * static_cast<float>(branch);
    for (float& v : weight) v = x += 0.37f;
    for (float& v : moment) v = x *= -1.01f;
    for (float& v : norm) v = x += 1e-3f;
    for (bf16& v : narrow) v = bf16(x += 1.0f);
    for (double& v : wide) v = x / 3.0;
  }
  CheckpointContent content() {
    CheckpointContent c;
    c.step = step;
    c.weights = {{"model.embed_tokens.weight", Tensor(weight.data(), DType::f32, {3, 4})},
                 {"model.norm.weight", Tensor(norm.data(), DType::f32, {5})},
                 {"model.layers.0.x", Tensor(narrow.data(), DType::bf16, {2, 3})}};
    c.optimizer = {{"model.embed_tokens.weight.m", Tensor(moment.data(), DType::f32, {3, 4})},
                   {"model.norm.weight.v", Tensor(wide.data(), DType::f64, {3})}};
    c.state = {{"step", step}, {"third", static_cast<double>(step) / 3}};
    c.config_yaml = fmt::format("name: toy {}\n", step);
    c.hf_config = {{"model_type", "toy"}};
    return c;
  }
  /// Bits, so that -0 and 0 differ.
  std::string bits() const {
    std::string all;
    const auto add = [&](const auto& v) {
      all.append(reinterpret_cast<const char*>(v.data()), v.size() * sizeof v[0]);
    };
    add(weight), add(moment), add(norm), add(narrow), add(wide);
    return all;
  }
};

CheckpointConfig config_of(bool async, int64_t keep_last = 2, int64_t keep_every = 0) {
  CheckpointConfig config;
  config.async = async;
  config.keep_last = keep_last;
  config.keep_every_steps = keep_every;
  return config;
}

bool save(const std::string& folder, Toy toy, bool async = false, int64_t keep_last = 2) {
  CheckpointContent content = toy.content();
  CheckpointStore store(folder, config_of(async, keep_last), content);
  store.save(content);
  return store.wait();
}

/// The newest valid state; its values, counters and configuration must belong together.
Toy newest(const std::string& folder) {
  const CheckpointInfo info = newest_valid_checkpoint(folder);
  REQUIRE_FALSE(info.path.empty());
  Toy toy;
  toy.step = info.step;
  CheckpointContent content = toy.content();
  load_checkpoint(info.path, content.weights, content.optimizer);
  REQUIRE(info.state["step"] == info.step);
  REQUIRE(info.state["third"].get<double>() == static_cast<double>(info.step) / 3);
  REQUIRE(info.config_yaml == fmt::format("name: toy {}\n", info.step));
  return toy;
}

std::vector<int64_t> steps_in(const std::string& folder) {
  std::vector<int64_t> steps;
  for (const std::string& path : list_checkpoints(folder))
    steps.push_back(step_of_folder_name(path.substr(path.rfind('/') + 1)));
  return steps;
}

void expect_no_litter(const std::string& folder) {
  for (const std::string& name : io::list_directory(folder)) {
    INFO(name);
    REQUIRE((step_of_folder_name(name) >= 0 || name == "LATEST"));
  }
}

/// A run folder with checkpoints of steps 10 and 20, copied again for every trial.
class Trials {
 public:
  Trials() {
    spdlog::set_level(spdlog::level::off);  // hundreds of expected warnings
    set_num_threads(1);                     // the thread pool would not survive a fork
    REQUIRE((save(root_ / "seed", Toy(10)) && save(root_ / "seed", Toy(20))));
  }
  ~Trials() {
    spdlog::set_level(spdlog::level::info);
    set_num_threads(threads_);
  }
  std::string fresh() {
    io::remove_tree(root_ / "trial");
    std::filesystem::copy(root_ / "seed", root_ / "trial", std::filesystem::copy_options::recursive);
    return root_ / "trial";
  }

 private:
  TempFolder root_;
  int threads_ = num_threads();
};

void write_over(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary | std::ios::trunc).write(content.data(), std::ssize(content));
}

}  // namespace

TEST_CASE("a checkpoint is read back bit for bit", "[checkpoint]") {
  for (const bool async : {false, true}) {
    const TempFolder folder;
    Toy toy(7);
    toy.weight[3] = -0.0f;
    toy.weight[4] = std::numeric_limits<float>::denorm_min();
    CheckpointContent content = toy.content();
    CHECK(newest_valid_checkpoint(folder / "ckpt").path.empty());
    CheckpointStore store(folder / "ckpt", config_of(async), content);
    CHECK(store.saved_step() == -1);
    store.save(content);
    REQUIRE(store.wait());
    CHECK(store.saved_step() == 7);
    CHECK(store.last_error().empty());
    CHECK(newest(folder / "ckpt").bits() == toy.bits());
    CHECK(io::read_file(folder / "ckpt/LATEST") == "step_00000007\n");
    // Other readers: valid safetensors and JSON, aligned data.
    const std::string model = io::read_file(folder / "ckpt/step_00000007/model.safetensors");
    uint64_t length;
    std::memcpy(&length, model.data(), 8);
    CHECK((8 + length) % 64 == 0);
    const auto manifest = nlohmann::json::parse(io::read_file(folder / "ckpt/step_00000007/MANIFEST.json"));
    CHECK(manifest["step"] == 7);
    CHECK(manifest["files"].size() == 5);
    CHECK(manifest["tensors"].size() == 5);
    Toy other(8);
    store.save(other.content());
    REQUIRE(store.wait());
    CHECK(newest(folder / "ckpt").bits() == other.bits());
    expect_no_litter(folder / "ckpt");
  }
}

TEST_CASE("an asynchronous save has the state at the time of the call", "[checkpoint]") {
  const TempFolder folder;
  std::vector<float> values(2 << 20, 1.0f);
  Toy toy(1);
  CheckpointContent content = toy.content();
  content.weights = {{"w", Tensor(values.data(), DType::f32, {2 << 20})}};
  CheckpointStore store(folder / "ckpt", config_of(true), content);
  for (int64_t step = 1; step <= 3; ++step) {
    content.step = step;
    content.state["step"] = step;
    std::fill(values.begin(), values.end(), static_cast<float>(step));
    store.save(content);
    std::fill(values.begin(), values.end(), 99.0f);
    content.state["step"] = 99;
    content.config_yaml = "changed";
  }
  REQUIRE(store.wait());
  const CheckpointInfo info = newest_valid_checkpoint(folder / "ckpt");
  CHECK(info.state["step"] == 3);
  load_weights(info.path, content.weights);
  CHECK(values == std::vector<float>(2 << 20, 3.0f));
}

TEST_CASE("a kill at any operation of a save leaves a complete checkpoint", "[checkpoint][crash]") {
  Trials trials;
  struct Scene {
    const char* kind;
    bool async;
    int64_t step;  // 30: a new one, and 10 is rotated out; 20: one that exists is replaced
  };
  for (const Scene scene : {Scene{"", false, 30}, {":torn", false, 30}, {"", true, 30}, {"", false, 20}}) {
    const Toy before(20), after(scene.step, 1);
    int kills = 0, newer = 0;
    for (int n = 1; n < 200; ++n, ++kills) {
      const std::string folder = trials.fresh();
      INFO("killed at operation " << n << scene.kind << ", saving step " << scene.step);
      const int status = in_child([&] {
        const TempVariable fault("SLUICE_CRASH", fmt::format("{}{}", n, scene.kind));
        save(folder, after, scene.async);
      });
      const Toy found = newest(folder);
      REQUIRE((found.bits() == before.bits() || found.bits() == after.bits()));
      newer += found.bits() == after.bits();
      // The next start cleans up, and its first save succeeds.
      REQUIRE(save(folder, Toy(40)));
      expect_no_litter(folder);
      REQUIRE(newest(folder).bits() == Toy(40).bits());
      REQUIRE(steps_in(folder).size() == 2);
      if (!WIFSIGNALED(status)) {
        REQUIRE(WEXITSTATUS(status) == 0);
        break;
      }
      REQUIRE(WTERMSIG(status) == SIGKILL);
    }
    CHECK(kills >= 30);
    CHECK(newer >= 5);  // kills after publication: LATEST and rotation
  }
}

TEST_CASE("an error at any operation of a save fails at most that save", "[checkpoint][crash]") {
  Trials trials;
  for (const char* error : {"ENOSPC", "EIO", "EACCES", "EROFS", "EMFILE"}) {
    const bool async = std::strcmp(error, "EIO") == 0;
    const Toy before(20), after(30);
    Toy live(30), next(40);
    int failures = 0;
    for (int n = 1;; ++n) {
      REQUIRE(n < 200);
      const std::string folder = trials.fresh();
      INFO(error << " at operation " << n);
      CheckpointContent content = live.content();
      CheckpointStore store(folder, config_of(async), content);
      bool reached = true;
      {
        const TempVariable fault("SLUICE_IOFAIL", fmt::format("{}:{}", n, error));
        store.save(content);
        if (store.wait()) {
          REQUIRE(store.saved_step() == 30);
          REQUIRE(newest(folder).bits() == after.bits());
        } else {
          ++failures;
          REQUIRE(store.saved_step() == -1);
          REQUIRE_THAT(store.last_error(), Contains(error) && Contains("step 30"));
          const Toy found = newest(folder);
          REQUIRE((found.bits() == before.bits() || found.bits() == after.bits()));
        }
        // The fault is still pending if the save has fewer operations than n.
        try {
          io::make_directories(folder + "/probe");
        } catch (const io::IoError&) {
          reached = false;
        }
      }
      if (io::exists(folder + "/probe")) io::remove_tree(folder + "/probe");
      store.save(next.content());
      REQUIRE(store.wait());
      REQUIRE(store.last_error().empty());
      REQUIRE(newest(folder).bits() == next.bits());
      expect_no_litter(folder);
      REQUIRE(steps_in(folder).size() == 2);
      if (!reached) break;
    }
    CHECK(failures >= 20);
  }
}

TEST_CASE("a disk that stays full neither damages checkpoints nor ends the run", "[checkpoint][crash]") {
  Trials trials;
  const std::string folder = trials.fresh();
  Toy toy(30);
  CheckpointStore store(folder, config_of(true), toy.content());
  {
    const TempVariable fault("SLUICE_IOFAIL", "4:ENOSPC:sticky");
    for (int64_t step = 30; step < 33; ++step) {
      toy = Toy(step);
      store.save(toy.content());
      CHECK_FALSE(store.wait());
      CHECK(newest(folder).bits() == Toy(20).bits());
    }
  }
  toy = Toy(33);
  store.save(toy.content());
  CHECK(store.wait());
  expect_no_litter(folder);
  CHECK(newest(folder).bits() == toy.bits());
}

TEST_CASE("every changed byte of every file is detected", "[checkpoint][corruption]") {
  Trials trials;
  const std::string folder = trials.fresh(), path = folder + "/step_00000020";
  int flips = 0;
  for (const std::string& name : io::list_directory(path)) {
    const std::string file = path + "/" + name, good = io::read_file(file);
    for (size_t i = 0; i < good.size(); ++i, ++flips) {
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
    CHECK_NOTHROW(verify_checkpoint(path));
  }
  CHECK(flips > 2000);
}

TEST_CASE("damaged checkpoints are skipped; if all are damaged, loading is refused",
          "[checkpoint][corruption]") {
  Trials trials;
  namespace fs = std::filesystem;
  using Damage = std::function<void(const std::string& file, const std::string& other)>;
  const std::vector<std::pair<const char*, Damage>> damages = {
      {"emptied", [](auto& file, auto&) { fs::resize_file(file, 0); }},
      {"cut by a byte", [](auto& file, auto&) { fs::resize_file(file, fs::file_size(file) - 1); }},
      {"longer by a byte", [](auto& file, auto&) { fs::resize_file(file, fs::file_size(file) + 1); }},
      {"zeroed", [](auto& file, auto&) { write_over(file, std::string(fs::file_size(file), '\0')); }},
      {"deleted", [](auto& file, auto&) { fs::remove(file); }},
      {"another step's",
       [](auto& file, auto& other) { fs::copy_file(other, file, fs::copy_options::overwrite_existing); }},
      {"a link to an equal file",
       [](auto& file, auto&) {
         fs::rename(file, file + ".real");
         fs::create_symlink(file + ".real", file);
       }},
      {"a folder",
       [](auto& file, auto&) {
         fs::remove(file);
         fs::create_directory(file);
       }},
      {"a pipe", [](auto& file, auto&) {
         fs::remove(file);
         ::mkfifo(file.c_str(), 0600);
       }}};
  for (const char* name : {"MANIFEST.json", "model.safetensors", "optim.safetensors", "state.json",
                           "config.yaml", "config.json"}) {
    for (const auto& [what, damage] : damages) {
      const std::string folder = trials.fresh();
      const std::string file = folder + "/step_00000020/" + name, other = folder + "/step_00000010/" + name;
      if (std::string(what) == "another step's" && io::read_file(file) == io::read_file(other)) continue;
      INFO(name << " " << what);
      damage(file, other);
      try {
        verify_checkpoint(folder + "/step_00000020");
        FAIL("not noticed");
      } catch (const Error& error) {
        CHECK(error.code() == ExitCode::data);
        CHECK_THAT(error.what(), Contains(folder + "/step_00000020") && Contains(std::string(name)));
      }
      CHECK(newest(folder).bits() == Toy(10).bits());
      io::remove_file(folder + "/step_00000010/config.json");
      try {
        newest_valid_checkpoint(folder);
        FAIL("started from scratch");
      } catch (const Error& error) {
        CHECK(error.code() == ExitCode::data);
        CHECK_THAT(error.what(), Contains("no valid checkpoint; refusing to start from scratch"));
      }
    }
  }
}

TEST_CASE("intact checkpoints with wrong content are skipped", "[checkpoint][corruption]") {
  Trials trials;
  namespace fs = std::filesystem;
  std::string folder = trials.fresh();
  fs::rename(folder + "/step_00000020", folder + "/step_00000021");
  CHECK_THROWS_WITH(verify_checkpoint(folder + "/step_00000021"), Contains("MANIFEST.json: of step 20, in"));
  CHECK(newest(folder).step == 10);
  folder = trials.fresh();
  fs::rename(folder + "/step_00000020", folder + "/elsewhere");
  fs::create_directory_symlink(folder + "/elsewhere", folder + "/step_00000020");
  CHECK(newest(folder).step == 10);
  fs::create_directory(folder + "/step_00000030");
  write_over(folder + "/step_00000040", "a file");
  CHECK(newest(folder).step == 10);
  CHECK_THROWS_WITH(verify_checkpoint(folder + "/step_00000030"), Contains("no MANIFEST.json"));
  folder = trials.fresh();
  io::remove_tree(folder + "/step_00000010");
  io::remove_tree(folder + "/step_00000020");
  CHECK_THROWS_WITH(newest_valid_checkpoint(folder),
                    Contains("refusing to start from scratch"));  // LATEST still exists
  io::remove_file(folder + "/LATEST");
  CHECK(newest_valid_checkpoint(folder).path.empty());
  CHECK_THROWS_AS(verify_checkpoint(folder + "/absent"), Error);
}

TEST_CASE("a manifest with a valid checksum but wrong content is refused", "[checkpoint][corruption]") {
  Trials trials;
  const std::string folder = trials.fresh() + "/step_00000020";
  const Manifest good = read_manifest(folder);
  const auto attempt = [&](auto&& change) {
    Manifest manifest = good;
    change(manifest);
    write_over(folder + "/MANIFEST.json", manifest.text());
  };
  for (const char* name :
       {"../model.safetensors", "/etc/passwd", "", ".", "..", ".hidden", "a/b", "a b", "MANIFEST.json"}) {
    attempt([&](Manifest& m) { m.files[0].name = name; });
    CHECK_THROWS_WITH(verify_checkpoint(folder), Contains("cannot be a file of a checkpoint"));
  }
  attempt([](Manifest& m) { m.files[0].name = std::string(129, 'a'); });
  CHECK_THROWS_WITH(verify_checkpoint(folder), Contains("cannot be a file"));
  attempt([](Manifest& m) { m.files.pop_back(); });
  CHECK_THROWS_WITH(verify_checkpoint(folder), Contains("names no config.json"));
  attempt([](Manifest& m) { m.files.push_back(m.files[0]); });
  CHECK_THROWS_WITH(verify_checkpoint(folder), Contains("is listed twice"));
  attempt([](Manifest& m) { m.step = 19; });
  CHECK_THROWS_WITH(verify_checkpoint(folder), Contains("MANIFEST.json: of step 19, in"));
  attempt([](Manifest& m) { m.tensors.pop_back(); });
  CHECK_THROWS_WITH(verify_checkpoint(folder), Contains("the manifest says"));
  attempt([](Manifest& m) { m.tensors[0].shape[0] = 99; });
  CHECK_THROWS_WITH(verify_checkpoint(folder), Contains("differs from the one in the manifest"));
  attempt([](Manifest& m) { m.tensors[0].xxh3_128[0] ^= 1; });
  Toy toy(20);
  CheckpointContent content = toy.content();
  CHECK_THROWS_WITH(load_checkpoint(folder, content.weights, content.optimizer), Contains("as read differs"));
  attempt([](Manifest&) {});
  CHECK_NOTHROW(verify_checkpoint(folder));
}

TEST_CASE("a save can keep all older checkpoints, and a guarded folder is not changed", "[checkpoint]") {
  Trials trials;
  const std::string folder = trials.fresh();
  Toy third(30), fourth(40);
  CheckpointStore store(folder, config_of(false, 1), third.content());
  store.save(third.content(), /*keep_all=*/true);
  CHECK(steps_in(folder) == std::vector<int64_t>{30, 20, 10});
  store.set_guard([] { fail(ExitCode::cannot_create, "not ours"); });
  io::make_directories(folder + "/.staging-of-another");
  store.save(fourth.content());
  CHECK_THAT(store.last_error(), Contains("not ours"));
  CHECK(io::exists(folder + "/.staging-of-another"));
  CHECK(steps_in(folder) == std::vector<int64_t>{30, 20, 10});
  store.set_guard([] {});
  store.save(fourth.content());
  CHECK(steps_in(folder) == std::vector<int64_t>{40});
}

TEST_CASE("only what saves leave behind is removed, and only in the run's own folder", "[checkpoint]") {
  const TempFolder folder;
  const std::string victim = folder / "victim", run = folder / "run";
  for (const std::string& place : {victim, run + "/ckpt"})
    for (const char* name : {"/notes.tmp", "/mine.tmp/deep", "/.trash-step_00000010", "/.staging-1"})
      io::make_directories(place + name);
  Toy toy(20);
  { const CheckpointStore store(run + "/ckpt", config_of(false), toy.content()); }
  CHECK(io::list_directory(run + "/ckpt") == std::vector<std::string>{"mine.tmp", "notes.tmp"});
  const std::vector<std::string> before = io::list_directory(victim);
  std::filesystem::create_directory_symlink(victim, run + "/linked");
  CHECK_THROWS_WITH(CheckpointStore(run + "/linked", config_of(false), toy.content()),
                    Contains("is a symbolic link") && Contains("run_dir"));
  remove_litter(run + "/linked");  // as a training's start does before it saves
  CHECK(io::list_directory(victim) == before);
}

TEST_CASE("non-finite values are not saved", "[checkpoint]") {
  Trials trials;
  const std::string folder = trials.fresh();
  for (const bool async : {false, true}) {
    Toy toy(30);
    CheckpointStore store(folder, config_of(async), toy.content());
    const auto refused = [&](const char* name) {
      store.save(toy.content());
      CHECK_FALSE(store.wait());
      CHECK_THAT(store.last_error(), Contains("not finite") && Contains(name));
      CHECK(newest(folder).step == 20);
      toy = Toy(30);
    };
    toy.weight.back() = std::numeric_limits<float>::infinity();
    refused("model.embed_tokens.weight");
    toy.narrow[2] = bf16(-std::numeric_limits<float>::infinity());
    refused("model.layers.0.x");
    toy.norm[0] = std::nanf("");
    refused("model.norm.weight");
    toy.wide[1] = std::nan("");
    refused("model.norm.weight.v");
  }
  Toy toy(30);
  toy.weight[0] = std::numeric_limits<float>::max();
  CHECK(save(folder, toy, true));
  CHECK(newest(folder).step == 30);
}

TEST_CASE("rotation keeps the latest and every n-th checkpoint, and counts only valid ones", "[checkpoint]") {
  Trials trials;
  {
    const TempFolder folder;
    Toy toy(0);
    CheckpointStore store(folder / "ckpt", config_of(true, 2, 30), toy.content());
    for (int64_t step = 10; step <= 100; step += 10) {
      toy = Toy(step);
      store.save(toy.content());
    }
    REQUIRE(store.wait());
    CHECK(steps_in(folder / "ckpt") == std::vector<int64_t>{100, 90, 60, 30});
    CHECK(prune_checkpoints(folder / "ckpt", 1).size() == 3);
    CHECK(steps_in(folder / "ckpt") == std::vector<int64_t>{100});
  }
  std::string folder = trials.fresh();
  io::remove_file(folder + "/step_00000020/state.json");
  REQUIRE(save(folder, Toy(30)));
  CHECK(steps_in(folder) == std::vector<int64_t>{30, 20, 10});  // 20 is damaged: 10 must stay
  REQUIRE(save(folder, Toy(40)));
  CHECK(steps_in(folder) == std::vector<int64_t>{40, 30});
  // A run that restarted from an older step: its latest save is kept although newer steps exist.
  REQUIRE(save(folder, Toy(15), false, 1));
  CHECK(steps_in(folder) == std::vector<int64_t>{40, 15});
}

TEST_CASE("names of step folders", "[checkpoint]") {
  CHECK(step_folder_name(1200) == "step_00001200");
  CHECK(step_folder_name(123456789012) == "step_123456789012");
  CHECK(step_of_folder_name("step_123456789012") == 123456789012);
  for (const char* name : {"step_", "step_1", "step_0000120", "step_000001200", "step_0000120x",
                           "step_00001200.tmp", ".staging-step_00001200", "step_99999999999999999999"})
    CHECK(step_of_folder_name(name) == -1);
}
