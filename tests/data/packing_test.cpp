#include "data/packing.h"

#include <map>
#include <random>
#include <set>

#include "data/loader.h"
#include "temporary.h"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr int64_t kVocab = 60000;

/// Documents of these lengths, whose tokens are numbered through the file.
void write_lengths(const std::string& prefix, const std::vector<int64_t>& lengths) {
  std::vector<std::vector<int32_t>> documents;
  int32_t next = 0;
  for (const int64_t length : lengths) {
    documents.emplace_back();
    for (int64_t i = 0; i < length; ++i) documents.back().push_back(next++);
  }
  write_tokens(prefix, documents, kVocab);
}

/// "0+5 9+3": the pieces of a sample.
std::string pieces(const PackedSamples& packed, int64_t sample) {
  std::string text;
  for (const Piece& piece : packed.pieces(sample))
    text += fmt::format("{}{}+{}", text.empty() ? "" : " ", piece.begin, piece.length);
  return text;
}

struct Row {
  std::vector<int32_t> tokens, targets, positions, first_key;
  explicit Row(size_t n) : tokens(n, -9), targets(n, -9), positions(n, -9), first_key(n, -9) {}
  bool operator==(const Row&) const = default;
};

Row row_of(const Blend& blend, int64_t seq_len, int64_t sample, bool sequential) {
  Row r(static_cast<size_t>(seq_len));
  if (sequential)
    blend.fill_sequential(sample, 1, r.tokens.data(), r.targets.data(), r.positions.data(),
                          r.first_key.data());
  else
    blend.fill(sample, 1, r.tokens.data(), r.targets.data(), r.positions.data(), r.first_key.data());
  return r;
}

Blend packed_blend(const std::string& prefix, int64_t seq_len, bool mask, bool positions, uint64_t seed = 3) {
  return Blend({{"a", prefix, 1.0}}, seq_len, kVocab, mask, seed, std::nullopt, Packing::documents,
               positions);
}

}  // namespace

TEST_CASE("documents are packed into the fullest sample that has room, and only long ones are cut",
          "[packing]") {
  TemporaryFolder folder;
  // Of samples of 10: 7, 6, 5, 4, 3 by length. 7 and 6 and 5 open samples; 4 fits behind 6 exactly, 3
  // behind 7. The document of 23 is cut into 10, 10 and 3; the second 3 finds room behind 5.
  write_lengths(folder / "a", {5, 6, 4, 1, 23, 7, 3});
  const PackedSamples packed(TokenFile(folder / "a"), 10);
  REQUIRE(packed.samples() == 5);
  CHECK(pieces(packed, 0) == "0+5 46+3");
  CHECK(pieces(packed, 1) == "5+6 11+4");
  CHECK(pieces(packed, 2) == "16+10");
  CHECK(pieces(packed, 3) == "26+10");
  CHECK(pieces(packed, 4) == "36+3 39+7");
  CHECK(packed.unread() == 1);   // the document of one token
  CHECK(packed.padding() == 2);  // of the first sample
  CHECK_FALSE(packed.whole(0));
  CHECK(packed.whole(1));
}

TEST_CASE("a row of packed documents has targets, masks and positions of its documents", "[packing]") {
  TemporaryFolder folder;
  write_lengths(folder / "a", {5, 3, 21});
  const Blend blend = packed_blend(folder / "a", 10, true, true);
  CHECK(blend.num_sequential_samples() == 3);
  Row expected(10);
  expected.tokens = {0, 1, 2, 3, 4, 5, 6, 7, 0, 0};
  expected.targets = {1, 2, 3, 4, -1, 6, 7, -1, -2, -2};
  expected.positions = {0, 1, 2, 3, 4, 0, 1, 2, 0, 1};
  expected.first_key = {0, 0, 0, 0, 0, 5, 5, 5, 8, 8};
  CHECK(row_of(blend, 10, 0, true) == expected);
  // A cut document goes on: its last input predicts the first token behind the cut.
  expected.tokens = {8, 9, 10, 11, 12, 13, 14, 15, 16, 17};
  expected.targets = {9, 10, 11, 12, 13, 14, 15, 16, 17, 18};
  expected.positions = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  expected.first_key = std::vector<int32_t>(10, 0);
  CHECK(row_of(blend, 10, 1, true) == expected);
  // Its last token alone predicts nothing: 28 is only a target.
  CHECK(row_of(blend, 10, 2, true).targets.back() == 28);
  CHECK_FALSE(blend.whole(0));
  CHECK(blend.whole(1));
  CHECK_FALSE(blend.whole(3));
  CHECK(blend.sources()[0].describe_unread() == "  6.7% padding (data.packing)");

  // Without the mask the sample is one sequence; the targets stay.
  const Row open = row_of(packed_blend(folder / "a", 10, false, false), 10, 0, true);
  CHECK(open.targets == std::vector<int32_t>{1, 2, 3, 4, -1, 6, 7, -1, -2, -2});
  CHECK(open.positions == std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  CHECK(open.first_key == std::vector<int32_t>(10, 0));
}

TEST_CASE("packing predicts every token once and is a function of seed and sample", "[packing]") {
  TemporaryFolder folder;
  std::mt19937 random(5);
  std::vector<int64_t> lengths;
  for (int i = 0; i < 400; ++i)
    lengths.push_back(1 + static_cast<int64_t>(random() % (i % 7 == 0 ? 150 : 30)));
  write_lengths(folder / "a", lengths);
  constexpr int64_t kLength = 32;
  const Blend blend = packed_blend(folder / "a", kLength, true, true);
  std::map<int32_t, int> predicted;
  std::set<int32_t> document_starts;
  for (int32_t at = 0; const int64_t length : lengths) {
    document_starts.insert(at);
    at += static_cast<int32_t>(length);
  }
  const int64_t samples = blend.num_sequential_samples();
  for (int64_t i = 0; i < samples; ++i)
    for (const int32_t target : row_of(blend, kLength, i, true).targets)
      if (target >= 0) ++predicted[target];
  int64_t tokens = 0;
  for (const int64_t length : lengths) tokens += length;
  for (int32_t token = 0; token < tokens; ++token)
    if (predicted[token] != (document_starts.count(token) ? 0 : 1)) FAIL("token " << token);

  // An epoch of the shuffled stream has the same rows; another loader, in any order, the same stream.
  const Blend again = packed_blend(folder / "a", kLength, true, true),
              other = packed_blend(folder / "a", kLength, true, true, 4);
  std::set<std::vector<int32_t>> in_order, shuffled;
  bool same_as_other = true;
  for (int64_t i = samples; i-- > 0;) {
    const Row row = row_of(blend, kLength, i, false);
    CHECK(row == row_of(again, kLength, i, false));
    same_as_other = same_as_other && row == row_of(other, kLength, i, false);
    shuffled.insert(row.tokens);
    in_order.insert(row_of(blend, kLength, i, true).tokens);
  }
  CHECK(shuffled == in_order);
  CHECK_FALSE(same_as_other);
}

TEST_CASE("positions of documents restart in the stream, too", "[packing]") {
  TemporaryFolder folder;
  write_lengths(folder / "a", {3, 20});
  const Blend blend({{"a", folder / "a", 1.0}}, 8, kVocab, true, 1, std::nullopt, Packing::stream, true);
  const Row row = row_of(blend, 8, 0, true);
  CHECK(row.positions == std::vector<int32_t>{0, 1, 2, 0, 1, 2, 3, 4});
  CHECK(row_of(blend, 8, 1, true).positions == std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7});
}

TEST_CASE("documents of one token cannot be packed, and bad tokens are named", "[packing]") {
  TemporaryFolder folder;
  write_lengths(folder / "ones", {1, 1, 1});
  expect_error(ExitCode::data, {"documents are one token each", "data.packing=stream"},
               [&] { packed_blend(folder / "ones", 8, false, false); });
  write_lengths(folder / "a", {5, 20});
  const Blend blend({{"a", folder / "a", 1.0}}, 8, 13, false, 1, std::nullopt, Packing::documents);
  expect_error(ExitCode::data, {"a.bin: token 13 is 13, outside the vocabulary of 13"},
               [&] { row_of(blend, 8, 1, true); });
}
