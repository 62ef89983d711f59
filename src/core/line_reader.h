#pragma once
// Reads lines of a file or of standard input, gzipped or not, in bounded memory.
#include <zlib.h>

#include <string>

namespace sluice {

class LineReader {
 public:
  /// "-" is standard input. Error(no_input): there is no such file.
  explicit LineReader(const std::string& path);
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  /// Reads the next line including its line end, or, of a line longer than `limit` bytes, the next part of
  /// that size. Returns false at the end of the file. Error(data): gzip data that is damaged, cut short, or
  /// followed by something else than gzip data and zeros; the content is no text but in a known format of
  /// compressed files or tables (xz, Parquet).
  bool next(std::string& line, size_t limit);
  /// Whether the line of the last part continues.
  bool within_line() const { return within_line_; }
  const std::string& path() const { return path_; }
  /// Number of the last line, or of the line of the last part, counted from 1.
  int64_t line_number() const { return line_number_; }

 private:
  bool refill();
  size_t read_packed(unsigned char* out, size_t room);
  bool next_member();
  size_t read_input(unsigned char* out, size_t room);
  bool load();
  void begin();

  std::string path_, buffer_, input_;
  int file_ = -1;
  bool begun_ = false, packed_ = false, packed_end_ = false;
  z_stream zlib_{};  // its input lies in input_
  int64_t input_read_ = 0;
  size_t at_ = 0, filled_ = 0;
  int64_t line_number_ = 0;
  bool within_line_ = false;
};

}  // namespace sluice
