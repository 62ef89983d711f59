#pragma once
// What a person sees of a run (README.md): lines, or one rewritten line with a bar; both also in
// RUN/console.log.
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "config/config.h"
#include "core/io.h"

namespace sluice {

std::string format_count(double n);      // 950, 12.3k, 1.42M, 3.10B
std::string format_duration(double s);   // 45s, 2m05s, 3h21m, 2d04h
std::string format_exponent(double lr);  // 6.0e-4
std::string format_mib(int64_t bytes);   // "12.3"

/// What the console can do, found from the streams and the environment.
struct Terminal {
  bool bar = false;      // rewrite one line
  bool colour = false;   // NO_COLOR unset, and a terminal
  bool unicode = false;  // the locale is UTF-8
  int width = 80;        // COLUMNS, or the window's

  /// auto draws a bar only when stdout and stderr are terminals, TERM is not dumb and no launcher started us
  /// (under mpirun every rank's stdout looks like a terminal).
  static Terminal detect(ConsoleMode mode);
};

struct Progress {
  int64_t step = 0, max_steps = 0;  // steps done
  double loss = 0, grad_norm = 0, lr = 0, tokens_per_second = 0;
  double seconds_left = 0;  // negative: unknown
  bool rough = false;       // too few steps to trust seconds_left
  int64_t skipped = 0;
  struct Labelled {
    std::string label;
    double value = 0;
    int digits = 3;  // after the decimal point
  };
  std::vector<Labelled> losses;  // of the step, beside the text's: what they ask to be shown
};

/// "step  1200/19073  6.3%  [bar]  loss 3.412  gn 0.41  lr 6.0e-4  1.42M tok/s  load 1.31  ETA 3h21m",
/// without the bar in lines mode.
std::string format_progress(const Progress& progress, const Terminal& terminal);

class Console {
 public:
  Console(ConsoleMode mode, const Terminal& terminal) : mode_(mode), terminal_(terminal) {}
  ~Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  /// From here on lines also go to this file. A failing write stops that, not the run.
  void log_to(const std::string& path);
  /// One line, on stdout.
  void line(const std::string& text);
  /// One line, on stderr.
  void warning(const std::string& text);
  /// A logged step: a line, or the bar.
  void progress(const Progress& p);
  /// Redraws the bar between logged steps, at most five times a second; nothing in lines mode.
  void tick(const Progress& p);

  const Terminal& terminal() const { return terminal_; }

 private:
  void write(const std::string& text, bool error);
  void log(const std::string& text);
  void clear_bar();
  void draw(const Progress& p);

  std::mutex mutex_;  // warnings also come from the thread that writes checkpoints
  ConsoleMode mode_;
  Terminal terminal_;
  std::unique_ptr<io::OutputFile> file_;
  bool bar_shown_ = false;
  double drawn_at_ = 0;
};

/// While it lives, spdlog's messages go through the console (and so do not tear the bar, and reach
/// console.log).
class ConsoleWarnings {
 public:
  explicit ConsoleWarnings(Console& console);
  ~ConsoleWarnings();
  ConsoleWarnings(const ConsoleWarnings&) = delete;
  ConsoleWarnings& operator=(const ConsoleWarnings&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
