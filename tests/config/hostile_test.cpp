// Configurations built to be slow or deeply nested, absurd numbers, and common first mistakes.
#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <functional>

#include "config/load.h"
#include "config/scratch.h"
#include "core/error.h"
#include "core/utf8.h"

using namespace sluice;

namespace {

std::string refusal(const std::string& path, const std::vector<std::string>& overrides = {}) {
  try {
    load_config(path, overrides);
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::usage);
    return error.what();
  }
  return "";
}

double seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

TEST_CASE("a file that many files extend is read once", "[hostile]") {
  const test::ScratchFolder scratch;
  constexpr int kFiles = 26;
  for (int i = 0; i < kFiles; ++i)
    scratch.write("d" + std::to_string(i) + ".yaml",
                  "extends: [d" + std::to_string(i + 1) + ".yaml, d" + std::to_string(i + 1) + ".yaml]\n");
  scratch.write("d26.yaml", "train: {seed: 7}\n");
  Config config;
  CHECK(seconds([&] { config = load_config("d0.yaml"); }) < 10);  // 2^26 files took days
  CHECK(config.train.seed == 7);
  scratch.write("left.yaml", "extends: d26.yaml\noptimizer: {lr: 0.5}\n");
  scratch.write("right.yaml", "extends: d26.yaml\ntrain: {seed: 8}\n");
  scratch.write("both.yaml", "extends: [right.yaml, left.yaml]\n");
  CHECK(load_config("both.yaml").train.seed == 7);
  CHECK(load_config("both.yaml").optimizer.lr == 0.5);
}

TEST_CASE("the length of an extends chain is limited", "[hostile]") {
  const test::ScratchFolder scratch;
  for (int i = 0; i < 100; ++i)
    scratch.write("c" + std::to_string(i) + ".yaml", "extends: c" + std::to_string(i + 1) + ".yaml\n");
  scratch.write("c100.yaml", "train: {seed: 7}\n");
  CHECK_THAT(refusal("c0.yaml"), Catch::Contains("c63.yaml:1:") && Catch::Contains("65th file of a chain"));
  CHECK(load_config("c37.yaml").train.seed == 7);
}

TEST_CASE("of thousands of mistakes, fifty are shown and the rest counted", "[hostile]") {
  const test::ScratchFolder scratch;
  std::string keys, sources = "data:\n  train: [";
  for (int i = 0; i < 900; ++i) keys += "key_" + std::to_string(i) + ": 1\n";
  scratch.write("keys.yaml", keys);
  std::string message;
  CHECK(seconds([&] { message = refusal("keys.yaml"); }) < 5);
  CHECK_THAT(message, Catch::Contains("unknown key key_0") && Catch::Contains("key_49") &&
                          Catch::Contains("... and 850 more") && Catch::Contains("900 problems"));
  CHECK_THAT(message, !Catch::Contains("key_50\n"));
  for (int i = 900; i < 60000; ++i) keys += "key_" + std::to_string(i) + ": 1\n";
  scratch.write("keys.yaml", keys);
  CHECK(seconds([&] { message = refusal("keys.yaml"); }) < 5);
  CHECK_THAT(message, Catch::Contains("keys.yaml:1001:1: more than 1000 keys in one section"));

  for (int i = 0; i < 40000; ++i) sources += "{},";
  scratch.write("list.yaml", sources + "]\n");
  CHECK(seconds([&] { message = refusal("list.yaml"); }) < 20);
  CHECK_THAT(message, Catch::Contains("data.train[0] needs a name"));
}

TEST_CASE("absurd numbers are reported before anything is computed from them", "[hostile]") {
  const test::ScratchFolder scratch;
  scratch.write("a.yaml", "train: {micro_batch_size: 2, global_batch_size: 2}\n");
  CHECK_THAT(refusal("a.yaml", {"train.max_steps=1000000000000000000"}),
             Catch::Contains("more tokens than can be counted"));
  CHECK_THAT(refusal("a.yaml", {"train.global_batch_size=9223372036854775807"}),
             Catch::Contains("global_batch_size is too large"));
  CHECK_THAT(refusal("a.yaml", {"model.num_hidden_layers=100000"}),
             Catch::Contains("num_hidden_layers = 100000 is above the 10000"));
}

TEST_CASE("numbers at the ends of their range are refused without an overflow", "[hostile]") {
  // A sanitizer's build sees the overflow itself; here the messages must not be computed from it.
  const test::ScratchFolder scratch;
  scratch.write("a.yaml", "");
  const std::string most = "9223372036854775807", least = "-9223372036854775808";
  const auto refused = [&](const std::vector<std::string>& overrides, const std::string& message) {
    const std::string text = refusal("a.yaml", overrides);
    CHECK_THAT(text, Catch::Contains(message));
    return text;
  };
  const std::string heads = "model.attention.switch_heads.";
  CHECK_THAT(refused({"model.head_dim=9223372036854775806", heads + "num_experts=4",
                      heads + "expert_width=4611686018427387903"},
                     "model.head_dim is too large"),
             !Catch::Contains("experts never write"));
  CHECK_THAT(refused({heads + "num_experts=4294967296", heads + "expert_width=4294967296"},
                     "num_experts is too large"),
             !Catch::Contains("experts never write"));
  CHECK_THAT(refused({"model.attention.head_balance.coefficient=1",
                      "model.attention.head_balance.shared_heads=" + least},
                     "shared_heads must not be negative"),
             !Catch::Contains("leaves fewer than 2"));
  CHECK_THAT(refused({"model.moe.num_experts=4", "model.moe.num_experts_per_tok=2",
                      "model.moe.mlp_only_layers=[0]", "model.num_hidden_layers=" + least},
                     "num_hidden_layers must be at least 1"),
             !Catch::Contains("layers are 0 to"));
  CHECK_THAT(refused({"train.max_steps=10", "optimizer.schedule=wsd", "optimizer.warmup_steps=" + least},
                     "warmup_steps must not be negative"),
             !Catch::Contains("do not fit into the run"));
  CHECK_THAT(refused({"train.max_steps=10", "optimizer.schedule=wsd", "optimizer.decay_steps=" + most},
                     "do not fit into the run"),
             !Catch::Contains("warmup_steps must"));
}

TEST_CASE("common first mistakes on the command line are accepted or explained", "[hostile]") {
  const test::ScratchFolder scratch;
  scratch.write("a.yaml", "");
  CHECK(load_config("a.yaml", {"optimizer.lr", "=", "0.5", "train.seed=", "9", "name", "=x"}).optimizer.lr ==
        0.5);
  CHECK(load_config("a.yaml", {"optimizer.lr", "=", "0.5", "train.seed=", "9", "name", "=x"}).train.seed ==
        9);
  CHECK(load_config("a.yaml", {"optimizer.lr", "=", "0.5", "train.seed=", "9", "name", "=x"}).name == "x");
  // An empty value is not filled from the next argument.
  CHECK_THAT(refusal("a.yaml", {"run_dir=", "train.seed=9"}),
             Catch::Contains("run_dir= has no value; give one, or run_dir=null for the default"));
  CHECK_THAT(refusal("a.yaml", {"optimizer.lr", "0.5"}), Catch::Contains("optimizer.lr is not key=value"));
  CHECK_THAT(refusal("a.yaml", {"train.device=gpu"}), Catch::Contains("did you mean cuda?"));
}

TEST_CASE("text that is not UTF-8 is refused with its position", "[hostile]") {
  const test::ScratchFolder scratch;
  scratch.write("a.yaml", "train: {seed: 1}\nname: b\xff\n");
  CHECK_THAT(refusal("a.yaml"), Catch::Contains("a.yaml:2:1: byte 0xff is not UTF-8"));
  scratch.write(
      "od\xff"
      "d.yaml",
      "train: {seed: 1}\n");
  CHECK_THAT(refusal("od\xff"
                     "d.yaml"),
             Catch::Contains("od\\xffd is not UTF-8 and cannot name the run") ||
                 Catch::Contains("od\\xffd, is not UTF-8"));
  CHECK(refusal("od\xff"
                "d.yaml",
                {"name=good"})
            .empty());
  scratch.write("a.yaml", "");
  CHECK_THAT(refusal("a.yaml", {"name=b\xff"}), Catch::Contains("command line: byte 0xff is not UTF-8"));
}

TEST_CASE("messages escape what a terminal would interpret", "[hostile]") {
  const test::ScratchFolder scratch;
  scratch.write("a.yaml", "");
  const auto has_control = [](const std::string& text) {
    return std::any_of(text.begin(), text.end(), [](char c) {
      return (static_cast<unsigned char>(c) < 0x20 && c != '\n') || c == 0x7f;
    });
  };
  for (const char* override :
       {"data.\xf4rain[0].weight=2", "data.train\x1b[0]=2", "data.train\x1b.a=2",
        R"(data.train=[{name: "\x1b[31m", path: a}, {name: "\x1b[31m", path: a}])", R"(name="\x1b[31m/")"}) {
    const std::string text = refusal("a.yaml", {override});
    INFO(text);
    CHECK(!text.empty());
    CHECK(!has_control(text));
    CHECK(find_invalid_utf8(text) == std::string::npos);
  }
  CHECK_THAT(refusal("a.yaml", {"data.\xf4rain[0].weight=2"}),
             Catch::Contains("data.\\xf4rain[0] does not exist"));
  scratch.write("a.yaml", "name: \u00e4/\n");  // text that can be shown is shown
  CHECK_THAT(refusal("a.yaml"), Catch::Contains("\u00e4/"));
}

TEST_CASE("a run folder given as a configuration is refused with the path of its configuration",
          "[hostile]") {
  const test::ScratchFolder scratch;
  scratch.write("runs/a/config.yaml", "");
  CHECK_THAT(refusal("runs/a"), Catch::Contains("runs/a/config.yaml"));
}
