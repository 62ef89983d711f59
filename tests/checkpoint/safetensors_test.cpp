#include "checkpoint/safetensors.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>

#include "core/strict_json.h"

using namespace sluice;
using Catch::Matchers::Contains;

namespace {

std::string file_of(const std::string& header, const std::string& data,
                    std::optional<uint64_t> claimed = {}) {
  const uint64_t length = claimed.value_or(header.size());
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file + header + data;
}

SafetensorsHeader parse(const std::string& file) {
  // A copy without slack, so that a sanitizer sees a read past the end.
  const std::vector<unsigned char> exact(file.begin(), file.end());
  return parse_safetensors(exact.data(), static_cast<int64_t>(exact.size()), "x.safetensors");
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape, offsets);
}

}  // namespace

TEST_CASE("a written safetensors header is read back", "[safetensors]") {
  std::vector<SafetensorsEntry> entries = {{"b.weight", "BF16", {3}},
                                           {"a \"quoted\" \n name", "BF16", {2, 2}},
                                           {"scalar", "F32", {}},
                                           {"empty", "F32", {0, 7}},
                                           {"wide", "F64", {1, 1, 1, 1, 2}}};
  const std::string bytes = make_safetensors_header(entries);
  CHECK(bytes.size() % 64 == 0);
  CHECK(entries.front().name == "wide");
  const SafetensorsHeader header = parse(bytes + std::string(16 + 4 + 8 + 6, 'x'));
  CHECK(header.metadata == std::map<std::string, std::string>{{"format", "pt"}});
  REQUIRE(header.entries.size() == entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    CHECK(header.entries[i].name == entries[i].name);
    CHECK(header.entries[i].shape == entries[i].shape);
    CHECK(header.entries[i].begin == entries[i].begin);
  }
  std::vector<SafetensorsEntry> twice = {{"a", "F32", {1}}, {"a", "BF16", {1}}};
  CHECK_THROWS_WITH(make_safetensors_header(twice), Contains("given twice"));
  std::vector<SafetensorsEntry> none;
  CHECK(parse(make_safetensors_header(none)).entries.empty());
}

TEST_CASE("hostile safetensors headers are refused with a reason", "[safetensors]") {
  const std::string good = tensor("a", "F32", "[2]", "[0,8]");
  const std::string eight(8, 'x');
  CHECK(parse(file_of("{" + good + "}", eight)).entries.size() == 1);
  CHECK(parse(file_of("{" + good + "}   ", eight)).entries.size() == 1);

  struct Case {
    std::string file, reason;
  };
  const auto one = [&](const std::string& entry, const std::string& reason) {
    return Case{file_of("{" + entry + "}", eight), reason};
  };
  const std::vector<Case> cases = {
      {"", "too few"},
      {std::string(7, '\0'), "too few"},
      {file_of("{}", "", std::numeric_limits<uint64_t>::max()), "at most"},
      {file_of("{}", "", (uint64_t{16} << 20) + 1), "at most"},
      {file_of("{}", "", uint64_t{1} << 63), "at most"},
      {file_of("{}", "", 100), "in a file of"},
      {file_of("", ""), "begin with '{'"},
      {file_of(" {}", ""), "begin with '{'"},
      {file_of("[]", ""), "begin with '{'"},
      {file_of("{", ""), "parse error"},
      {file_of("{}{}", ""), "parse error"},
      {file_of("{}x", ""), "parse error"},
      {file_of(std::string("{}\0{}", 5), ""), "NUL"},
      {file_of("{\"a\xff\":1}", ""), "UTF-8"},
      {file_of("{\"a\":1}", ""), "unexpected a number"},
      {file_of("{\"a\":[]}", ""), "unexpected a list"},
      {file_of("{\"a\":{}}", ""), "needs dtype, shape and data_offsets"},
      {file_of("{" + good + "}", eight + "y"), "the tensors take 8 bytes, the file holds 9"},
      {file_of("{" + good + "}", "xxxxxxx"), "the tensors take 8 bytes, the file holds 7"},
      {file_of("{}", "x"), "the tensors take 0 bytes"},
      {file_of("{" + good + "," + good + "}", eight), "begins at byte 0"},
      {file_of("{" + good + "," + tensor("a", "F32", "[2]", "[8,16]") + "}", eight + eight),
       "'a' occurs twice"},
      {file_of(
           "{" + tensor("a", "F32", "[0]", "[0,0]") + "," + tensor("\\u0061", "F32", "[0]", "[0,0]") + "}",
           ""),
       "'a' occurs twice"},
      {file_of("{" + good + "," + tensor("b", "F32", "[1]", "[4,8]") + "}", eight), "begins at byte 4"},
      {file_of("{" + tensor("b", "F32", "[1]", "[4,8]") + "}", eight), "begins at byte 4"},
      one(tensor("a", "F99", "[2]", "[0,8]"), "unknown dtype 'F99'"),
      one(tensor("a", "F32", "[2]", "[8,0]"), "do not hold the 8 bytes"),
      one(tensor("a", "F32", "[3]", "[0,8]"), "do not hold the 12 bytes"),
      one(tensor("a", "F4", "[3]", "[0,8]"), "do not fill whole bytes"),
      one(tensor("a", "F32", "[-2]", "[0,8]"), "a negative number"),
      one(tensor("a", "F32", "[-0]", "[0,8]"), "a negative number"),
      one(tensor("a", "F32", "[2.0]", "[0,8]"), "a fraction"),
      one(tensor("a", "F32", "[1e400]", "[0,8]"), "number"),
      one(tensor("a", "F32", "[18446744073709551615]", "[0,8]"), "above 2^63"),
      one(tensor("a", "F32", "[36893488147419103232]", "[0,8]"), "a fraction"),
      one(tensor("a", "F32", "[4294967296,4294967296]", "[0,8]"), "overflows"),
      one(tensor("a", "F32", "[4611686018427387904,4]", "[0,0]"), "overflows"),
      one(tensor("a", "F32", "[[2]]", "[0,8]"), "unexpected a list"),
      one(tensor("a", "F32", "2", "[0,8]"), "unexpected a number"),
      one(tensor("a", "F32", "[2]", "[0,8,8]"), "two numbers"),
      one(tensor("a", "F32", "[null]", "[0,8]"), "null"),
      one(R"("a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]})", "'shape' occurs twice"),
      one(R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"extra":1})", "unknown key 'extra'"),
      one(R"("a":{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]})", "unexpected a list"),
      one(good + R"(,"__metadata__":{"a":1})", "unexpected a number"),
      one(good + R"(,"__metadata__":{"a":"1","a":"2"})", "occurs twice"),
      one(good + R"(,"__metadata__":{},"__metadata__":{})", "occurs twice"),
      one(good + R"(,"__metadata__":"x")", "unexpected a string"),
      {file_of(std::string(100000, '[').replace(0, 1, "{"), ""), "parse error"},
      {file_of("{\"a\":" + std::string(100000, '{'), ""), ""},
  };
  for (const Case& c : cases) {
    INFO(printable(c.file, 300));
    CHECK_THROWS_WITH(parse(c.file),
                      Contains("x.safetensors: not a valid safetensors file") && Contains(c.reason));
    try {
      parse(c.file);
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::data);
      CHECK(std::string(error.what()).size() < 700);
      for (const char ch : std::string(error.what())) CHECK((ch >= 0x20 && ch < 0x7f));
    }
  }
}

TEST_CASE("mutated safetensors files are either read or refused", "[safetensors]") {
  std::vector<SafetensorsEntry> entries = {{"model.embed_tokens.weight", "F32", {4, 3}},
                                           {"model.norm.weight", "BF16", {3}},
                                           {"x", "F16", {1}},
                                           {"e", "U8", {0}}};
  const std::string seed = make_safetensors_header(entries) + std::string(48 + 6 + 2, 'd');
  const std::string words[] = {"{",         "}",       "[",
                               "]",         ",",       ":",
                               "\"",        "0",       "18446744073709551615",
                               "\"shape\"", "null",    "-1",
                               "1e9",       "\\u0000", "__metadata__",
                               "\xff",      "F64",     "[0,0]"};
  std::mt19937_64 random(7);
  int accepted = 0, refused = 0;
  for (int round = 0; round < 6000; ++round) {
    std::string file = seed;
    for (uint64_t edits = 1 + random() % 3; edits > 0; --edits) {
      const size_t at = random() % (file.size() - 8);
      switch (random() % 6) {
        case 0:
          file[at] = static_cast<char>(file[at] ^ (1 << random() % 8));
          break;
        case 1:
          file[at] = static_cast<char>(random());
          break;
        case 2:
          file.erase(at, 1 + random() % 9);
          break;
        case 3:
          file.insert(at, words[random() % std::size(words)]);
          break;
        case 4:
          file.replace(at, 3, words[random() % std::size(words)]);
          break;
        default:
          file.resize(8 + at);
          break;
      }
      if (file.size() < 17) file.resize(17, '}');
    }
    // Half of the time the length is put right, so that the mutation reaches the deeper checks.
    const size_t end = file.rfind('}');
    if (random() % 2 && end != std::string::npos && end >= 8) {
      const uint64_t length = end - 7;
      std::memcpy(file.data(), &length, 8);
    }
    try {
      const SafetensorsHeader header = parse(file);
      int64_t covered = 0;
      for (const SafetensorsEntry& entry : header.entries) {
        REQUIRE(entry.begin == covered);
        covered = entry.end;
      }
      REQUIRE(header.data_begin + covered == std::ssize(file));
      ++accepted;
    } catch (const Error& error) {
      REQUIRE(error.code() == ExitCode::data);
      ++refused;
    }
  }
  CHECK(accepted > 50);
  CHECK(refused > 1000);
}

TEST_CASE("values are converted exactly, or rounded to nearest even", "[safetensors]") {
  // Every f16 against its value by definition.
  std::vector<uint16_t> halves(65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  std::vector<float> floats(65536);
  const SafetensorsEntry f16{"h", "F16", {65536}, 0, 131072};
  convert_values(reinterpret_cast<const unsigned char*>(halves.data()), f16,
                 Tensor(floats.data(), DType::f32, {65536}));
  int wrong = 0;
  for (int i = 0; i < 65536; ++i) {
    const int exponent = (i >> 10) & 31, fraction = i & 1023;
    const double magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                             : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                                            : std::ldexp(fraction, -24);
    const double expected = i & 0x8000 ? -magnitude : magnitude;
    const auto got = static_cast<double>(floats[static_cast<size_t>(i)]);
    wrong += !(std::isnan(expected) ? std::isnan(got)
                                    : got == expected && std::signbit(got) == std::signbit(expected));
  }
  CHECK(wrong == 0);

  const std::vector<float> source = {1.0f, 1.00390625f, 1.01171875f, -0.0f, 3.4e38f, 1e-40f};
  const auto* bytes = reinterpret_cast<const unsigned char*>(source.data());
  const SafetensorsEntry f32{"x", "F32", {6}, 0, 24};
  std::vector<bf16> narrow(6);
  convert_values(bytes, f32, Tensor(narrow.data(), DType::bf16, {6}));
  for (size_t i = 0; i < 6; ++i) CHECK(narrow[i].bits == bf16(source[i]).bits);
  CHECK(narrow[1].bits == 0x3f80);  // half way: to even, down
  CHECK(narrow[2].bits == 0x3f82);  // half way: to even, up
  std::vector<double> wide(6);
  convert_values(bytes, f32, Tensor(wide.data(), DType::f64, {2, 3}));
  for (size_t i = 0; i < 6; ++i) CHECK(wide[i] == static_cast<double>(source[i]));
  const SafetensorsEntry back{"x", "BF16", {6}, 0, 12};
  std::vector<float> again(6);
  convert_values(reinterpret_cast<const unsigned char*>(narrow.data()), back,
                 Tensor(again.data(), DType::f32, {6}));
  for (size_t i = 0; i < 6; ++i) CHECK(again[i] == static_cast<float>(narrow[i]));

  CHECK_FALSE(convertible({"i", "I64", {1}, 0, 8}, DType::f32));
  CHECK_FALSE(convertible({"i", "F32", {1}, 0, 4}, DType::i32));
  CHECK(convertible({"i", "I32", {1}, 0, 4}, DType::i32));
  CHECK_THROWS_AS(convert_values(bytes, f32, Tensor(again.data(), DType::f32, {5})), Error);
}

TEST_CASE("strict JSON refuses input that the parser would accept", "[safetensors]") {
  CHECK(parse_strict_json(R"({"a": [1, {"b": 2}], "c": {"b": 1}})", "f")["a"][1]["b"] == 2);
  CHECK_THROWS_WITH(parse_strict_json(R"({"a": {"b": 1, "b": 2}})", "f.json"), "f.json: duplicate key 'b'");
  CHECK_THROWS_WITH(parse_strict_json(std::string("{}\0", 3), "f"), Contains("NUL"));
  CHECK_THROWS_WITH(parse_strict_json(std::string(1000, '['), "f"), Contains("nested deeper"));
  CHECK_THROWS_WITH(parse_strict_json("{} x", "f"), Contains("f: not JSON"));
  CHECK(printable(std::string("a\x1b[31m\n\xc3") + std::string(200, 'b'), 10) == "a\\x1b[31m\\x0a\\xc3bb...");
}
