#include "data/loader.h"

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <new>
#include <set>
#include <thread>

#include "core/io.h"
#include "core/targets.h"
#include "temporary.h"

using namespace sluice;
using namespace sluice::test;

namespace {

struct Rows {
  std::vector<int32_t> tokens, targets, positions, first_key;
  explicit Rows(int64_t n)
      : tokens(size(n), -9), targets(size(n), -9), positions(size(n), -9), first_key(size(n), -9) {}
  static size_t size(int64_t n) { return static_cast<size_t>(n); }
  bool operator==(const Rows&) const = default;
};

Rows rows(const Blend& blend, int64_t seq_len, int64_t first, int64_t count, bool sequential = false) {
  Rows r(count * seq_len);
  if (sequential) {
    blend.fill_sequential(first, count, r.tokens.data(), r.targets.data(), r.positions.data(),
                          r.first_key.data());
  } else {
    blend.fill(first, count, r.tokens.data(), r.targets.data(), r.positions.data(), r.first_key.data());
  }
  return r;
}

std::vector<int32_t> range(int32_t begin, int32_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) tokens[static_cast<size_t>(i)] = begin + i;
  return tokens;
}

constexpr int64_t kVocab = 60000;

}  // namespace

// Counts allocations while `counting` is set, on this thread.
static thread_local bool counting = false;
static thread_local int64_t allocations = 0;
// Not inlined: GCC 12 would report a mismatch of new and free.
[[gnu::noinline]] void* operator new(size_t bytes) {
  if (counting) ++allocations;
  if (void* p = std::malloc(bytes ? bytes : 1)) return p;
  throw std::bad_alloc();
}
// The address sanitizer's own nothrow form would not match our delete.
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  if (counting) ++allocations;
  return std::malloc(bytes ? bytes : 1);
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

TEST_CASE("a sample is consecutive tokens with the next ones as targets", "[loader]") {
  TemporaryFolder folder;
  write_tokens(folder / "a", {range(0, 30), range(30, 71)},
               kVocab);  // 101 tokens: 12 samples of 8, the rest unused
  const Blend blend({{"a", folder / "a", 1.0}}, 8, kVocab, false, 5);
  CHECK(blend.num_tokens() == 101);
  const auto r = rows(blend, 8, 0, 12);
  std::set<int32_t> starts;
  for (int64_t row = 0; row < 12; ++row) {
    const auto at = static_cast<size_t>(row * 8);
    starts.insert(r.tokens[at]);
    CHECK(r.tokens[at] % 8 == 0);
    CHECK(r.tokens[at] / 8 == blend.origin(row).chunk);
    for (size_t i = 0; i < 8; ++i) {
      CHECK(r.tokens[at + i] == r.tokens[at] + static_cast<int32_t>(i));
      CHECK(r.targets[at + i] == r.tokens[at + i] + 1);
      CHECK(r.positions[at + i] == static_cast<int32_t>(i));
      CHECK(r.first_key[at + i] == row * 8);
    }
  }
  CHECK(starts.size() == 12);
}

TEST_CASE("the stream does not depend on the batch size", "[loader]") {
  TemporaryFolder folder;
  write_tokens(folder / "a", {range(0, 3000)}, kVocab);
  write_tokens(folder / "b", {range(5000, 777)}, kVocab);
  const Blend blend({{"a", folder / "a", 0.7}, {"b", folder / "b", 0.3}}, 16, kVocab, true, 11);
  const int64_t n = 600;
  const Rows whole = rows(blend, 16, 0, n);
  for (int64_t batch : {1, 7, 64}) {
    for (int64_t first = 0; first < n; first += batch) {
      const int64_t count = std::min(batch, n - first);
      const Rows part = rows(blend, 16, first, count);
      const auto at = static_cast<int64_t>(first * 16);
      REQUIRE(std::equal(part.tokens.begin(), part.tokens.end(), whole.tokens.begin() + at));
      REQUIRE(std::equal(part.targets.begin(), part.targets.end(), whole.targets.begin() + at));
      for (size_t i = 0; i < part.first_key.size(); ++i) {
        if (part.first_key[i] + at != whole.first_key[i + static_cast<size_t>(at)])
          FAIL("first_key at " << i);
      }
    }
  }
  // A Blend opened again gives the same stream; another seed gives another one.
  const Blend again({{"a", folder / "a", 0.7}, {"b", folder / "b", 0.3}}, 16, kVocab, true, 11);
  CHECK(rows(again, 16, 0, n) == whole);
  const Blend other({{"a", folder / "a", 0.7}, {"b", folder / "b", 0.3}}, 16, kVocab, true, 12);
  CHECK_FALSE(rows(other, 16, 0, n) == whole);
}

TEST_CASE("a million samples contain every chunk of every epoch exactly once, in the configured proportions",
          "[loader]") {
  TemporaryFolder folder;
  // Samples of one token: 997, 64, 12,345, 3 and 4,096 of them, some spread over several files.
  const auto file = [&](const std::string& name, int32_t tokens) {
    write_tokens(folder / name, {range(0, tokens)}, kVocab);
  };
  file("a-0", 500), file("a-1", 1), file("a-2", 499);
  file("b", 65), file("c", 12346), file("d", 4), file("e", 4097);
  const std::vector<DataSource> sources = {{"a", folder / "a-*.bin", 0.31},
                                           {"b", folder / "b", 0.0107},
                                           {"c", folder / "c", 5.0 / 9.0},
                                           {"d", folder / "d", 0.001},
                                           {"e", folder / "e", 0.2}};
  double total = 0;
  for (const auto& source : sources) total += source.weight;
  const Blend blend(sources, 1, kVocab, false, 99);
  const auto infos = blend.sources();
  CHECK(infos[0].files == 3);
  CHECK(infos[0].samples == 997);

  std::vector<int64_t> taken(sources.size(), 0), epoch(sources.size(), 0);
  std::vector<std::vector<char>> seen(sources.size());
  std::vector<std::vector<int64_t>> first_epoch(sources.size()), second_epoch(sources.size());
  for (size_t s = 0; s < sources.size(); ++s) seen[s].assign(static_cast<size_t>(infos[s].samples), 0);
  double worst = 0;
  for (int64_t i = 0; i < 1000000; ++i) {
    const auto origin = blend.origin(i);
    const auto s = static_cast<size_t>(origin.source);
    if (origin.epoch != epoch[s]) {
      // An epoch starts only after the previous one is complete.
      REQUIRE(origin.epoch == epoch[s] + 1);
      for (char mark : seen[s]) REQUIRE(mark == 1);
      std::fill(seen[s].begin(), seen[s].end(), char{0});
      ++epoch[s];
    }
    REQUIRE(origin.chunk >= 0);
    REQUIRE(origin.chunk < infos[s].samples);
    if (seen[s][static_cast<size_t>(origin.chunk)]++)
      FAIL("sample " << i << " repeats chunk " << origin.chunk);
    if (origin.epoch < 2) (origin.epoch == 0 ? first_epoch : second_epoch)[s].push_back(origin.chunk);
    ++taken[s];
    if (i >= 1000) {
      for (size_t k = 0; k < taken.size(); ++k) {
        const double share = static_cast<double>(taken[k]) / static_cast<double>(i + 1);
        worst = std::max(worst, std::abs(share - sources[k].weight / total));
      }
    }
  }
  CHECK(worst < 1e-3);
  CHECK(epoch[1] > 100);  // many epochs of the small sources
  CHECK(epoch[2] > 40);
  CHECK(first_epoch[2] != second_epoch[2]);
  CHECK(first_epoch[0] != second_epoch[0]);
  CHECK(!std::is_sorted(first_epoch[2].begin(), first_epoch[2].end()));
}

TEST_CASE("every prefix of the schedule is within one sample of the exact proportions", "[loader]") {
  TemporaryFolder folder;
  write_tokens(folder / "a", {range(0, 50)}, kVocab);
  for (const std::vector<double>& weights : {std::vector<double>{1, 1},
                                             {1, 2, 4},
                                             {1e4, 1, 1, 1},
                                             {0.5, 0.25, 0.125, 0.0625, 0.0625},
                                             {3, 0, 1},
                                             {0.22, 0.19, 0.17, 0.14, 0.11, 0.08, 0.05, 0.03, 0.01},
                                             {7}}) {
    std::vector<DataSource> sources;
    for (double weight : weights)
      sources.push_back({"s" + std::to_string(sources.size()), folder / "a", weight});
    const Blend blend(sources, 1, kVocab, false, 1);
    const auto infos = blend.sources();
    std::vector<int64_t> taken(weights.size(), 0);
    double worst = 0;
    for (int64_t i = 0; i < 140000; ++i) {
      ++taken[static_cast<size_t>(blend.origin(i).source)];
      for (size_t s = 0; s < taken.size(); ++s) {
        worst = std::max(
            worst, std::abs(static_cast<double>(taken[s]) - infos[s].weight * static_cast<double>(i + 1)));
      }
    }
    CHECK(worst < 1.0);
  }
}

TEST_CASE("samples do not cross files", "[loader]") {
  TemporaryFolder folder;
  write_tokens(folder / "x1", {range(0, 20)}, kVocab);    // 4 samples of 4 (17 tokens), 3 tokens left
  write_tokens(folder / "x2", {range(100, 4)}, kVocab);   // none
  write_tokens(folder / "x3", {range(200, 13)}, kVocab);  // 3
  const Blend blend({{"x", folder / "x?.bin", 1.0}}, 4, kVocab, false, 3);
  CHECK(blend.sources()[0].samples == 7);
  std::set<int32_t> starts;
  const Rows r = rows(blend, 4, 0, 7);
  for (size_t at = 0; at < r.tokens.size(); at += 4) {
    starts.insert(r.tokens[at]);
    CHECK(r.targets[at + 3] == r.tokens[at] + 4);
  }
  CHECK(starts == std::set<int32_t>{0, 4, 8, 12, 200, 204, 208});
}

TEST_CASE("in file order every token except each file's first is a target exactly once", "[loader]") {
  TemporaryFolder folder;
  write_tokens(folder / "a1", {range(0, 21)}, kVocab);
  write_tokens(folder / "a2", {range(100, 9), range(109, 8)}, kVocab);
  write_tokens(folder / "a3", {{300}}, kVocab);  // nothing to predict
  write_tokens(folder / "b", {range(400, 6)}, kVocab);
  const Blend blend({{"a", folder / "a*.bin", 1}, {"b", folder / "b", 1}}, 5, kVocab, false, 3);
  REQUIRE(blend.num_sequential_samples() == 4 + 4 + 0 + 1);
  std::multiset<int32_t> expected, targets;
  for (int32_t t : range(1, 20)) expected.insert(t);
  for (int32_t t : range(101, 16)) expected.insert(t);
  for (int32_t t : range(401, 5)) expected.insert(t);
  const Rows r = rows(blend, 5, 0, 12, true);  // three past the end
  for (size_t i = 0; i < r.targets.size(); ++i) {
    if (r.targets[i] >= 0) {
      targets.insert(r.targets[i]);
      CHECK(r.targets[i] == r.tokens[i] + 1);
    } else {
      CHECK(r.targets[i] == kPadding);
      CHECK(r.tokens[i] == 0);
    }
    CHECK(r.positions[i] == static_cast<int32_t>(i % 5));
    CHECK(r.first_key[i] == static_cast<int32_t>(i / 5 * 5));
  }
  CHECK(targets == expected);
  for (int64_t first = 0; first < 12; ++first) {  // equal from any starting position
    const Rows one = rows(blend, 5, first, 1, true);
    CHECK(std::equal(one.targets.begin(), one.targets.end(), r.targets.begin() + first * 5));
  }
}

TEST_CASE("with document_mask keys and targets stay within the document", "[loader]") {
  TemporaryFolder folder;
  // Documents at 0, 3, 4 and 10; rows of 8 inputs: 0..7 and 8..15, the second truncated at 14.
  write_tokens(folder / "a", {range(0, 3), range(3, 1), range(4, 6), range(10, 5)}, kVocab);
  const Blend blend({{"a", folder / "a", 1}}, 8, kVocab, true, 3);
  const Rows r = rows(blend, 8, 0, 2, true);
  CHECK(r.tokens == std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 0, 0});
  CHECK(r.targets == std::vector<int32_t>{1, 2, -1, -1, 5, 6, 7, 8, 9, -1, 11, 12, 13, 14, -2, -2});
  CHECK(r.first_key == std::vector<int32_t>{0, 0, 0, 3, 4, 4, 4, 4, 8, 8, 10, 10, 10, 10, 10, 10});
  const Rows shuffled =
      rows(blend, 8, 0, 2);  // one sample per epoch: row 1 equals row 0, at its own position
  CHECK(shuffled.first_key == std::vector<int32_t>{0, 0, 0, 3, 4, 4, 4, 4, 8, 8, 8, 11, 12, 12, 12, 12});
  const Blend open({{"a", folder / "a", 1}}, 8, kVocab, false, 3);
  CHECK(rows(open, 8, 0, 1).targets == std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7, 8});
  // A document that ends where the sample ends: its last target is another document's.
  write_tokens(folder / "b", {range(0, 8), range(8, 1)}, kVocab);
  CHECK(rows(Blend({{"b", folder / "b", 1}}, 8, kVocab, true, 3), 8, 0, 1).targets ==
        std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7, -1});
}

TEST_CASE("filling a batch allocates nothing and is thread-safe", "[loader]") {
  TemporaryFolder folder;
  for (int f = 0; f < 5; ++f)
    write_tokens(folder / ("a" + std::to_string(f)), {range(0, 999), range(7, 5)}, kVocab);
  const Blend blend({{"a", folder / "a*.bin", 2}, {"b", folder / "a0", 1}}, 32, kVocab, true, 3);
  Rows r(64 * 32);
  counting = true;
  blend.fill(1000, 64, r.tokens.data(), r.targets.data(), r.positions.data(), r.first_key.data());
  blend.fill_sequential(10, 64, r.tokens.data(), r.targets.data(), r.positions.data(), r.first_key.data());
  counting = false;
  const Blend begins({{"a", folder / "a*.bin", 2}, {"b", folder / "a0", 1}}, 32, kVocab, true, 3, 9);
  counting = true;
  begins.fill(1000, 64, r.tokens.data(), r.targets.data(), r.positions.data(), r.first_key.data());
  begins.fill_sequential(0, 64, r.tokens.data(), r.targets.data(), r.positions.data(), r.first_key.data());
  counting = false;
  CHECK(allocations == 0);

  const Rows expected = rows(blend, 32, 0, 256);
  std::vector<Rows> parts(4, Rows(256 * 32));
  std::vector<std::thread> threads;
  for (auto& part : parts) threads.emplace_back([&blend, &part] { part = rows(blend, 32, 0, 256); });
  for (auto& thread : threads) thread.join();
  for (const auto& part : parts) CHECK(part == expected);
}

TEST_CASE("tokens outside the vocabulary are reported with file, index and value", "[loader]") {
  TemporaryFolder folder;
  auto tokens = range(0, 40);
  tokens[29] = 50000;
  write_tokens(folder / "a", {tokens}, kVocab);
  const Blend blend({{"a", folder / "a", 1}}, 4, 50000, false, 3);
  expect_error(ExitCode::data, {folder / "a.bin", "token 29 is 50000", "vocabulary of 50000"},
               [&] { rows(blend, 4, 0, 100); });
  expect_error(ExitCode::data, {"token 29 is 50000"}, [&] { rows(blend, 4, 7, 1, true); });
  CHECK_NOTHROW(rows(blend, 4, 6, 1, true));
  // The last target counts, too: token 28 is the target of sample 6 of length 4, and 32 of sample 7.
  tokens[29] = 29, tokens[32] = 50001;
  write_tokens(folder / "b", {tokens}, kVocab);
  const Blend last({{"b", folder / "b", 1}}, 4, 50000, false, 3);
  expect_error(ExitCode::data, {"token 32 is 50001"}, [&] { rows(last, 4, 7, 1, true); });
  // Negative tokens exist in i32 files only.
  write_tokens(folder / "c", {range(0, 40)}, 70000);
  const int32_t minus = -5;
  std::fstream file(folder / "c.bin", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(4 * 11);
  file.write(reinterpret_cast<const char*>(&minus), 4);
  file.close();
  const Blend negative({{"c", folder / "c", 1}}, 4, 70000, false, 3);
  expect_error(ExitCode::data, {"token 11 is -5"}, [&] { rows(negative, 4, 0, 100); });
}

TEST_CASE("bad sources are refused by name", "[loader]") {
  TemporaryFolder folder;
  write_tokens(folder / "a", {range(0, 8)}, kVocab);
  const std::string a = folder / "a";
  const auto open = [&](std::vector<DataSource> sources, int64_t seq_len = 4) {
    Blend(sources, seq_len, kVocab, false, 1);
  };
  CHECK_NOTHROW(open({{"x", a, 1}}, 7));
  write_tokens(folder / "long", {range(0, 100)}, kVocab);
  expect_error(ExitCode::data, {"data source tiny", a, "8 tokens", "needs 9"}, [&] {
    open({{"x", folder / "long", 1}, {"tiny", a, 1}}, 8);
  });
  expect_error(ExitCode::no_input, {folder / "no.bin"}, [&] { open({{"x", folder / "no", 1}}); });
  expect_error(ExitCode::no_input, {"data source x", "no*"}, [&] { open({{"x", folder / "no*", 1}}); });
  expect_error(ExitCode::usage, {"no source"}, [&] { open({}); });
  expect_error(ExitCode::usage, {"data source y", "weight -1"}, [&] { open({{"x", a, 1}, {"y", a, -1}}); });
  expect_error(ExitCode::usage, {"data source y", "nan"}, [&] {
    open({{"x", a, 1}, {"y", a, std::nan("")}});
  });
  expect_error(ExitCode::usage, {"sum to 0"}, [&] { open({{"x", a, 0}, {"y", a, 0}}); });
  expect_error(ExitCode::usage, {"data source y", "too small"}, [&] { open({{"x", a, 1}, {"y", a, 1e-9}}); });
  // An existing name with brackets is not a pattern.
  write_tokens(folder / "b[1]", {range(0, 8)}, kVocab);
  CHECK_NOTHROW(open({{"x", folder / "b[1]", 1}, {"y", folder / "b[1].bin", 1}}));
}

TEST_CASE("epochs are counted per source, exactly", "[loader]") {
  TemporaryFolder folder;
  write_tokens(folder / "a", {range(0, 41)}, kVocab);  // 10 samples
  write_tokens(folder / "b", {range(0, 29)}, kVocab);  // 7
  const Blend blend({{"a", folder / "a", 3}, {"b", folder / "b", 1}}, 4, kVocab, false, 1);
  for (const int64_t samples : {0, 1, 1000, 65536, 200001}) {
    std::vector<int64_t> taken(2, 0);
    for (int64_t i = 0; i < samples; ++i) ++taken[static_cast<size_t>(blend.origin(i).source)];
    const auto epochs = blend.epochs(samples);
    CHECK(epochs[0].first == "a");
    CHECK(epochs[0].second == Approx(static_cast<double>(taken[0]) / 10));
    CHECK(epochs[1].second == Approx(static_cast<double>(taken[1]) / 7));
  }
}

TEST_CASE("document_mask with one-token documents is an error, because nothing is predicted", "[loader]") {
  TemporaryFolder folder;
  write_tokens(folder / "ones", std::vector<std::vector<int32_t>>(50, {5}), kVocab);
  std::vector<std::vector<int32_t>> documents(50, {5});
  documents.push_back({6, 7});
  write_tokens(folder / "one pair", documents, kVocab);
  const auto open = [&](const std::string& name, bool mask) {
    return Blend({{"s", folder / name, 1}}, 4, kVocab, mask, 1);
  };
  expect_error(ExitCode::data,
               {"data source s", "50 documents are one token each", "data.document_mask=false"},
               [&] { open("ones", true); });
  CHECK_NOTHROW(open("ones", false));
  CHECK_NOTHROW(open("one pair", true));
}

TEST_CASE("the fingerprint of a blend depends on its tokens and their order", "[loader]") {
  TemporaryFolder folder;
  write_tokens(folder / "a", {range(0, 80)}, kVocab);
  write_tokens(folder / "b", {range(1, 80)}, kVocab);
  const auto of = [&](std::vector<DataSource> sources) {
    return Blend(sources, 4, kVocab, false, 1).fingerprint();
  };
  const std::string both = of({{"x", folder / "a", 1}, {"y", folder / "b", 1}});
  CHECK(both == of({{"p", folder / "a", 3}, {"q", folder / "b", 1}}));
  CHECK(both != of({{"x", folder / "b", 1}, {"y", folder / "a", 1}}));
  CHECK(both != of({{"x", folder / "[ab].bin", 1}}));
}

TEST_CASE("a blend hashes its files once", "[loader]") {
  TemporaryFolder folder;
  write_tokens(folder / "a", {range(0, 80)}, kVocab);
  const std::vector<DataSource> sources = {{"x", folder / "a", 1}};
  const Blend blend(sources, 4, kVocab, false, 1);
  const std::string first = blend.fingerprint();
  {
    std::fstream file(folder / "a.bin", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(20);
    file.put(1);
  }
  CHECK(Blend(sources, 4, kVocab, false, 1).fingerprint() != first);
  CHECK(blend.fingerprint() == first);
}
