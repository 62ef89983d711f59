// Every sample is seen once and in order, for any interruptions and any number of ranks after each restart.
#include <algorithm>
#include <catch2/catch.hpp>
#include <random>

#include "comm/threads.h"
#include "config/derived.h"
#include "data/temporary.h"
#include "support/rank_loader.h"

using namespace sluice;

namespace {

constexpr int64_t kSeqLen = 3, kChunks = 20011,
                  kDigits = 64;  // a sample contains its own index: three digits in base 64

/// A source whose samples contain their own indices.
void write_numbers(const std::string& prefix, int64_t first) {
  std::vector<int32_t> document;
  for (int64_t i = 0; i < kChunks; ++i)
    for (const int64_t unit : {kDigits * kDigits, kDigits, int64_t{1}})
      document.push_back(static_cast<int32_t>((first + i) / unit % kDigits));
  document.push_back(0);
  test::write_tokens(prefix, {document}, kDigits);
}

struct Stream {
  test::TemporaryFolder folder;
  Config config;

  Stream() {
    write_numbers(folder / "a", 0);
    write_numbers(folder / "b", kChunks);
    config.data.seq_len = kSeqLen;
    config.data.train = {{"a", folder / "a", 0.7}, {"b", folder / "b", 0.3}};
    config.train.micro_batch_size = 2;
    config.train.global_batch_size = 2 * 840;  // divisible by every number of ranks up to 8
  }
  Blend blend() const { return Blend(config.data.train, kSeqLen, kDigits, false, 5); }
  /// The numbers that the tokens of samples say.
  static void numbers(const int32_t* tokens, int64_t samples, int64_t* out) {
    for (int64_t i = 0; i < samples; ++i) {
      int64_t number = 0;
      for (int64_t k = 0; k < kSeqLen; ++k) number = number * kDigits + *tokens++;
      out[i] = number;
    }
  }
  /// The numbers of all samples of a step, in the order of the data themselves.
  void whole_step(const Blend& data, int64_t step, int64_t* out) const {
    const int64_t batch = config.train.global_batch_size;
    std::vector<int32_t> tokens(static_cast<size_t>(batch * kSeqLen)), targets = tokens, positions = tokens,
                                                                       first_key = tokens;
    data.fill(first_sample(config, step, 0), batch, tokens.data(), targets.data(), positions.data(),
              first_key.data());
    numbers(tokens.data(), batch, out);
  }
  /// Steps [first, last) as `ranks` ranks read them after a start: rank by rank, each its share of the batch.
  void train(int ranks, int64_t first, int64_t last, int64_t* out) const {
    const Blend data = blend();
    const int64_t batch = config.train.global_batch_size, share = batch / ranks;
    run_thread_ranks(ranks, [&](Communicator& world) {
      test::RankLoader loader(config, data, world);
      for (int64_t step = first; step < last; ++step) {
        loader.samples.load(loader.ctx, step);
        numbers(loader.tokens(step).data(), share, out + step * batch + world.rank() * share);
      }
    });
  }
};

}  // namespace

TEST_CASE("a million samples over fifty interruptions: none lost, repeated or reordered", "[faults]") {
  const Stream t;
  const int64_t batch = t.config.train.global_batch_size, steps = (1'000'000 + batch - 1) / batch,
                total = steps * batch;
  // The order of the data, which knows of no ranks and no starts.
  std::vector<int64_t> whole(static_cast<size_t>(total)), trained(whole.size(), -1);
  const Blend data = t.blend();
  for (int64_t s = 0; s < steps; ++s) t.whole_step(data, s, whole.data() + s * batch);

  std::mt19937 random(11);
  std::vector<int64_t> kills;
  for (int i = 0; i < 50; ++i)
    kills.push_back(1 + static_cast<int64_t>(random() % static_cast<uint64_t>(steps - 1)));
  std::sort(kills.begin(), kills.end());
  kills.push_back(steps);
  constexpr int64_t kSaveEvery = 5;
  int64_t saved = 0;  // steps done in the newest checkpoint, the only state of a restart
  for (const int64_t kill : kills) {
    const int ranks = 1 + static_cast<int>(random() % 8);
    // The samples of a lost step are discarded with its weights, and read again.
    t.train(ranks, saved, kill, trained.data());
    saved = kill / kSaveEvery * kSaveEvery;
  }
  CHECK(trained == whole);

  // The stream itself: of every source, every epoch is each of its samples once.
  std::vector<std::vector<int64_t>> by_source(2);
  for (const int64_t number : whole) by_source[number < kChunks ? 0 : 1].push_back(number % kChunks);
  for (const std::vector<int64_t>& numbers : by_source)
    for (size_t epoch = 0; (epoch + 1) * kChunks <= numbers.size(); ++epoch) {
      std::vector<bool> seen(kChunks, false);
      for (size_t i = 0; i < kChunks; ++i) seen[static_cast<size_t>(numbers[epoch * kChunks + i])] = true;
      CHECK(std::count(seen.begin(), seen.end(), true) == kChunks);
    }
}
