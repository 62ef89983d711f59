#include "run/tensorboard.h"

#include <catch2/catch.hpp>
#include <cstring>
#include <map>

#include "data/temporary.h"

namespace sluice {
namespace {

/// An independent reader: the protobuf fields of one message.
struct Field {
  uint64_t number = 0;
  std::string bytes;  // of length-delimited and fixed fields
  uint64_t varint = 0;
};

std::vector<Field> parse(std::string_view message) {
  std::vector<Field> fields;
  size_t at = 0;
  const auto varint = [&] {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<uint8_t>(message.at(at++));
      value |= static_cast<uint64_t>(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (at < message.size()) {
    Field f;
    const uint64_t key = varint();
    f.number = key >> 3;
    const uint64_t wire = key & 7;
    REQUIRE((wire == 0 || wire == 1 || wire == 2 || wire == 5));
    if (wire == 0) {
      f.varint = varint();
    } else {
      const uint64_t size = wire == 1 ? 8 : wire == 5 ? 4 : varint();
      REQUIRE(at + size <= message.size());
      f.bytes = message.substr(at, size);
      at += size;
    }
    fields.push_back(f);
  }
  return fields;
}

template <class T>
T raw(std::string_view bytes) {
  T value;
  REQUIRE(bytes.size() >= sizeof value);
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

std::vector<std::string> records(const std::string& path) {
  const std::string all = io::read_file(path);
  std::vector<std::string> events;
  for (size_t at = 0; at < all.size();) {
    const std::string_view rest = std::string_view(all).substr(at);
    const auto length = raw<uint64_t>(rest);
    REQUIRE(raw<uint32_t>(rest.substr(8)) == masked_crc32c(rest.substr(0, 8)));
    REQUIRE(rest.size() >= 16 + length);
    events.emplace_back(rest.substr(12, length));
    REQUIRE(raw<uint32_t>(rest.substr(12 + length)) == masked_crc32c(events.back()));
    at += 16 + length;
  }
  return events;
}

}  // namespace

TEST_CASE("CRC-32C gives the published check value", "[tensorboard]") {
  CHECK(crc32c("123456789") == 0xE3069283u);
  CHECK(masked_crc32c("123456789") == 0xC78AB0E5u);
  CHECK(crc32c("") == 0u);
  CHECK(crc32c(std::string(32, '\0')) == 0x8A9136AAu);  // RFC 3720, B.4
}

TEST_CASE("event files read back", "[tensorboard]") {
  test::TemporaryFolder folder;
  std::string path;
  {
    EventWriter writer(folder / "tb", 0);
    writer.add(1, {{"train/loss", 5.5}});
    writer.add(300, {{"train/loss", 2.25}, {"train/lr", 1e-3}});
    path = writer.path();
  }
  const auto events = records(path);
  REQUIRE(events.size() == 3);
  const auto first = parse(events[0]);
  REQUIRE(first.size() == 2);
  CHECK(first[0].number == 1);
  CHECK(raw<double>(first[0].bytes) > 1.6e9);
  CHECK(first[1].number == 3);
  CHECK(first[1].bytes == "brain.Event:2");

  const auto last = parse(events[2]);
  REQUIRE(last.size() == 3);
  CHECK(last[1].number == 2);
  CHECK(last[1].varint == 300);
  CHECK(last[2].number == 5);
  std::map<std::string, float> values;
  for (const Field& value : parse(last[2].bytes)) {
    const auto parts = parse(value.bytes);
    REQUIRE(parts.size() == 2);
    CHECK(parts[1].number == 2);
    values[parts[0].bytes] = raw<float>(parts[1].bytes);
  }
  CHECK(values == std::map<std::string, float>{{"train/loss", 2.25f}, {"train/lr", 1e-3f}});
}

TEST_CASE("a resumed run opens a new event file that drops later steps of the old one", "[tensorboard]") {
  test::TemporaryFolder folder;
  const EventWriter first(folder / "tb", 0);
  const EventWriter second(folder / "tb", 70);
  CHECK(first.path() != second.path());
  const auto events = records(second.path());
  REQUIRE(events.size() == 2);
  const auto start = parse(events[1]);
  REQUIRE(start.size() == 3);
  CHECK(start[1].varint == 71);  // TensorBoard keeps what is before: the 70th step and its evaluation
  CHECK(start[2].number == 7);  // session_log
  CHECK(parse(start[2].bytes).at(0).varint == 1);
}

}  // namespace sluice
