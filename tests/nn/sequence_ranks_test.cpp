// Ranks that share sequences: which tokens each has, and what is gathered and summed between them.
#include "nn/sequence_ranks.h"

#include <catch2/catch.hpp>
#include <mutex>
#include <set>
#include <stdexcept>

#include "comm/threads.h"
#include "support/gradcheck.h"

using namespace sluice;
using namespace sluice::test;

TEST_CASE(
    "head and tail of a sequence: every token has one rank, every rank the same number of visible pairs",
    "[context]") {
  for (const int64_t ranks : {2, 3, 4}) {
    std::set<int64_t> places, pairs;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const SequenceSplit split{.ranks = ranks, .rank = rank, .seq_len = 24};
      int64_t visible = 0;
      for (int64_t i = 0; i < split.length(); ++i) {
        places.insert(split.place(i));
        visible += split.place(i) + 1;
        if (i > 0) CHECK(split.place(i) > split.place(i - 1));
      }
      pairs.insert(visible);
    }
    CHECK(places.size() == 24);
    CHECK(*places.begin() == 0);
    CHECK(*places.rbegin() == 23);
    CHECK(pairs.size() == 1);
  }
}

TEST_CASE("a rank's part of a sample keeps targets, positions and how far its document goes back",
          "[context]") {
  // Documents of 3, 1 and 4 tokens.
  std::vector<int32_t> tokens = {10, 11, 12, 13, 14, 15, 16, 17}, targets = {11, 12, -1, -1, 15, 16, 17, 18},
                       positions = {0, 1, 2, 0, 0, 1, 2, 3}, first = {0, 0, 0, 3, 4, 4, 4, 4};
  const auto whole_row = [](std::vector<int32_t>& v) { return Tensor(v.data(), DType::i32, {8}); };
  const Batch whole = {whole_row(tokens), whole_row(targets), whole_row(positions), whole_row(first)};
  std::vector<int32_t> rows(4 * 8, -7);
  const auto row = [&](int64_t i) { return Tensor(rows.data() + 8 * i, DType::i32, {8}); };
  const Batch part = {row(0), row(1), row(2), row(3)};
  // The second of two samples: tokens 2 3 and 4 5 of it, at 4 to 7.
  take_part({.ranks = 2, .rank = 1, .seq_len = 8}, part, 1, whole);
  const auto values = [&](const Tensor& t) {
    return std::vector<int32_t>(t.as<int32_t>() + 4, t.as<int32_t>() + 8);
  };
  CHECK(values(part.tokens) == std::vector<int32_t>{12, 13, 14, 15});
  CHECK(values(part.targets) == std::vector<int32_t>{-1, -1, 15, 16});
  CHECK(values(part.positions) == std::vector<int32_t>{2, 0, 0, 1});
  CHECK(values(part.first_key) == std::vector<int32_t>{2, 5, 6, 6});
  CHECK(rows[0] == -7);
}

TEST_CASE("rows of all ranks are gathered in the order of the sequences, and summed back to their ranks",
          "[context]") {
  const DType dtype = GENERATE(DType::f32, DType::f64, DType::bf16);
  const bool queued = GENERATE(false, true);
  for (const int ranks : {2, 3, 4}) {
    constexpr int64_t kSeqLen = 24, kSamples = 2, kWidth = 3;
    run_thread_ranks(ranks, [&](Communicator& comm) {
      Pool pool;
      Context ctx(1 << 16);
      CommQueue queue;
      const auto world = queue.queued(comm);
      const SequenceRanks shared(*world, kSeqLen, queued ? &queue : nullptr);
      const SequenceSplit& split = shared.split();
      const int64_t mine = kSamples * split.length();
      const Tensor rows = pool.zeros(dtype, {mine, kWidth}),
                   whole = pool.zeros(dtype, {ranks * mine, kWidth});
      // Small whole numbers, which bf16 holds.
      const auto value = [](int64_t token, int64_t c) { return static_cast<double>((5 * token + c) % 100); };
      const auto token = [&](int64_t t) {
        return t / split.length() * kSeqLen + split.place(t % split.length());
      };
      for (int64_t t = 0; t < mine; ++t)
        for (int64_t c = 0; c < kWidth; ++c) Pool::set(rows, t * kWidth + c, value(token(t), c));
      const Tensor all = shared.finish(ctx, shared.begin_gather(ctx, whole, rows));
      for (int64_t t = 0; t < ranks * mine; ++t)
        for (int64_t c = 0; c < kWidth; ++c)
          if (Pool::get(all, t * kWidth + c) != value(t, c)) throw std::runtime_error("not in order");

      SequenceRanks tables = shared;
      Arena memory("tables", 1 << 12);
      tables.allocate(ctx, memory, mine);
      const Tensor first = pool.zeros(DType::i32, {mine}), firsts = pool.zeros(DType::i32, {ranks * mine});
      // Documents of 5 tokens.
      const auto first_of = [&](int64_t t) { return t - t % kSeqLen % 5; };
      for (int64_t t = 0; t < mine; ++t) Pool::set(first, t, t + first_of(token(t)) - token(t));
      tables.gather_first_keys(ctx, firsts, first, tables.own_key(first.dim(0)));
      for (int64_t t = 0; t < ranks * mine; ++t)
        if (firsts.as<int32_t>()[t] != first_of(t)) throw std::runtime_error("another first key");
      ScratchScope scratch(ctx.scratch);
      const Batch batch = {first, first, first, first}, whole_batch = tables.whole_batch(ctx, scratch, batch);
      const Tensor by_head = pool.zeros(dtype, {kWidth, mine}), taken = pool.zeros(dtype, {mine, kWidth});
      for (int64_t i = 0; i < mine; ++i)
        for (int64_t c = 0; c < kWidth; ++c) Pool::set(by_head, c * mine + i, value(token(i), c));
      const Tensor all_by_head = tables.whole_heads(ctx, scratch, by_head),
                   again = tables.whole(ctx, scratch, rows);
      tables.take_own(ctx, taken, again);
      for (int64_t i = 0; i < ranks * mine; ++i) {
        if (whole_batch.first_key.as<int32_t>()[i] != first_of(i))
          throw std::runtime_error("another first key of the batch");
        for (int64_t c = 0; c < kWidth; ++c)
          if (Pool::get(all_by_head, c * ranks * mine + i) != value(i, c) ||
              Pool::get(again, i * kWidth + c) != value(i, c))
            throw std::runtime_error("not in order by head, or as a whole");
      }
      for (int64_t i = 0; i < mine * kWidth; ++i)
        if (Pool::get(taken, i) != Pool::get(rows, i)) throw std::runtime_error("not its own");

      for (int64_t place = 0; place < kSeqLen; ++place)
        if (split.rank_of(place) == split.rank && split.place(split.index_of(place)) != place)
          throw std::runtime_error("another place");

      for (int64_t t = 0; t < ranks * mine; ++t)
        for (int64_t c = 0; c < kWidth; ++c)
          Pool::set(whole, t * kWidth + c, value(t, c) / 4 * (split.rank + 1));
      shared.reduce_scatter(ctx, rows, whole);
      const double times = ranks * (ranks + 1) / 2.0;
      for (int64_t t = 0; t < mine; ++t)
        for (int64_t c = 0; c < kWidth; ++c)
          if (std::abs(Pool::get(rows, t * kWidth + c) - value(token(t), c) / 4 * times) >
              (dtype == DType::bf16 ? 0.02 : 1e-6) * times * value(token(t), c))
            throw std::runtime_error("another sum");
    });
  }
}
