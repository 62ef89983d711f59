#include "core/line_reader.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/io.h"

namespace sluice {

LineReader::LineReader(const std::string& path) : path_(path == "-" ? "standard input" : path) {
  if (path != "-") {
    if (!io::exists(path)) fail(ExitCode::no_input, "{}: no such file", path);
    if (io::is_directory(path)) fail(ExitCode::no_input, "{}: is a folder; name its files", path);
  }
  file_ = path == "-" ? gzdopen(::dup(STDIN_FILENO), "rb") : gzopen(path.c_str(), "rb");
  if (!file_) fail(ExitCode::no_input, "{}: cannot open: {}", path_, std::strerror(errno));
  gzbuffer(file_, 1 << 18);
  buffer_.resize(size_t{1} << 20);
}

LineReader::~LineReader() { gzclose(file_); }

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

bool LineReader::refill() {
  const int got = gzread(file_, buffer_.data(), static_cast<unsigned>(buffer_.size()));
  int code = Z_OK;
  const char* message = gzerror(file_, &code);
  if (got < 0 || (got == 0 && code == Z_BUF_ERROR)) {
    fail(ExitCode::data, "{}: cannot read: {}", path_,
         code == Z_ERRNO       ? std::strerror(errno)
         : code == Z_BUF_ERROR ? "the gzip data ends too early; is it a truncated copy?"
                               : message);
  }
  at_ = 0;
  filled_ = static_cast<size_t>(got);
  return got > 0;
}

}  // namespace sluice
