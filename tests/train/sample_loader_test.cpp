// The samples of a step: which rank reads which, how they are counted, and what happens where some are bad.
#include "train/sample_loader.h"

#include <catch2/catch.hpp>
#include <fstream>
#include <mutex>

#include "comm/collective_errors.h"
#include "comm/threads.h"
#include "config/derived.h"
#include "core/targets.h"
#include "support/rank_loader.h"
#include "support/tiny_training.h"

using namespace sluice;
using namespace sluice::test;
using Catch::Contains;

TEST_CASE("ranks read the global batch in order, and count all of its targets", "[sample_loader]") {
  TinyTraining t;
  t.config.train.global_batch_size = 8;
  t.config.data.document_mask = true;  // so that not every token is a target
  const Blend data = t.blend();
  const auto alone = make_local_communicator();
  RankLoader one(t.config, data, *alone);
  std::mutex mutex;
  std::map<int, std::vector<int32_t>> parts;
  for (const int64_t step : {0, 3}) {
    one.samples.load(one.ctx, step);
    const int64_t targets = one.samples.counted_tokens(step);
    CHECK(targets > 0);
    CHECK(targets < tokens_per_step(t.config));
    parts.clear();
    run_thread_ranks(2, [&](Communicator& world) {
      RankLoader mine(t.config, data, world);
      mine.samples.load(mine.ctx, step);
      const std::scoped_lock lock(mutex);
      parts[world.rank()] = mine.tokens(step);
      if (mine.samples.counted_tokens(step) != targets) throw std::runtime_error("another number of targets");
    });
    std::vector<int32_t> all = parts[0];
    all.insert(all.end(), parts[1].begin(), parts[1].end());
    CHECK(all == one.tokens(step));
  }
}

TEST_CASE("padding behind packed documents is no target that counts", "[sample_loader]") {
  TinyTraining t;
  write_tokens(t.folder / "train", std::vector(40, std::vector<int32_t>(20, 3)), 32);
  t.config.data.packing = Packing::documents;
  t.config.data.seq_len = 24;  // room for one document
  const Config& c = t.config;
  const Blend data(c.data.train, c);
  const auto alone = make_local_communicator();
  RankLoader one(t.config, data, *alone);
  const int64_t rows = c.train.global_batch_size, T = c.data.seq_len;
  int64_t padded = 0;
  for (const int64_t step : {0, 1, 2, 3}) {
    one.samples.load(one.ctx, step);
    std::vector<int32_t> tokens(static_cast<size_t>(rows * T)), targets(tokens), positions(tokens),
        first(tokens);
    data.fill(step * rows, rows, tokens.data(), targets.data(), positions.data(), first.data());
    padded += std::count(targets.begin(), targets.end(), kPadding);
    CHECK(one.samples.counted_tokens(step) ==
          std::count_if(targets.begin(), targets.end(), [](int32_t target) { return target >= 0; }));
  }
  CHECK(padded > 0);
}

TEST_CASE("ranks off the data axis read the same samples, which count once", "[sample_loader]") {
  TinyTraining t;
  const Blend data = t.blend();
  const auto alone = make_local_communicator();
  RankLoader one(t.config, data, *alone);
  one.samples.load(one.ctx, 2);
  run_thread_ranks(2, [&](Communicator& world) {
    RankLoader mine(t.config, data, world, {.tensor = 2});
    mine.samples.load(mine.ctx, 2);
    if (mine.tokens(2) != one.tokens(2) || mine.samples.counted_tokens(2) != one.samples.counted_tokens(2))
      throw std::runtime_error("other samples, or another number of them");
  });
}

TEST_CASE("bad samples of one rank are an error of all, and are found again", "[sample_loader]") {
  TinyTraining t;
  const Blend good = t.blend();
  Config small = t.config;
  small.model.vocab_size = 4;  // most tokens are outside of it
  const Blend bad(small.data.train, small.data.seq_len, small.model.vocab_size, false, small.train.seed);
  std::mutex mutex;
  std::vector<std::string> errors;
  run_thread_ranks(2, [&](Communicator& world) {
    RankLoader mine(t.config, world.rank() == 1 ? bad : good, world);
    mine.samples.load_ahead(mine.ctx, 1);
    try {
      mine.samples.load(mine.ctx, 1);
    } catch (const SharedError& error) {
      const std::scoped_lock lock(mutex);
      errors.push_back(error.what());
    }
  });
  REQUIRE(errors.size() == 2);
  for (const std::string& error : errors)
    CHECK_THAT(error, Contains("rank 1: ") && Contains("outside the vocabulary of 4"));
}

TEST_CASE("a step is read once, and again after its samples were forgotten", "[sample_loader]") {
  TinyTraining t;
  const Blend data = t.blend();
  const auto alone = make_local_communicator();
  RankLoader mine(t.config, data, *alone);
  mine.samples.load(mine.ctx, 0);
  const std::vector<int32_t> read = mine.tokens(0);
  int32_t* first = mine.samples.micro_batch(0, 0).as<int32_t>();
  *first = -7;
  mine.samples.load(mine.ctx, 0);
  CHECK(*first == -7);
  mine.samples.forget();
  mine.samples.load(mine.ctx, 0);
  CHECK(mine.tokens(0) == read);
}
