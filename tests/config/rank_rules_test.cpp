// What several ranks cannot do with a configuration is found when it is read, beside every other problem.
#include "config/rank_rules.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>
#include <vector>

#include "config/load.h"
#include "config/scratch.h"
#include "core/error.h"

using namespace sluice;
using Catch::Contains;

namespace {

/// The lines of the message that refuses a configuration, without those that quote the file.
std::vector<std::string> refusal(const std::function<void()>& work) {
  std::vector<std::string> lines;
  try {
    work();
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::usage);
    const std::string text = error.what();
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find('\n', begin), text.size());
      if (text[begin] != ' ') lines.push_back(text.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  return lines;
}

std::vector<std::string> load_problems(const LoadPurpose& purpose,
                                       const std::vector<std::string>& overrides = {}) {
  return refusal([&] { load_config("a.yaml", overrides, nullptr, purpose); });
}

const std::string kUnsound =
    "model:\n"
    "  hidden_size: 24\n"
    "  moe:\n"
    "    num_experts: 8\n"
    "    moe_intermediate_size: 10\n"
    "    load_balance: {scope: global_batch, coefficient: 0.1}\n"
    "train: {global_batch_size: 18, micro_batch_size: 1}\n"
    "optimizer: {lr: 0}\n"
    "parallel:\n"
    "  determinism: exact\n"
    "  expert: 2\n"
    "  exact_sum: tree\n";

}  // namespace

TEST_CASE("rules of ranks are reported at once with every other problem, each at its place",
          "[config][ranks]") {
  const test::ScratchFolder folder;
  folder.write("a.yaml", kUnsound);
  const std::vector<std::string> three = load_problems({.ranks = 3});
  REQUIRE(three.size() == 6);  // and their number
  CHECK(three[0] ==
        "a.yaml:5:5: parallel.determinism: exact with parallel.expert = 2 needs experts of a multiple of 32 "
        "elements; hidden_size x moe_intermediate_size is 24 x 10");
  CHECK_THAT(three[1], Contains("a.yaml:6:20: model.moe.load_balance.scope: global_batch counts"));
  CHECK(three[2] == "a.yaml:8:13: optimizer.lr must be greater than 0, got 0");
  CHECK(three[3] == "a.yaml:11:3: parallel.expert = 2: 3 ranks cannot be divided into groups of that size");
  CHECK(three[4] ==
        "a.yaml:12:3: parallel.exact_sum: tree needs a power of two of micro-batches on every rank; 18 "
        "micro-batches over 3 ranks are 6 each; use fixed64");
  const std::vector<std::string> four = load_problems({.ranks = 4});
  REQUIRE(four.size() == 5);
  CHECK(four[2] ==
        "a.yaml:7:9: train.global_batch_size = 18 is 18 micro-batches of 1, which 4 ranks cannot share "
        "evenly; use a multiple of 4, or another number of ranks");
  CHECK(load_problems({}).size() == 4);  // not known how many: what no number can do
  // Beside what only training needs.
  const std::vector<std::string> training = load_problems({.ranks = 4, .training = true});
  CHECK(training.size() == 7);
  CHECK_THAT(training[0], Contains("a.yaml: the length of training is not given"));
  CHECK_THAT(training[1], Contains("a.yaml: there is no training data"));
}

TEST_CASE("a rule of ranks points at the command line, and is silent on values that cannot be read",
          "[config][ranks]") {
  const test::ScratchFolder folder;
  folder.write("a.yaml", "train: {micro_batch_size: 1}\n");
  CHECK(load_problems({.ranks = 3}, {"train.global_batch_size=8"}) ==
        std::vector<std::string>{
            "command line: train.global_batch_size = 8 is 8 micro-batches of 1, which 3 ranks cannot share "
            "evenly; use a multiple of 3, or another number of ranks"});
  CHECK(load_problems({.ranks = 3}, {"train.global_batch_size=many"}).size() == 1);
  CHECK(load_problems({.ranks = 3}, {"train.global_batch_size=0"}).size() == 1);
  CHECK(load_problems({.ranks = 3}, {"train.global_batch_size=9"}).empty());
}

TEST_CASE("a tree of sums needs groups of a power of two where experts are summed in groups first",
          "[config][ranks]") {
  const test::ScratchFolder folder;
  folder.write(
      "a.yaml",
      "model: {hidden_size: 32, moe: {num_experts: 6, num_experts_per_tok: 2, moe_intermediate_size: 32, "
      "load_balance: {scope: micro_batch}}}\n"
      "train: {micro_batch_size: 1, global_batch_size: 12}\n"
      "parallel: {determinism: exact, exact_sum: tree, expert: 3}\n");
  const std::vector<std::string> refused = load_problems({.ranks = 6});
  REQUIRE(refused.size() == 1);
  CHECK_THAT(refused[0],
             Contains("tree with parallel.zero_stage = 0 sums an expert's gradient within its group of "
                      "parallel.expert = 3 ranks") &&
                 Contains("3 have; use fixed64, or zero_stage 2 or 3"));
  CHECK(load_problems({.ranks = 6}, {"parallel.zero_stage=1"}).size() == 1);
  CHECK(load_problems({.ranks = 12}, {"parallel.expert=6", "parallel.context=2"}).size() == 1);
  CHECK(load_problems({.ranks = 6}, {"parallel.zero_stage=2"}).empty());
  CHECK(load_problems({.ranks = 6}, {"parallel.exact_sum=fixed64"}).empty());
  CHECK(load_problems({.ranks = 6}, {"parallel.determinism=same_layout"}).empty());
  CHECK(load_problems({.ranks = 3}).empty());  // one group: its sum is the whole tree
  CHECK(load_problems({.ranks = 12}, {"parallel.expert=2"}).empty());
}

TEST_CASE("a micro-batch has no more rows than are counted in 32 bits, here and received",
          "[config][ranks]") {
  const test::ScratchFolder folder;
  folder.write("a.yaml", "train: {micro_batch_size: 4, global_batch_size: 32}\n");
  const auto first = [](const std::vector<std::string>& lines) -> std::string {
    return lines.empty() ? "" : lines[0];
  };
  CHECK(first(load_problems({}, {"data.seq_len=536870912"})) ==
        "a.yaml:1:9: train.micro_batch_size = 4 samples of data.seq_len = 536870912 tokens are more than the "
        "2147483647 that a micro-batch may hold");
  CHECK(load_problems({}, {"data.seq_len=536870911"}).empty());
  for (const char* gate : {"input: none", "bias: 0.1"}) {
    const std::string gates = fmt::format("model.attention.gates=[{{position: sdpa_output, {}}}]", gate);
    CHECK_THAT(first(load_problems({}, {gates, "data.seq_len=1", "train.micro_batch_size=1"})),
               Contains("micro-batches of at least two tokens"));
    CHECK(load_problems({}, {gates, "data.seq_len=2", "train.micro_batch_size=1"}).empty());
  }
  const std::string moe = "model.moe={num_experts: 8, num_experts_per_tok: 2}";
  CHECK(load_problems({}, {moe, "data.seq_len=268435455"}).empty());
  CHECK_THAT(first(load_problems({}, {moe, "data.seq_len=268435456"})),
             Contains("each to 2 experts, are more than the 2147483647 rows"));
  CHECK(load_problems({.ranks = 8}, {moe, "parallel.expert=8", "data.seq_len=100000000"}).empty());
  CHECK_THAT(first(load_problems({.ranks = 8}, {moe, "parallel.expert=8", "data.seq_len=100000000",
                                                "parallel.expert_capacity=3"})),
             Contains("parallel.expert_capacity = 3 gives a receive buffer of 2400000000 rows"));
  // Ranks that share sequences have a part of the tokens each, but exact's backward sends those of whole
  // ones.
  std::vector<std::string> shared = {moe, "parallel.expert=8", "data.seq_len=100000000",
                                     "parallel.expert_capacity=3", "parallel.context=2"};
  CHECK(load_problems({.ranks = 8}, shared).empty());
  shared.insert(shared.end(), {"parallel.determinism=exact", "model.moe.load_balance.scope=micro_batch"});
  CHECK_THAT(first(load_problems({.ranks = 8}, shared)),
             Contains("parallel.expert_capacity = 3 gives a receive buffer of 2400000000 rows"));
}

TEST_CASE("experts whose width is yet to be matched are checked when it is known", "[config][ranks]") {
  const test::ScratchFolder folder;
  folder.write("other.yaml", "model: {}\n");
  folder.write("a.yaml",
               "model:\n"
               "  match_parameters_of: other.yaml\n"
               "  hidden_size: 24\n"
               "  moe: {num_experts: 8, moe_intermediate_size: 10, load_balance: {scope: micro_batch}}\n"
               "parallel: {determinism: exact, expert: 2}\n");
  KeyPlaces places;
  Config config = load_config("a.yaml", {}, &places, {.ranks = 2});
  CHECK_NOTHROW(require_rank_rules(config, 2, places));
  config.model.match_parameters_of.clear();
  CHECK(refusal([&] { require_rank_rules(config, 2, places); }) ==
        std::vector<std::string>{"a.yaml:4:25: parallel.determinism: exact with parallel.expert = 2 needs "
                                 "experts of a multiple of 32 elements; hidden_size x moe_intermediate_size "
                                 "is 24 x 10"});
  config.model.moe.moe_intermediate_size = 12;
  CHECK_NOTHROW(require_rank_rules(config, 2, places));
  config.model.moe.moe_intermediate_size = 32;
  config.model.moe.bias = true;  // of 24 elements, so that a block of 32 would hold those of two experts
  CHECK(refusal([&] { require_rank_rules(config, 2, places); }) ==
        std::vector<std::string>{"a.yaml:4:25: parallel.determinism: exact with parallel.expert = 2 needs "
                                 "experts whose biases have multiples of 32 elements; hidden_size is 24 and "
                                 "moe_intermediate_size 32"});
  config.model.moe.bias = false;
  CHECK_NOTHROW(require_rank_rules(config, 2, places));
  // Made in memory, without places; every problem at once.
  config.parallel.expert = 4;
  config.model.moe.moe_intermediate_size = 10;
  config.train.global_batch_size = 9;
  config.train.micro_batch_size = 1;
  const std::vector<std::string> lines = refusal([&] { require_rank_rules(config, 2); });
  REQUIRE(lines.size() == 3);
  CHECK_THAT(lines[0], Contains("2 ranks cannot be divided into groups of that size"));
  CHECK_THAT(lines[2], Contains("which 2 ranks cannot share evenly"));
}
