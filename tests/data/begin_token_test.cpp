// Samples with a begin token (data.begin_token), against a slow construction of each from the documents.
#include <algorithm>
#include <random>
#include <set>

#include "core/targets.h"
#include "data/loader.h"
#include "temporary.h"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr int64_t kVocab = 60000;
constexpr int32_t kBegin = 59999;

using Documents = std::vector<std::vector<int32_t>>;

struct Row {
  std::vector<int32_t> tokens, targets, positions, first_key;
  bool operator==(const Row&) const = default;
};

/// Every sample of a file in file order.
std::vector<Row> slow_rows(const Documents& documents, int64_t seq_len, bool document_mask) {
  struct Token {
    int32_t id;
    int document;
  };
  std::vector<Token> tokens;
  std::vector<size_t> document_starts;
  for (size_t d = 0; d < documents.size(); ++d) {
    document_starts.push_back(tokens.size());
    for (const int32_t id : documents[d]) tokens.push_back({id, static_cast<int>(d)});
  }
  std::vector<Row> rows;
  size_t end = 0;  // of the last sample
  for (const size_t start : document_starts) {
    if (start < end) continue;
    end = std::min(start + static_cast<size_t>(seq_len), tokens.size());
    Row row;
    std::vector<int> document_of_input;
    for (size_t i = 0; i < static_cast<size_t>(seq_len); ++i) {
      const bool padding = start + i >= end;
      row.positions.push_back(static_cast<int32_t>(i));
      row.tokens.push_back(padding ? 0 : i == 0 ? kBegin : tokens[start + i - 1].id);
      document_of_input.push_back(padding  ? document_of_input.back()
                                  : i == 0 ? tokens[start].document
                                           : tokens[start + i - 1].document);
      const bool predicted =
          !padding && (!document_mask || tokens[start + i].document == document_of_input.back());
      row.targets.push_back(predicted ? tokens[start + i].id : padding ? kPadding : kNoTarget);
      size_t first = 0;
      while (document_mask && document_of_input[first] != document_of_input.back()) ++first;
      row.first_key.push_back(static_cast<int32_t>(first));
    }
    rows.push_back(row);
  }
  return rows;
}

Row read(const Blend& blend, int64_t seq_len, int64_t sample, bool sequential) {
  const auto n = static_cast<size_t>(seq_len);
  Row r{std::vector<int32_t>(n, -9), std::vector<int32_t>(n, -9), std::vector<int32_t>(n, -9),
        std::vector<int32_t>(n, -9)};
  const auto fill = [&](auto&& from) {
    from(sample, 1, r.tokens.data(), r.targets.data(), r.positions.data(), r.first_key.data());
  };
  if (sequential)
    fill([&](auto... a) { blend.fill_sequential(a...); });
  else
    fill([&](auto... a) { blend.fill(a...); });
  return r;
}

/// Documents of these tests do not contain token 0, which pads.
bool whole(const Row& row) { return std::find(row.tokens.begin(), row.tokens.end(), 0) == row.tokens.end(); }

/// Documents of random lengths from 1 on; tokens count up from `first`, so that each occurs once.
Documents random_documents(std::mt19937& random, int count, int longest, int32_t first) {
  Documents documents;
  for (int d = 0; d < count; ++d) {
    std::vector<int32_t> document(1 + random() % static_cast<unsigned>(longest));
    for (int32_t& token : document) token = first++;
    documents.push_back(document);
  }
  return documents;
}

/// Documents of these lengths.
Documents of_lengths(const std::vector<size_t>& lengths, int32_t first = 100) {
  Documents documents;
  for (const size_t length : lengths) {
    documents.emplace_back(length);
    for (int32_t& token : documents.back()) token = first++;
  }
  return documents;
}

Blend open(const TemporaryFolder& folder, const Documents& documents, int64_t seq_len, bool mask = false) {
  write_tokens(folder / "a", documents, kVocab);
  return Blend({{"a", folder / "a", 1}}, seq_len, kVocab, mask, 3, kBegin);
}

}  // namespace

TEST_CASE("with a begin token samples equal a slow construction from the documents",
          "[loader][begin_token]") {
  std::mt19937 random(5);
  for (const bool mask : {false, true})
    for (const int64_t seq_len : {1, 2, 7, 16})
      for (const int longest : {1, 6, 16, 50}) {
        INFO("mask " << mask << ", seq_len " << seq_len << ", documents of up to " << longest << " tokens");
        TemporaryFolder folder;
        // Two files in one source, one in another.
        const std::vector<Documents> files = {random_documents(random, 30, longest, 1),
                                              random_documents(random, 17, longest, 10000),
                                              random_documents(random, 40, longest, 20000)};
        write_tokens(folder / "a0", files[0], kVocab);
        write_tokens(folder / "a1", files[1], kVocab);
        write_tokens(folder / "b", files[2], kVocab);
        const Blend blend({{"a", folder / "a*.bin", 1}, {"b", folder / "b", 1}}, seq_len, kVocab, mask, 3,
                          kBegin);
        std::vector<Row> expected;
        std::vector<std::vector<Row>> whole_rows(2);  // by source: those of training, in file order
        for (size_t f = 0; f < files.size(); ++f) {
          std::vector<Row> rows = slow_rows(files[f], seq_len, mask);
          for (size_t i = 0; i < rows.size(); ++i) {
            // Only the last sample of a file may be short.
            const bool is_whole = i + 1 < rows.size() || whole(rows[i]);
            CHECK(blend.whole(static_cast<int64_t>(expected.size())) == is_whole);
            if (is_whole) whole_rows[f == 2].push_back(rows[i]);
            expected.push_back(rows[i]);
          }
        }
        REQUIRE(blend.num_sequential_samples() == static_cast<int64_t>(expected.size()));
        for (size_t i = 0; i < expected.size(); ++i) {
          INFO("sample " << i);
          REQUIRE(read(blend, seq_len, static_cast<int64_t>(i), true) == expected[i]);
        }
        for (int64_t i = 0; i < 200; ++i) {
          const Blend::Origin from = blend.origin(i);
          INFO("sample " << i << " of the shuffled stream");
          REQUIRE(read(blend, seq_len, i, false) ==
                  whole_rows[static_cast<size_t>(from.source)][static_cast<size_t>(from.chunk)]);
        }
        for (size_t s = 0; s < 2; ++s)
          CHECK(blend.sources()[s].samples == static_cast<int64_t>(whole_rows[s].size()));
        const int64_t past = blend.num_sequential_samples();
        CHECK_FALSE(blend.whole(past));
        CHECK(read(blend, seq_len, past, true).targets ==
              std::vector<int32_t>(static_cast<size_t>(seq_len), kPadding));
      }
}

TEST_CASE("rows of a batch are numbered like its tokens with a begin token, too", "[loader][begin_token]") {
  TemporaryFolder folder;
  const Blend blend = open(folder, of_lengths({3, 9, 5, 5, 2, 20}), 8, true);
  constexpr int64_t kRows = 3;
  std::vector<int32_t> tokens(kRows * 8), targets(kRows * 8), positions(kRows * 8), first_key(kRows * 8);
  blend.fill_sequential(0, kRows, tokens.data(), targets.data(), positions.data(), first_key.data());
  for (int64_t row = 0; row < kRows; ++row) {
    const Row one = read(blend, 8, row, true);
    for (size_t i = 0; i < 8; ++i) {
      const size_t at = static_cast<size_t>(row) * 8 + i;
      CHECK(tokens[at] == one.tokens[i]);
      CHECK(targets[at] == one.targets[i]);
      CHECK(first_key[at] == one.first_key[i] + static_cast<int32_t>(row) * 8);
    }
  }
}

TEST_CASE("documents as long as a sample are its targets, and nothing is lost", "[loader][begin_token]") {
  for (const bool mask : {false, true}) {
    TemporaryFolder folder;
    const Documents documents = of_lengths({8, 8, 8, 8, 8});
    const Blend blend = open(folder, documents, 8, mask);
    REQUIRE(blend.num_sequential_samples() == 5);
    CHECK(blend.sources()[0].samples == 5);
    CHECK(blend.sources()[0].unread == 0);
    CHECK(blend.sources()[0].describe_unread().empty());
    for (int64_t i = 0; i < 5; ++i) {
      CHECK(blend.whole(i));
      const Row row = read(blend, 8, i, true);
      CHECK(row.targets == documents[static_cast<size_t>(i)]);
      CHECK(row.tokens[0] == kBegin);
      CHECK(row.first_key == std::vector<int32_t>(8, 0));
    }
    CHECK(blend.epochs(10)[0].second == 2);
  }
}

TEST_CASE("what lies in no sample is counted", "[loader][begin_token]") {
  TemporaryFolder folder;
  // Samples of 8: documents 0 and 1 (8 of 3 + 9 tokens, so 4 are left), 2 and 3 (8 of 5 + 5, 2 left), 4 and
  // the beginning of 5 (2 + 6 of 20, 14 left), 6 (a short one of 1 token, for evaluation only).
  const Blend blend = open(folder, of_lengths({3, 9, 5, 5, 2, 20, 1}), 8);
  const Blend::SourceInfo info = blend.sources()[0];
  CHECK(info.tokens == 45);
  CHECK(blend.num_tokens() == 45);
  CHECK(info.samples == 3);
  CHECK(blend.num_sequential_samples() == 4);
  CHECK(info.unread == 20);
  CHECK(info.describe_unread() == "  44.4% of them in no sample (data.begin_token)");
  CHECK(blend.whole(2));
  CHECK_FALSE(blend.whole(3));
  CHECK(read(blend, 8, 3, true).targets == std::vector<int32_t>{144, -2, -2, -2, -2, -2, -2, -2});
  CHECK(blend.epochs(6)[0].second == 2);
  // A training does not read the short sample either.
  CHECK(info.untrained == 21);
  CHECK(info.files_untrained == 0);
  CHECK(info.describe_untrained() == "  46.7% of them in no sample");
  // Without a begin token evaluations leave nothing out, a training the rest of the file.
  const Blend stream({{"a", folder / "a", 1}}, 8, kVocab, false, 3);
  CHECK(stream.sources()[0].unread == 0);
  CHECK(stream.sources()[0].untrained == 45 - (5 * 8 + 1));
  CHECK(stream.sources()[0].describe_untrained() == "  8.89% of them in no sample");
  CHECK(stream.num_sequential_samples() == 6);
  CHECK(stream.whole(4));
  CHECK_FALSE(stream.whole(5));
}

TEST_CASE("the tokens that no sample of the training stream holds are counted, by file",
          "[loader][begin_token]") {
  // A short file between two that have samples, and a file that is too short by one token.
  TemporaryFolder folder;
  const std::vector<std::vector<size_t>> files = {{9, 9, 5}, {4, 2}, {8}, {3, 30}};
  int32_t first = 1;
  for (size_t f = 0; f < files.size(); ++f) {
    write_tokens(folder / fmt::format("a{}", f), of_lengths(files[f], first), kVocab);
    first += 100;
  }
  struct Case {
    std::optional<int64_t> begin_token;
    Packing packing;
    int64_t files_untrained;
  };
  for (const Case& c : {Case{std::nullopt, Packing::stream, 2}, Case{kBegin, Packing::stream, 1},
                        Case{std::nullopt, Packing::documents, 0}}) {
    const Blend blend({{"a", folder / "a*.bin", 1}}, 8, kVocab, false, 3, c.begin_token, c.packing);
    const Blend::SourceInfo info = blend.sources()[0];
    std::set<int32_t> seen;
    for (int64_t i = 0; i < info.samples; ++i) {
      const Row row = read(blend, 8, i, false);
      seen.insert(row.tokens.begin(), row.tokens.end());
      seen.insert(row.targets.begin(), row.targets.end());
    }
    for (const int32_t other : {0, kNoTarget, kPadding, kBegin}) seen.erase(other);
    CHECK(info.untrained == info.tokens - std::ssize(seen));
    CHECK(info.files_untrained == c.files_untrained);
  }
  const Blend blend({{"a", folder / "a*.bin", 1}}, 8, kVocab, false, 3);
  CHECK(blend.sources()[0].describe_untrained() ==
        "  28.6% of them in no sample  2 of 4 files without a sample");
  // The rest of a long file is not worth a word.
  write_tokens(folder / "long", of_lengths({8 * 600 + 1 + 4}), kVocab);
  const Blend almost({{"long", folder / "long", 1}}, 8, kVocab, false, 3);
  CHECK(almost.sources()[0].untrained == 4);
  CHECK(almost.sources()[0].describe_untrained().empty());
}

TEST_CASE("with a mask the begin token is the first document's alone", "[loader][begin_token]") {
  TemporaryFolder folder;
  const Blend blend = open(folder, of_lengths({3, 2, 9}, 1), 8, true);
  const Row row = read(blend, 8, 0, true);
  CHECK(row.tokens == std::vector<int32_t>{kBegin, 1, 2, 3, 4, 5, 6, 7});
  CHECK(row.targets == std::vector<int32_t>{1, 2, 3, -1, 5, -1, 7, 8});
  CHECK(row.first_key == std::vector<int32_t>{0, 0, 0, 0, 4, 4, 6, 6});
  // Documents of one token each: what the begin token predicts is left.
  const Blend ones = open(folder, of_lengths({1, 1, 1, 1}, 1), 2, true);
  CHECK(read(ones, 2, 1, true).targets == std::vector<int32_t>{3, -1});
}

TEST_CASE("the stream with a begin token is a function of seed and number", "[loader][begin_token]") {
  TemporaryFolder folder;
  std::mt19937 random(9);
  write_tokens(folder / "a", random_documents(random, 300, 40, 1), kVocab);
  const auto stream = [&](uint64_t seed) {
    const Blend blend({{"a", folder / "a", 1}}, 16, kVocab, false, seed, kBegin);
    std::vector<Row> rows;
    for (int64_t i = 0; i < 300; ++i) rows.push_back(read(blend, 16, i, false));
    return rows;
  };
  CHECK(stream(1) == stream(1));
  CHECK(stream(1) != stream(2));
}

TEST_CASE("tokens outside the vocabulary are named by their place in the file behind a begin token, too",
          "[loader][begin_token]") {
  TemporaryFolder folder;
  Documents documents = of_lengths({4, 4, 9});
  documents[1][0] = 50000;
  documents[2][3] = 50001;
  write_tokens(folder / "a", documents, kVocab);
  const Blend blend({{"a", folder / "a", 1}}, 4, 50000, false, 3, 7);
  CHECK_NOTHROW(read(blend, 4, 0, true));
  expect_error(ExitCode::data, {folder / "a.bin", "token 4 is 50000"}, [&] { read(blend, 4, 1, true); });
  // The last target of a sample.
  expect_error(ExitCode::data, {"token 11 is 50001"}, [&] { read(blend, 4, 2, true); });
}

TEST_CASE("a source without a document that is followed by a whole sample is refused",
          "[loader][begin_token]") {
  TemporaryFolder folder;
  write_tokens(folder / "a", of_lengths({3, 4}), kVocab);
  const auto open_with = [&](int64_t seq_len, int64_t begin_token) {
    Blend({{"tiny", folder / "a", 1}}, seq_len, kVocab, false, 3, begin_token);
  };
  CHECK_NOTHROW(open_with(7, kBegin));
  expect_error(
      ExitCode::data,
      {"data source tiny", "7 tokens", "needs 8", "from the start of a document", "data.begin_token"},
      [&] { open_with(8, kBegin); });
  CHECK_THROWS_AS(open_with(4, kVocab), Error);
  CHECK_THROWS_AS(open_with(4, -1), Error);
}
