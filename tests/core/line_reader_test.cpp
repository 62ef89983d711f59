#include "core/line_reader.h"

#include <catch2/catch.hpp>
#include <fstream>
#include <vector>

#include "core/error.h"
#include "support/temp_folder.h"

using namespace sluice;
using Catch::Matchers::Contains;

namespace {

std::string gzip(const std::string& text) {
  z_stream z{};
  REQUIRE(deflateInit2(&z, 1, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  std::string packed(deflateBound(&z, text.size()) + 64, '\0');
  z.next_in = reinterpret_cast<unsigned char*>(const_cast<char*>(text.data()));
  z.avail_in = static_cast<unsigned>(text.size());
  z.next_out = reinterpret_cast<unsigned char*>(packed.data());
  z.avail_out = static_cast<unsigned>(packed.size());
  REQUIRE(deflate(&z, Z_FINISH) == Z_STREAM_END);
  packed = packed.substr(0, z.total_out);
  deflateEnd(&z);
  return packed;
}

/// All lines of a file with this content, read in parts of `limit` bytes.
std::string read(const std::string& content, size_t limit = 1 << 20) {
  const TempFolder folder;
  std::ofstream(folder / "file", std::ios::binary) << content;
  LineReader reader(folder / "file");
  std::string all;
  for (std::string line; reader.next(line, limit);) all += line;
  return all;
}

void refused(const std::string& content, const std::string& part) {
  try {
    read(content);
    FAIL_CHECK("was read; expected: " << part);
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::data);
    CHECK_THAT(error.what(), Contains(part));
  }
}

/// Larger than every buffer, and hard to compress.
std::string long_text() {
  std::string text;
  for (uint32_t i = 0, x = 1; i < 700000; ++i) {
    x = x * 1664525 + 1013904223;
    text += static_cast<char>(x >> 24);
    if (i % 97 == 0) text += '\n';
  }
  for (int i = 0; i < 3000000; ++i) text += 'a';  // and easy to: much comes out of little
  return text;
}

}  // namespace

TEST_CASE("plain and gzipped files of one and several members are read whole", "[line_reader]") {
  const std::string text = long_text();
  CHECK(read("") == "");
  CHECK(read("\x1f") == "\x1f");
  CHECK(read("one\ntwo") == "one\ntwo");
  CHECK((read(text) == text));
  CHECK((read(gzip(text)) == text));
  CHECK((read(gzip(text), 7) == text));
  CHECK((read(gzip("one\n") + gzip("") + gzip(text) + gzip("end")) == "one\n" + text + "end"));
  // Every place of the border between two members in the input's buffer of 256 KiB.
  const std::string noise = text.substr(0, 300000);
  const size_t packed = gzip(noise).size();
  REQUIRE(packed > (1 << 18) + 4);
  for (size_t cut = noise.size() - (packed - (1 << 18)) - 40; cut < noise.size(); cut += 977)
    CHECK((read(gzip(noise.substr(0, cut)) + gzip(noise.substr(cut))) == noise));
  for (size_t behind = 0; behind < 4; ++behind) {
    // Stored blocks, whose size is known: the second member begins at, or its two magic bytes lie around,
    // the end of the buffer.
    std::string first = gzip("x");
    const std::string name((1 << 18) - first.size() - behind - 1, 'n');
    first[3] = 8;  // a header with a file name
    first.insert(10, name + '\0');
    REQUIRE(first.size() == (1 << 18) - behind);
    CHECK(read(first + gzip("y")) == "xy");
  }
  // Zeros fill the blocks of a tape.
  CHECK(read(gzip("one\n") + std::string(600000, '\0')) == "one\n");
}

TEST_CASE("what lies behind gzip data is not dropped in silence", "[line_reader]") {
  refused(gzip("one\n") + "garbage\n", fmt::format("byte {} is behind the end", gzip("one\n").size()));
  refused(gzip("one\n") + "g", "is behind the end of the gzip data");
  refused(gzip("one\n") + "\x1f", "is behind the end of the gzip data");
  refused(gzip("one\n") + std::string(600000, '\0') + "g",
          fmt::format("byte {} is behind the end", gzip("one\n").size() + 600000));
  refused(gzip(long_text()) + "garbage", "is behind the end of the gzip data");
  const std::string packed = gzip(long_text());
  refused(packed.substr(0, packed.size() - 1), "is it a truncated copy?");
  refused(packed.substr(0, 5), "is it a truncated copy?");
  refused(gzip("one") + packed.substr(0, 300000), "is it a truncated copy?");
  std::string damaged = packed;
  damaged[200000] ^= 1;
  refused(damaged, "the gzip data is damaged");
  damaged = packed;
  damaged[packed.size() - 6] ^= 1;
  refused(damaged, "the gzip data is damaged");
}

TEST_CASE("other compressed files, and tables, are no text", "[line_reader]") {
  const std::string rest(100, '\1');
  refused(std::string("\xfd\x37zXZ\0", 6) + rest, "is compressed by xz, which is not supported; use xz -dc");
  for (const char* size : {"1", "9"})
    refused(std::string("BZh") + size + "1AY&SY" + rest, "is compressed by bzip2");
  refused("\x28\xb5\x2f\xfd" + rest, "is compressed by zstd");
  refused("PK\x03\x04" + rest, "is compressed by zip");
  refused("PAR1\x15" + rest, "is a file of Parquet and no text; convert it to JSONL first");
  refused(gzip("PAR1\x15" + rest), "is a file of Parquet");
  for (const std::string text : {"BZh is a format", "BZh91AY&S", "PAR1 is magic", "PK\n", "ARROW1 flies"})
    CHECK(read(text) == text);
}
