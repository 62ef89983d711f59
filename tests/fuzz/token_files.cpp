// PREFIX.bin, PREFIX.idx and PREFIX.json, read as training and validation data. The mutator keeps counts,
// offsets and document boundaries of the index right most of the time, so that what follows them is reached.
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/targets.h"
#include "data/loader.h"
#include "data/token_check.h"
#include "data/token_file.h"
#include "support/fuzz.h"

namespace sluice::fuzz {
namespace {

/// An input: how it is read, then the three files, of which each but the last begins with its length.
struct Input {
  uint8_t seq_len = 4;
  /// Bit 0: data.document_mask; 1: there is a PREFIX.json; 2: a small vocabulary; 3: data.begin_token.
  uint8_t flags = 0;
  std::string idx, json, bin;
};

Input parse(std::string_view text) {
  Input input;
  const auto take = [&](size_t bytes) {
    const std::string_view part = text.substr(0, bytes);
    text.remove_prefix(part.size());
    return std::string(part);
  };
  const auto sized = [&] {
    uint16_t bytes = 0;
    const std::string length = take(sizeof bytes);
    std::memcpy(&bytes, length.data(), length.size());
    return take(bytes);
  };
  const std::string head = take(2);
  if (head.size() == 2)
    input.seq_len = static_cast<uint8_t>(head[0]), input.flags = static_cast<uint8_t>(head[1]);
  input.idx = sized();
  input.json = sized();
  input.bin = text;
  return input;
}

template <class T>
void append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::string written(const Input& input) {
  std::string out;
  append(out, input.seq_len);
  append(out, input.flags);
  append(out, static_cast<uint16_t>(input.idx.size()));
  out += input.idx;
  append(out, static_cast<uint16_t>(input.json.size()));
  out += input.json;
  return out + input.bin;
}

/// An index that describes all of `bin`: sequences of random lengths, in random documents.
std::string index_of(std::string& bin, Random& random) {
  static const uint8_t codes[] = {1, 4, 8};
  const uint8_t code = random.of(codes);
  const int64_t size = code == 1 ? 1 : code == 8 ? 2 : 4;
  if (std::ssize(bin) < size) bin.resize(static_cast<size_t>(size) * (1 + random.below(20)));
  bin.resize(bin.size() / static_cast<size_t>(size) * static_cast<size_t>(size));
  std::vector<int32_t> lengths;
  for (int64_t left = std::ssize(bin) / size; left > 0; left -= lengths.back())
    lengths.push_back(1 +
                      static_cast<int32_t>(random.below(static_cast<uint32_t>(std::min<int64_t>(left, 9)))));
  std::vector<int64_t> bounds = {0};
  for (const auto last = std::ssize(lengths); bounds.back() < last || bounds.size() < 2;)
    bounds.push_back(std::min<int64_t>(last, bounds.back() + random.below(4)));
  std::string idx("MMIDIDX\0\0", 9);
  append<uint64_t>(idx, 1);
  append(idx, code);
  append<uint64_t>(idx, lengths.size());
  append<uint64_t>(idx, bounds.size());
  for (const int32_t length : lengths) append(idx, length);
  int64_t begin = 0;
  for (const int32_t length : lengths) append(idx, begin), begin += length * size;
  for (const int64_t bound : bounds) append(idx, bound);
  return idx;
}

/// One number of the index replaced by a critical one.
void damage(std::string& idx, Random& random) {
  static const int64_t values[] = {0,
                                   1,
                                   -1,
                                   2,
                                   255,
                                   65536,
                                   INT32_MAX,
                                   INT32_MIN,
                                   INT64_MAX,
                                   INT64_MIN,
                                   int64_t{1} << 32,
                                   int64_t{1} << 60};
  const int64_t value = random.one_in(3) ? static_cast<int64_t>(random.below(64)) : random.of(values);
  const size_t bytes = random.one_in(2) ? 8 : 4;
  if (idx.size() < bytes) return;
  std::memcpy(idx.data() + random.below(static_cast<uint32_t>(idx.size() - bytes + 1)), &value, bytes);
}

std::string changed(const std::string& text, size_t most, Random& random) {
  if (random.one_in(8)) return mutated(text, most);
  Input input = parse(text);
  const size_t room = most / 3;
  switch (random.below(6)) {
    case 0:
      input.idx = mutated(input.idx, room);
      break;
    case 1:
      input.bin = mutated(input.bin, room);
      break;
    case 2:
      input.json = mutated_json(input.json, room, random);
      break;
    case 3:
      input.seq_len = static_cast<uint8_t>(random.below(20));
      input.flags = static_cast<uint8_t>(random.below(16));
      break;
    case 4:
      damage(input.idx, random);
      break;
    default:
      input.bin.resize(std::min<size_t>(room, random.below(200)), static_cast<char>(random.below(256)));
      input.idx = index_of(input.bin, random);
      break;
  }
  if (random.one_in(4)) input.idx = index_of(input.bin, random);
  if (random.one_in(8)) damage(input.idx, random);
  return written(input);
}

/// What every reader of a file relies on.
void check_file(const TokenFile& file) {
  const int64_t tokens = file.num_tokens();
  expect(tokens > 0 && file.num_sequences() > 0 && file.num_documents() > 0,
         "an empty token file was accepted");
  std::vector<int32_t> all(static_cast<size_t>(tokens));
  file.read(0, tokens, all.data());
  int64_t documents = 0, last = -1;
  for (int64_t i = 0; i < tokens; ++i) {
    expect(file.token(i) == all[static_cast<size_t>(i)], "a token read alone differs");
    const int64_t begin = file.document_begin(i), end = file.document_end(i);
    expect(begin <= i && i < end && end <= tokens, "a token lies outside its document");
    documents += begin != last;
    last = begin;
  }
  expect(documents == file.num_filled_documents(), "the number of documents with tokens is wrong");
  for (int64_t s = 0; s < file.num_sequences(); ++s)
    expect(file.sequence_begin(s) < file.sequence_begin(s + 1), "a sequence is empty");
  // As unsigned numbers negative tokens are the largest.
  uint32_t largest = 0;
  for (const int32_t token : all) largest = std::max(largest, static_cast<uint32_t>(token));
  expect(static_cast<uint32_t>(file.max_token()) == largest, "max_token is wrong");
  for (const int64_t vocabulary : {int64_t{1}, int64_t{100}, int64_t{70000}}) {
    int64_t first = -1;
    for (int64_t i = tokens - 1; i >= 0; --i)
      if (static_cast<uint32_t>(all[static_cast<size_t>(i)]) >= vocabulary) first = i;
    expect(file.find_outside(vocabulary) == first, "find_outside is wrong");
  }
  expect(!file.fingerprint().empty() && !file.sampled_fingerprint().empty(), "no fingerprint");
}

/// What attention and the loss rely on: a row of a batch.
void check_rows(const std::vector<int32_t>* columns, int64_t count, int64_t seq_len, int64_t vocab_size) {
  for (int64_t at = 0; at < count * seq_len; ++at) {
    const auto i = static_cast<size_t>(at);
    const int64_t begin = at / seq_len * seq_len;
    expect(columns[0][i] >= 0 && columns[0][i] < vocab_size, "a token outside the vocabulary came through");
    expect(columns[1][i] >= kPadding && columns[1][i] < vocab_size,
           "a target outside the vocabulary came through");
    expect(columns[2][i] == at - begin, "a position is wrong");
    expect(columns[3][i] >= begin && columns[3][i] <= at, "first_key is outside its row");
  }
}

void check_blend(const Input& input) {
  const int64_t seq_len = std::max<int64_t>(1, input.seq_len % 20), vocab_size = input.flags & 4 ? 100 : 257;
  Config config;
  config.model.vocab_size = vocab_size;
  std::optional<int64_t> begin_token;
  if (input.flags & 8) begin_token = 10;
  const Blend blend({{"a", "t", 1.0}, {"b", "t", 0.5}}, seq_len, vocab_size, (input.flags & 1) != 0, 7,
                    begin_token);
  for (const Blend::SourceInfo& source : blend.sources())
    expect(source.samples > 0 && source.unread >= 0 && source.unread < source.tokens,
           "a source's counts are impossible");
  constexpr int64_t kRows = 3;
  std::vector<int32_t> columns[4];
  for (auto& column : columns) column.assign(static_cast<size_t>(kRows * seq_len), 12345);
  attempt([&] {
    for (int64_t first = 0; first < 6; first += kRows) {
      blend.fill(first, kRows, columns[0].data(), columns[1].data(), columns[2].data(), columns[3].data());
      check_rows(columns, kRows, seq_len, vocab_size);
    }
  });
  attempt([&] {
    for (int64_t first = 0; first < blend.num_sequential_samples(); first += kRows) {
      blend.whole(first);
      blend.fill_sequential(first, kRows, columns[0].data(), columns[1].data(), columns[2].data(),
                            columns[3].data());
      check_rows(columns, kRows, seq_len, vocab_size);
    }
  });
  const auto tokenizer = make_tokenizer({});
  attempt([&] { check_tokens(blend, *tokenizer, config); });
}

}  // namespace
}  // namespace sluice::fuzz

using namespace sluice;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const fuzz::Input input = fuzz::parse(fuzz::text_of(data, size));
  fuzz::clear();
  fuzz::write("t.idx", input.idx);
  fuzz::write("t.bin", input.bin);
  if (input.flags & 2) fuzz::write("t.json", input.json);
  fuzz::attempt([&] { read_token_file_info("t"); });
  fuzz::attempt([&] { fuzz::check_file(TokenFile("t")); });
  fuzz::attempt([&] { fuzz::check_blend(input); });
  return 0;
}

SLUICE_FUZZ_MUTATOR(::sluice::fuzz::changed(text, most, random))
