// SentencePiece models, of which the library believes much: each goes through the check that stands before
// the library (data/sentencepiece_check.h), and what passes is loaded and encodes texts. The library is not
// instrumented, so the normalisation automaton of an accepted model is also walked here, within bounds.
#include "data/sentencepiece.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "data/sentencepiece_check.h"
#include "support/fuzz.h"

namespace sluice::fuzz {
namespace {

struct Field {
  uint64_t tag = 0;    // number << 3 | wire type
  uint64_t value = 0;  // of a varint
  std::string bytes;   // otherwise
};

/// The fields of a protocol buffer message; false where it is none.
bool parse(std::string_view text, std::vector<Field>& fields) {
  const auto varint = [&](uint64_t& value) {
    value = 0;
    for (int shift = 0; shift < 64 && !text.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(text[0]);
      text.remove_prefix(1);
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return true;
    }
    return false;
  };
  while (!text.empty()) {
    Field field;
    if (!varint(field.tag)) return false;
    uint64_t bytes = 0;
    switch (field.tag & 7) {
      case 0:
        if (!varint(field.value)) return false;
        break;
      case 1:
        bytes = 8;
        break;
      case 5:
        bytes = 4;
        break;
      case 2:
        if (!varint(bytes)) return false;
        break;
      default:
        return false;
    }
    if (bytes > text.size()) return false;
    field.bytes = text.substr(0, bytes);
    text.remove_prefix(bytes);
    fields.push_back(std::move(field));
  }
  return true;
}

void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

std::string written(const std::vector<Field>& fields) {
  std::string out;
  for (const Field& field : fields) {
    append_varint(out, field.tag);
    if ((field.tag & 7) == 0) append_varint(out, field.value);
    if ((field.tag & 7) == 2) append_varint(out, field.bytes.size());
    out += field.bytes;
  }
  return out;
}

/// The table of a normaliser: the size of the automaton, its units, the texts that it puts in.
std::string changed_map(const std::string& map, size_t most, Random& random) {
  std::string out = map;
  if (out.size() < 8 || random.one_in(10)) return mutated(map, most);
  uint32_t bytes = 0;
  std::memcpy(&bytes, out.data(), 4);
  const auto units = static_cast<uint32_t>(std::min<size_t>(bytes, out.size() - 4) / 4);
  if (units == 0) return mutated(map, most);
  for (uint32_t n = 1 + random.below(4); n > 0; --n) {
    char* at = out.data() + 4 + 4 * size_t{random.below(units)};
    uint32_t unit = 0;
    std::memcpy(&unit, at, 4);
    switch (random.below(6)) {
      case 0:
        unit ^= 1u << random.below(32);
        break;
      case 1:
        unit = (unit & 0x3ff) | random.below(2 * units) << 10;
        break;
      case 2:
        unit = 0x80000000u | random.below(static_cast<uint32_t>(out.size()));
        break;
      case 3:
        std::memcpy(&unit, out.data() + 4 + 4 * size_t{random.below(units)}, 4);
        break;
      case 4:
        unit |= 0x200;  // its offset is in blocks of 256
        break;
      default:
        unit ^= random.below(256);
        break;
    }
    std::memcpy(at, &unit, 4);
  }
  if (random.one_in(8))
    out.resize(4 + 4 * size_t{units} + random.below(static_cast<uint32_t>(out.size())), 'a');
  if (random.one_in(16)) std::memset(out.data(), static_cast<int>(random.below(256)), 1 + random.below(3));
  return out;
}

std::string changed_message(const std::string& message, size_t most, Random& random, int depth) {
  std::vector<Field> fields;
  if (!parse(message, fields) || fields.empty()) return mutated(message, most);
  Field& field = random.of(fields);
  const uint64_t number = field.tag >> 3;
  switch (random.below(10)) {
    case 0: {
      const Field copy = random.of(fields);
      fields.push_back(copy);
      break;
    }
    case 1:
      std::swap(field, random.of(fields));
      break;
    case 2:
      fields.erase(fields.begin() + (&field - fields.data()));
      break;
    default:
      if ((field.tag & 7) == 0) {
        static const uint64_t values[] = {0, 1, 2, 3, 4, 5, 6, 127, 128, uint64_t{1} << 31, UINT64_MAX};
        field.value = random.of(values);
      } else if (depth == 1 && number == 2 && field.bytes.size() > 64) {
        field.bytes = changed_map(field.bytes, most, random);
      } else if (depth == 0 && (field.tag & 7) == 2) {
        field.bytes = changed_message(field.bytes, most, random, 1);
      } else {
        const size_t size = field.bytes.size();
        field.bytes = mutated(field.bytes, std::min<size_t>(most, 300));
        if ((field.tag & 7) != 2) field.bytes.resize(size);
      }
      break;
  }
  return written(fields);
}

/// The normaliser is one of hundreds of fields: it is chosen half of the time.
std::string changed(const std::string& model, size_t most, Random& random) {
  if (random.one_in(10)) return mutated(model, most);
  std::vector<Field> fields;
  if (random.one_in(2) && parse(model, fields)) {
    for (Field& field : fields)
      if (field.tag == (3 << 3 | 2)) field.bytes = changed_message(field.bytes, most, random, 1);
    const std::string out = written(fields);
    if (out.size() <= most) return out;
  }
  const std::string out = changed_message(model, most, random, 0);
  return out.size() <= most ? out : model.substr(0, most);
}

/// The automaton, walked as the library does (darts-clone's commonPrefixSearch), with every access checked.
class Walk {
 public:
  explicit Walk(std::string_view map) {
    uint32_t bytes = 0;
    expect(map.size() >= 4, "a table without a size was accepted");
    std::memcpy(&bytes, map.data(), 4);
    expect(bytes % 4 == 0 && bytes <= map.size() - 4, "a table larger than its field was accepted");
    units_.resize(bytes / 4);
    std::memcpy(units_.data(), map.data() + 4, bytes);
    texts_ = map.substr(4 + bytes);
  }

  void all() { follow(start(), 0); }

 private:
  uint32_t unit(size_t at) const {
    if (at >= units_.size())
      finding(fmt::format("unit {} of {} of an accepted table is read", at, units_.size()));
    return units_[at];
  }
  static size_t offset(uint32_t unit) { return size_t{unit >> 10} << ((unit & (1u << 9)) >> 6); }
  size_t start() const { return offset(unit(0)); }

  void follow(size_t node, int depth) {
    if (depth > 6 || steps_ > 50000) return;
    for (uint32_t byte = 1; byte < 256; ++byte) {
      ++steps_;
      const size_t next = node ^ byte;
      const uint32_t bits = unit(next);
      if ((bits & (1u << 31 | 0xff)) != byte) continue;
      const size_t base = next ^ offset(bits);
      if ((bits >> 8 & 1) != 0) {
        const uint32_t value = unit(base) & 0x7fffffffu;
        if (value >= texts_.size() || texts_.find('\0', value) == std::string_view::npos)
          finding(fmt::format("an accepted table puts in a text at {}, of {} bytes", value, texts_.size()));
      }
      follow(base, depth + 1);
    }
  }

  std::vector<uint32_t> units_;
  std::string_view texts_;
  int64_t steps_ = 0;
};

void walk_tables(const std::string& model) {
  std::vector<Field> fields, inner;
  if (!parse(model, fields)) finding("a model that is no message was accepted");
  for (const Field& field : fields) {
    const uint64_t number = field.tag >> 3;
    if (number != 3 && number != 5) continue;
    inner.clear();
    if (!parse(field.bytes, inner)) finding("a normaliser that is no message was accepted");
    for (const Field& map : inner)
      if (map.tag >> 3 == 2 && !map.bytes.empty()) Walk(map.bytes).all();
  }
}

void check_tokenizer(const Tokenizer& tokenizer, const std::string& text) {
  const std::vector<int32_t> tokens = tokenizer.encode(text);
  for (const int32_t token : tokens) {
    expect(token >= 0 && token < tokenizer.vocab_size(), "a token outside the vocabulary");
    expect(tokenizer.token_bytes(token) >= 0, "a token of fewer than no bytes");
  }
  const int64_t lost = tokenizer.lost_bytes(text, tokens);
  expect(lost >= 0 && lost <= std::ssize(text) + 1, "the bytes that are lost are miscounted");
  tokenizer.decode(tokens);
}

}  // namespace
}  // namespace sluice::fuzz

using namespace sluice;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string model = fuzz::text_of(data, size);
  if (!fuzz::attempt([&] { check_sentencepiece_model(model, "m.model"); })) return 0;
  fuzz::walk_tables(model);
  fuzz::write("m.model", model);
  fuzz::attempt([&] {
    const auto tokenizer = make_sentencepiece_tokenizer("m.model");
    fuzz::expect(tokenizer->end_of_document() < tokenizer->vocab_size(), "the end of a document is no token");
    std::string every;
    for (int byte = 0; byte < 256; ++byte) every += static_cast<char>(byte);
    for (const std::string& text :
         {std::string("In the beginning\xe2\x80\xa6 \xef\xac\x83 \xef\xbc\xa1 was  word 7\n"), every,
          model.substr(model.size() - std::min<size_t>(model.size(), 200)), std::string()})
      fuzz::check_tokenizer(*tokenizer, text);
  });
  return 0;
}

SLUICE_FUZZ_MUTATOR(::sluice::fuzz::changed(text, most, random))
