// Text and JSONL, gzipped or not, to token files. The input's first byte says how it is given: bit 0: as
// JSONL; 1: gzipped here, so that what is inside is tested; 2: gzipped, then one byte is changed; 3: in two
// gzip members.
#include <zlib.h>

#include <nlohmann/json.hpp>

#include "core/line_reader.h"
#include "data/text_tokenizer.h"
#include "support/fuzz.h"

namespace sluice::fuzz {
namespace {

std::string gzipped(const std::string& text) {
  z_stream stream{};
  expect(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK, "zlib");
  std::string out(deflateBound(&stream, text.size()) + 64, '\0');
  std::string copy = text;
  stream.next_in = reinterpret_cast<Bytef*>(copy.data());
  stream.avail_in = static_cast<uInt>(copy.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  expect(deflate(&stream, Z_FINISH) == Z_STREAM_END, "zlib");
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

/// The input's first byte, and what follows it.
std::string changed(const std::string& input, size_t most, Random& random) {
  if (input.empty() || random.one_in(6)) return mutated(input, most);
  std::string head = input.substr(0, 1), text = input.substr(1);
  if (random.one_in(10)) head[0] = static_cast<char>(random.below(16));
  if ((head[0] & 1) == 0 || random.one_in(3)) return head + mutated(text, most - 1);
  const size_t middle = random.below(static_cast<uint32_t>(text.size()) + 1);
  const size_t before = middle == 0 ? std::string::npos : text.rfind('\n', middle - 1);
  const size_t begin = before == std::string::npos ? 0 : before + 1,
               end = std::min(text.find('\n', begin), text.size());
  const std::string line = text.substr(begin, end - begin);
  if (random.one_in(4))
    text.insert(begin, line + "\n");
  else
    text.replace(begin, line.size(), mutated_json(line, 500, random));
  return (head + text).substr(0, most);
}

/// The texts of all documents, read again from the token files that were written.
std::string text_of_files(const std::string& prefix) {
  const TokenFile file(prefix);
  std::vector<int32_t> tokens(static_cast<size_t>(file.num_tokens()));
  file.read(0, file.num_tokens(), tokens.data());
  std::string text;
  for (const int32_t token : tokens)
    if (token < 256) text += static_cast<char>(token);
  return text;
}

/// What the documents must hold, in order.
std::string expected_text(const std::string& text, bool jsonl) {
  std::string all;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size() - 1) + 1;
    std::string line = text.substr(begin, end - begin);
    begin = end;
    if (jsonl) {
      const auto object = nlohmann::json::parse(line, nullptr, false);
      if (object.is_object()) all += object.value("text", "");
      continue;
    }
    std::string bare = line;
    while (bare.ends_with('\n') || bare.ends_with('\r')) bare.pop_back();
    if (bare != "<|endoftext|>") all += line;
  }
  return all;
}

/// Lines read in parts of any size are the file.
void check_lines(const std::string& path, const std::string& text) {
  for (const size_t limit : {size_t{1}, size_t{7}, size_t{1} << 20}) {
    LineReader reader(path);
    std::string all;
    for (std::string line; reader.next(line, limit);) {
      expect(!line.empty() && line.size() <= limit, "a part of a line is too long");
      expect(line.find('\n') >= line.size() - 1, "a part goes on after a line's end");
      all += line;
    }
    expect(all == text, "the lines are not the file");
  }
}

}  // namespace
}  // namespace sluice::fuzz

using namespace sluice;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const int how = data[0];
  std::string content = fuzz::text_of(data + 1, size - 1);
  const std::string text = content;
  bool sound = !content.starts_with("\x1f\x8b");  // zlib takes it for compressed
  const bool jsonl = (how & 1) != 0, packed = (how & 6) != 0;
  if (packed) {
    sound = (how & 4) == 0;
    const size_t half = how & 8 ? text.size() / 2 : text.size();
    content = fuzz::gzipped(text.substr(0, half));
    if (half < text.size()) content += fuzz::gzipped(text.substr(half));
    if (!sound) content[data[size - 1] % content.size()] ^= static_cast<char>(1 << (size % 8));
  }
  fuzz::clear();
  const std::string path = std::string(jsonl ? "a.jsonl" : "a.txt") + (packed ? ".gz" : "");
  fuzz::write(path, content);
  if (sound) fuzz::attempt([&] { fuzz::check_lines(path, text); });
  fuzz::attempt([&] {
    TokenizeOptions options;
    options.output = "out";
    const auto tokenizer = make_tokenizer({});
    TextTokenizer reader(options, *tokenizer, "byte");
    reader.read(path);
    reader.finish();
    fuzz::must("the token files that were written are refused", [&] {
      const std::string written = fuzz::text_of_files("out");
      if (sound) fuzz::expect(written == fuzz::expected_text(text, jsonl), "the tokens are not the text");
      fuzz::expect(read_token_file_info("out").has_value(), "PREFIX.json cannot be read back");
    });
  });
  return 0;
}

SLUICE_FUZZ_MUTATOR(::sluice::fuzz::changed(text, most, random))
