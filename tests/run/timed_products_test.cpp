// Algorithms of products are timed before the first step, kept in the run's folder, and used again: by a
// resumed run, by all ranks, and by a run into whose folder the file was copied. On a GPU, real or emulated.
#include "run/timed_products.h"

#include <catch2/catch.hpp>
#include <filesystem>
#include <mutex>

#include "comm/collective_errors.h"
#include "comm/threads.h"
#include "core/io.h"
#include "run/algorithms_file.h"
#include "run/run.h"
#include "support/gpu.h"
#include "support/steps.h"
#include "support/tiny_training.h"
#if defined(SLUICE_EMULATION)
#include "fake_cublaslt.h"
#endif

namespace sluice::test {
namespace {

using Catch::Matchers::Contains;

const GpuProduct kSmall{.m = 16, .n = 24, .k = 32};
const GpuProduct kAdding{
    .in = DType::bf16, .m = 24, .n = 16, .k = 32, .a_transposed = true, .accumulate = true};

/// A run folder and what is kept there.
struct Choices {
  TemporaryFolder folder;
  Config config;
  std::string run = folder / "run", file = run + "/" + kAlgorithmsFile;

  TimedProducts choose(const std::set<GpuProduct>& products) const {
    RunFolder owned(run);
    owned.keep();
    const std::unique_ptr<Communicator> alone = make_local_communicator();
    return choose_algorithms(&owned, config, products, *alone);
  }
  std::vector<CardAlgorithms> kept() const { return read_algorithms(io::read_file(file), file); }
  /// Writes the file as if it were of another card.
  void move_to_other_card() const {
    std::vector<CardAlgorithms> cards = kept();
    cards[0].card.name = "another card";
    io::write_file_atomic(file, algorithms_text(cards));
  }
};

bool timed(const TimedProducts& chosen) { return chosen.text.find("timed in") != std::string::npos; }

bool same(const ProductAlgorithms& a, const ProductAlgorithms& b) {
  return algorithms_text({{{}, a}}) == algorithms_text({{{}, b}});
}

/// A training by its configuration file, in a folder of its own.
struct TrainingRun : TinyTraining {
  TrainingRun() : TinyTraining(Precision::bf16) {
    write_corpus(folder / "train", 5000, 257);  // the byte tokenizer's words
    config.model.vocab_size = 257;
    config.train.device = DeviceChoice::cuda;
    config.train.max_steps = 4;
    config.train.global_batch_size = 2;
    config.data.validation.clear();
    config.optimizer.warmup_steps = 0;
    config.optimizer.schedule = Schedule::constant;  // so that steps do not depend on their number
    config.log.bits = 1;
    config.log.console = ConsoleMode::none;
    config.log.tensorboard = false;
    config.checkpoint.every_minutes = 0;
  }
  /// Trains so many steps in all, or goes on; returns the exact bits of all steps so far.
  std::string train(const std::string& name, const std::vector<std::string>& more = {}) {
    config.run_dir = folder / name;
    const std::string path = folder / (name + ".yaml");
    io::write_file_atomic(path, to_yaml(config));
    RunOptions options;
    options.config_path = path;
    options.overrides = more;
    options.allow_change = {"train.max_steps"};
    REQUIRE(run_training(options) == ExitCode::ok);
    return io::read_file(config.run_dir + "/bits.log");
  }
  std::string choices(const std::string& name) const { return folder / (name + "/" + kAlgorithmsFile); }
};

}  // namespace

TEST_CASE("the file of algorithms keeps them, and any damage is an error", "[matmul_algorithms]") {
  ProductAlgorithm algorithm{.us = 1.25, .heuristic_us = 1.5, .bits_repeat = false};
  for (size_t i = 0; i < algorithm.words.size(); ++i) algorithm.words[i] = 0x0123456789abcdef * (i + 1);
  const ProductCard card{"a \"card\"", 90, 132, 130002};
  const std::string text = algorithms_text({{card, {{{kSmall, algorithm}, {kAdding, algorithm}}}}});
  const std::vector<CardAlgorithms> back = read_algorithms(text, "file");
  REQUIRE(back.size() == 1);
  CHECK(back[0].card == card);
  const ProductAlgorithm* const found = back[0].algorithms.find(kAdding);
  REQUIRE(found);
  CHECK(found->words == algorithm.words);
  CHECK(algorithms_text(back) == text);

  const auto refused = [](const std::string& damaged) {
    try {
      read_algorithms(damaged, "file");
    } catch (const Error& error) {
      return error.code() == ExitCode::data && std::string(error.what()).starts_with("file: ");
    }
    return false;
  };
  for (size_t i = 0; i < text.size(); ++i) {
    INFO(i);
    std::string flipped = text;
    flipped[i] = static_cast<char>(flipped[i] ^ 1);
    CHECK(refused(flipped));
    CHECK(refused(text.substr(0, i)));
  }
}

TEST_CASE("products are timed once, and the file serves later starts", "[matmul_algorithms]") {
  if (no_device()) return;
  const Choices c;
  const TimedProducts first = c.choose({kSmall});
  CHECK(timed(first));
  const std::string text = io::read_file(c.file);
  const TimedProducts second = c.choose({kSmall});
  CHECK_FALSE(timed(second));
  CHECK(same(first.algorithms, second.algorithms));
  CHECK(io::read_file(c.file) == text);

  const TimedProducts more = c.choose({kSmall, kAdding});  // only the other one is timed
  CHECK_THAT(more.text, Contains("1 of 2 products timed"));
  CHECK(same({{*first.algorithms.by_product.begin()}}, {{{kSmall, *more.algorithms.find(kSmall)}}}));
  CHECK(c.kept()[0].algorithms.by_product.size() == 2);
}

TEST_CASE("a file that is damaged, of another card or of another need is timed anew", "[matmul_algorithms]") {
  if (no_device()) return;
  Choices c;
  c.choose({kSmall});
  SECTION("damaged") {
    std::string text = io::read_file(c.file);
    const size_t at = text.rfind("\"algorithm\": \"") + 20;
    text[at] = text[at] == '0' ? '1' : '0';
    io::write_file_atomic(c.file, text);
    CHECK(timed(c.choose({kSmall})));
    CHECK(c.kept().size() == 1);
    CHECK_FALSE(timed(c.choose({kSmall})));
  }
  SECTION("another card, whose algorithms stay in the file") {
    c.move_to_other_card();
    CHECK(timed(c.choose({kSmall})));
    REQUIRE(c.kept().size() == 2);
    CHECK(c.kept()[0].card.name == "another card");
    CHECK_FALSE(timed(c.choose({kSmall})));
  }
  SECTION("another version of the library") {
    std::vector<CardAlgorithms> cards = c.kept();
    ++cards[0].card.library;
    io::write_file_atomic(c.file, algorithms_text(cards));
    CHECK(timed(c.choose({kSmall})));
  }
  SECTION("bits that do not repeat, where they must now") {
    std::vector<CardAlgorithms> cards = c.kept();
    cards[0].algorithms.by_product[kSmall].bits_repeat = false;
    io::write_file_atomic(c.file, algorithms_text(cards));
    c.config.train.deterministic = false;
    CHECK_FALSE(timed(c.choose({kSmall})));
    c.config.train.deterministic = true;
    CHECK(timed(c.choose({kSmall})));
  }
  SECTION("the algorithm of another product") {
    if (!cuda_devices()[0].emulated) return;  // a real library may take it
    std::vector<CardAlgorithms> cards = c.kept();
    cards[0].algorithms.by_product[kAdding] = cards[0].algorithms.by_product[kSmall];
    io::write_file_atomic(c.file, algorithms_text(cards));
    CHECK_THAT(c.choose({kSmall, kAdding}).text, Contains("1 of 2 products timed"));
  }
}

TEST_CASE("nothing is timed or written without products, with matmul_algorithm heuristic, or exact",
          "[matmul_algorithms]") {
  Choices c;
  CHECK(c.choose({}).algorithms.by_product.empty());
  c.config.train.matmul_algorithm = MatmulAlgorithm::heuristic;
  CHECK(c.choose({kSmall}).algorithms.by_product.empty());
  c.config.train.matmul_algorithm = MatmulAlgorithm::timed;
  c.config.parallel.determinism = Determinism::exact;
  CHECK(c.choose({kSmall}).algorithms.by_product.empty());
  CHECK_FALSE(io::exists(c.file));
}

TEST_CASE("ranks have the same algorithms for the products of all, or the same error",
          "[matmul_algorithms]") {
  if (no_device()) return;
  const Choices c;
  const bool fails = GENERATE(false, true);
  if (fails) io::make_directories(c.file);  // which cannot be replaced by a file
  std::mutex mutex;
  std::vector<std::string> outcomes;
  run_thread_ranks(3, [&](Communicator& ranks) {
    const std::unique_ptr<RunFolder> folder =
        ranks.rank() == 0 ? std::make_unique<RunFolder>(c.run) : nullptr;
    if (folder) folder->keep();
    std::string outcome;
    try {
      outcome = algorithms_text(
          {{{},
            choose_algorithms(folder.get(), c.config, {ranks.rank() == 2 ? kAdding : kSmall}, ranks)
                .algorithms}});
    } catch (const SharedError& error) {
      outcome = error.what();
    }
    const std::scoped_lock lock(mutex);
    outcomes.push_back(outcome);
  });
  REQUIRE(outcomes.size() == 3);
  CHECK(outcomes[0] == outcomes[1]);
  CHECK(outcomes[0] == outcomes[2]);
  if (fails)
    CHECK_THAT(outcomes[0], Contains(kAlgorithmsFile));
  else
    CHECK(c.kept()[0].algorithms.by_product.size() == 2);
}

TEST_CASE("a training repeats its bits with the algorithms of its file, resumed or in another folder",
          "[matmul_algorithms][cuda_training]") {
  if (no_device()) return;
  TrainingRun t;
  const std::string straight = t.train("straight");
  REQUIRE(io::exists(t.choices("straight")));

  // The file goes into the folder of a new run, which stops half way and resumes.
  io::make_directories(t.folder / "copy");
  io::write_file_atomic(t.choices("copy"), io::read_file(t.choices("straight")));
  t.train("copy", {"train.max_steps=2"});
  CHECK(t.train("copy", {"train.max_steps=4"}) == straight);
  CHECK(io::read_file(t.choices("copy")) == io::read_file(t.choices("straight")));

  const std::string heuristic = t.train("heuristic", {"train.matmul_algorithm=heuristic"});
  CHECK_FALSE(io::exists(t.choices("heuristic")));
  if (cuda_devices()[0].emulated) CHECK(heuristic != straight);
}

#if defined(SLUICE_EMULATION)
TEST_CASE("a training's steps have no product that its dry run did not know",
          "[matmul_algorithms][cuda_training]") {
  const std::string variant = GENERATE("gated", "experts", "nanochat", "sparse");
  const Recompute recompute = GENERATE(Recompute::none, Recompute::block);
  INFO(variant);
  TinyTraining t(Precision::bf16);
  t.config.train.device = DeviceChoice::cuda;
  t.config.train.recompute = recompute;
  if (variant == "experts") t.add_experts();
  if (variant == "nanochat") t.make_nanochat();
  if (variant == "sparse") {
    t.config.model.attention.kind = AttentionKind::sparse;
    t.config.model.attention.sparse.phase_steps = 2;
    t.config.model.attention.sparse.indexer.heads = 2;
    t.config.model.attention.sparse.k = {.policy = BudgetPolicy::fixed, .base = 8};
  }
  const Blend data = t.blend();
  const MemoryPlan plan = Trainer::measure(t.config);
  const ProductAlgorithms algorithms = time_products(plan.products, true);
  Trainer trainer(t.config, data, nullptr, plan);
  trainer.context().algorithms = &algorithms;
  trainer.initialize();
  const emu::HeuristicCalls before = emu::heuristic_calls();
  take_steps(trainer, 4);
  CHECK(emu::heuristic_calls().for_one == before.for_one);
}
#endif

}  // namespace sluice::test
