#include "run/tensorboard.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>

namespace sluice {
namespace {

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1) ? 0x82F63B78u : 0);
    table[i] = c;
  }
  return table;
}
constexpr auto kCrcTable = crc_table();

// Protobuf: a field is a varint key (number * 8 + wire type) and its value.
enum Wire : uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

template <class T>
void put_raw(std::string& out, T value) {  // little-endian, like all supported platforms
  static_assert(std::endian::native == std::endian::little);
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}
void put_varint(std::string& out, uint64_t value) {
  for (; value >= 128; value >>= 7) out.push_back(static_cast<char>(value | 128));
  out.push_back(static_cast<char>(value));
}
void put_key(std::string& out, int field, Wire wire) { out.push_back(static_cast<char>(field * 8 + wire)); }
void put_bytes(std::string& out, int field, std::string_view bytes) {
  put_key(out, field, kBytes);
  put_varint(out, bytes.size());
  out.append(bytes);
}

/// Event.wall_time = 1 and, unless negative, Event.step = 2.
std::string event_at(int64_t step) {
  std::string event;
  put_key(event, 1, kFixed64);
  put_raw(event, std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count());
  if (step >= 0) {
    put_key(event, 2, kVarint);
    put_varint(event, static_cast<uint64_t>(step));
  }
  return event;
}

}  // namespace

uint32_t crc32c(std::string_view data) {
  uint32_t c = ~0u;
  for (const char byte : data) c = (c >> 8) ^ kCrcTable[(c ^ static_cast<uint8_t>(byte)) & 255];
  return ~c;
}

uint32_t masked_crc32c(std::string_view data) { return std::rotr(crc32c(data), 15) + 0xA282EAD8u; }

EventWriter::EventWriter(const std::string& folder, int64_t first_step) {
  if (io::is_link(folder))
    fail(ExitCode::cannot_create, "{} is a symbolic link; events are written only in a folder of the run",
         folder);
  io::make_directories(folder);
  char host[256] = "localhost";
  gethostname(host, sizeof host - 1);
  const auto now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  int n = 0;
  do path_ = fmt::format("{}/events.out.tfevents.{:010}.{}.{}.{}", folder, now, host, getpid(), n++);
  while (io::exists(path_));
  file_ = std::make_unique<io::OutputFile>(path_, io::OutputFile::Mode::create_new);

  std::string version = event_at(-1);
  put_bytes(version, 3, "brain.Event:2");  // Event.file_version
  record(version);
  if (first_step > 0) {
    std::string log;
    put_key(log, 1, kVarint);  // SessionLog.status = START
    put_varint(log, 1);
    std::string start = event_at(first_step + 1);
    put_bytes(start, 7, log);
    record(start);
  }
}

void EventWriter::add(int64_t step, const std::vector<std::pair<std::string, double>>& scalars) {
  std::string summary;
  for (const auto& [tag, x] : scalars) {
    std::string value;
    put_bytes(value, 1, tag);
    put_key(value, 2, kFixed32);  // simple_value
    put_raw(value, static_cast<float>(x));
    put_bytes(summary, 1, value);
  }
  std::string event = event_at(step);
  put_bytes(event, 5, summary);
  record(event);
}

void EventWriter::record(std::string_view event) {
  std::string out;
  put_raw(out, static_cast<uint64_t>(event.size()));
  put_raw(out, masked_crc32c(out));
  out.append(event);
  put_raw(out, masked_crc32c(event));
  file_->write(out);
}

}  // namespace sluice
