#include "core/line_reader.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "core/error.h"
#include "core/io.h"

namespace sluice {

namespace {

using namespace std::string_view_literals;

/// Formats whose bytes would otherwise pass for a text, by how their files begin.
struct OtherFormat {
  std::string_view begins, name, program;  // program: prints the content
};
constexpr OtherFormat kOtherFormats[] = {
    {"\xfd\x37zXZ\0"sv, "xz", "xz -dc"},
    {"BZh1\x31\x41Y&SY"sv, "bzip2", "bzip2 -dc"},
    {"\x28\xb5\x2f\xfd"sv, "zstd", "zstd -dc"},
    {"\x04\x22\x4d\x18"sv, "lz4", "lz4 -dc"},
    {"PK\x03\x04"sv, "zip", "unzip -p"},
    {"7z\xbc\xaf\x27\x1c"sv, "7-Zip", "7z e -so"},
    {"PAR1\x15"sv, "Parquet", ""},
    {"ARROW1\0\0"sv, "Arrow", ""},
};

void refuse_other_formats(std::string_view content, const std::string& path) {
  std::string head(content.substr(0, 16));
  if (head.starts_with("BZh") && head.size() > 3 && head[3] >= '1' && head[3] <= '9')
    head[3] = '1';  // the size of bzip2's blocks
  for (const OtherFormat& format : kOtherFormats) {
    if (!head.starts_with(format.begins)) continue;
    if (format.program.empty())
      fail(ExitCode::data, "{}: is a file of {} and no text; convert it to JSONL first", path, format.name);
    fail(ExitCode::data,
         "{}: is compressed by {}, which is not supported; use {} {} | and - for standard input", path,
         format.name, format.program, path == "standard input" ? "FILE" : path);
  }
}

}  // namespace

LineReader::LineReader(const std::string& path) : path_(path == "-" ? "standard input" : path) {
  if (path != "-") {
    if (!io::exists(path)) fail(ExitCode::no_input, "{}: no such file", path);
    if (io::is_directory(path)) fail(ExitCode::no_input, "{}: is a folder; name its files", path);
  }
  file_ = path == "-" ? ::dup(STDIN_FILENO) : ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file_ < 0) fail(ExitCode::no_input, "{}: cannot open: {}", path_, std::strerror(errno));
  buffer_.resize(size_t{1} << 20);
}

LineReader::~LineReader() {
  if (packed_) inflateEnd(&zlib_);
  ::close(file_);
}

bool LineReader::next(std::string& line, size_t limit) {
  line.clear();
  const bool continued = within_line_;
  within_line_ = false;
  while (true) {
    const size_t room = std::min(filled_ - at_, limit - line.size());
    const void* newline = std::memchr(buffer_.data() + at_, '\n', room);
    const size_t end =
        newline ? static_cast<size_t>(static_cast<const char*>(newline) - buffer_.data()) + 1 : at_ + room;
    line.append(buffer_, at_, end - at_);
    at_ = end;
    within_line_ = !newline && line.size() == limit;
    if (newline || within_line_ || !refill()) break;
  }
  if (!line.empty() && !continued) ++line_number_;
  return !line.empty();
}

/// Reads until `room` bytes are there or the file ends.
size_t LineReader::read_input(unsigned char* out, size_t room) {
  size_t got = 0;
  while (got < room) {
    const ssize_t n = ::read(file_, out + got, room - got);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(ExitCode::data, "{}: cannot read: {}", path_, std::strerror(errno));
    if (n == 0) break;
    got += static_cast<size_t>(n);
  }
  input_read_ += static_cast<int64_t>(got);
  return got;
}

/// More compressed input, behind what is left of the last; false at the end of the file.
bool LineReader::load() {
  if (zlib_.avail_in > 0) std::memmove(input_.data(), zlib_.next_in, zlib_.avail_in);
  auto* const input = reinterpret_cast<unsigned char*>(input_.data());
  const size_t got = read_input(input + zlib_.avail_in, input_.size() - zlib_.avail_in);
  zlib_.next_in = input;
  zlib_.avail_in += static_cast<unsigned>(got);
  return got > 0;
}

/// Looks at the first bytes. A file of one byte is text, whatever the byte.
void LineReader::begin() {
  begun_ = true;
  input_.resize(size_t{1} << 18);
  load();
  packed_ = zlib_.avail_in >= 2 && input_.starts_with("\x1f\x8b");
  constexpr int kGzip = 16;
  if (packed_ && inflateInit2(&zlib_, kGzip + MAX_WBITS) != Z_OK) {
    packed_ = false;
    fail(ExitCode::out_of_memory, "{}: no memory to unpack gzip data", path_);
  }
}

/// Goes on to the next of several gzip members. Behind the last one only zeros may follow, with which tapes
/// and some file systems fill their blocks.
bool LineReader::next_member() {
  if (zlib_.avail_in < 2) load();
  if (zlib_.avail_in >= 2 && zlib_.next_in[0] == 0x1f && zlib_.next_in[1] == 0x8b) {
    inflateReset(&zlib_);
    return true;
  }
  do {
    for (; zlib_.avail_in > 0; ++zlib_.next_in, --zlib_.avail_in)
      if (*zlib_.next_in != 0)
        fail(ExitCode::data,
             "{}: byte {} is behind the end of the gzip data and belongs to no other gzip data; is the file "
             "damaged, or was a plain text appended? (gzip -dc reads what is before it)",
             path_, input_read_ - zlib_.avail_in);
  } while (load());
  return false;
}

size_t LineReader::read_packed(unsigned char* out, size_t room) {
  zlib_.next_out = out;
  zlib_.avail_out = static_cast<unsigned>(room);
  while (zlib_.avail_out > 0 && !packed_end_) {
    if (zlib_.avail_in == 0 && !load())
      fail(ExitCode::data, "{}: cannot read: the gzip data ends too early; is it a truncated copy?", path_);
    const int code = inflate(&zlib_, Z_NO_FLUSH);
    if (code == Z_STREAM_END)
      packed_end_ = !next_member();
    else if (code != Z_OK && code != Z_BUF_ERROR)
      fail(ExitCode::data, "{}: cannot read: the gzip data is damaged: {}", path_,
           zlib_.msg ? zlib_.msg : "no reason given");
  }
  return room - zlib_.avail_out;
}

bool LineReader::refill() {
  const bool first = !begun_;
  if (first) begin();
  auto* const out = reinterpret_cast<unsigned char*>(buffer_.data());
  at_ = 0;
  filled_ = 0;
  if (packed_) {
    filled_ = read_packed(out, buffer_.size());
  } else {
    // The first bytes were read to look at them.
    filled_ = zlib_.avail_in;
    std::memcpy(out, input_.data(), filled_);
    zlib_.avail_in = 0;
    filled_ += read_input(out + filled_, buffer_.size() - filled_);
  }
  if (first) refuse_other_formats(std::string_view(buffer_.data(), filled_), path_);
  return filled_ > 0;
}

}  // namespace sluice
